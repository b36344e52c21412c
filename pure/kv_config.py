"""The KV cache's configuration: groups of layers, block sizes, how many blocks fit, which tensors hold them.

Layers of one group share block tables. By default every layer has a tensor of its own, and groups may hand out block
ids independently. Where the scheduler draws the ids of all groups from one pool (`shared_pool`), a block belongs to
one group at a time, so the n-th layers of all groups lie in one tensor: the memory goes to whoever needs it.
Source: vllm/v1/core/kv_cache_utils.py, vllm/v1/worker/gpu_model_runner.py initialize_kv_cache.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch

from purestep.pure.errors import KVCacheConfigError
from purestep.pure.models.model import KVLayerSpec
from purestep.pure.records.kv_config import (
    BlockSizes,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MultipleOf,
)

FP8 = torch.float8_e4m3fn
KV_CACHE_DTYPES = MappingProxyType(  # by upstream's names; auto: the model's
    {
        "auto": None,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "fp8": FP8,
        "fp8_e4m3": FP8,
    }
)
MIN_BLOCKS = 2  # the null block, and one that can be given away
NHD = (
    0,
    1,
    2,
    3,
    4,
)  # memory order of (block, keys or values, token, head, dim): a token's heads lie together
HND = (0, 1, 3, 2, 4)  # a head's tokens lie together


def kv_cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The type of keys and values in the cache, by upstream's name for it.

    Raises:
        KVCacheConfigError: no such name.
    Source: vllm/config/cache.py CacheDType.
    """
    if not isinstance(name, str) or name not in KV_CACHE_DTYPES:
        raise KVCacheConfigError(
            f"kv_cache_dtype={name!r}: give one of {', '.join(KV_CACHE_DTYPES)}; auto is the model's own type"
        )
    return KV_CACHE_DTYPES[name] or model_dtype


def group_by_window(windows: Sequence[int | None]) -> tuple[int, ...]:
    """A KV group for every layer: layers that see equally far back share one, numbered as they first occur.

    So blocks behind the window of a group can be given back, though other layers still need theirs.
    """
    distinct = list(dict.fromkeys(windows))
    return tuple(distinct.index(window) for window in windows)


def kernel_block_size(block_size: int, supported: Sequence[BlockSizes]) -> int:
    """The tokens in a kernel block, where the scheduler's blocks hold `block_size`.

    `supported` has the block sizes of every attention kernel of the group. It is the scheduler's size if all support
    it, else the largest size named by any kernel that all support and that divides it.

    Raises:
        KVCacheConfigError: there is none.
    """
    if all(_supports(sizes, block_size) for sizes in supported):
        return block_size
    named = {size for sizes in supported for size in sizes if isinstance(size, int)}
    for size in sorted(named, reverse=True):
        if block_size % size == 0 and all(_supports(sizes, size) for sizes in supported):
            return size
    shown = "; ".join(", ".join(map(_shown, sizes)) for sizes in supported)
    raise KVCacheConfigError(
        f"block_size={block_size}: the attention kernels support {shown}, and no size of all of them divides it: "
        "choose a block size that one of these sizes divides"
    )


def _supports(sizes: BlockSizes, block_size: int) -> bool:
    return any(block_size == s if isinstance(s, int) else block_size % s.base == 0 for s in sizes)


def _shown(size: int | MultipleOf) -> str:
    return str(size) if isinstance(size, int) else f"multiples of {size.base}"


def kv_cache_groups(
    kv_layers: Sequence[KVLayerSpec],
    block_sizes: Sequence[int],
    *,
    supported: Sequence[BlockSizes] = (),
) -> tuple[KVCacheGroupSpec, ...]:
    """The groups that a model's layers name, with the scheduler's block size of each.

    `supported` is that of `kernel_block_size`, for all groups. A group of layers with several windows keeps what the
    farthest-seeing needs.

    Raises:
        KVCacheConfigError: groups are not numbered 0, 1, ... as there are block sizes, a block size is not positive,
            or the kernels have none to match.
    """
    named = sorted({layer.group for layer in kv_layers})
    if named != list(range(len(block_sizes))):
        raise KVCacheConfigError(
            f"the model's layers name the KV groups {named}, and there are {len(block_sizes)} block sizes: "
            f"number the groups from 0 on, and give a block size for each"
        )
    groups = []
    for group, block_size in enumerate(block_sizes):
        if block_size < 1:
            raise KVCacheConfigError(f"block_size={block_size} of KV group {group}: it must be at least 1")
        layers = tuple(i for i, layer in enumerate(kv_layers) if layer.group == group)
        windows = [kv_layers[i].sliding_window for i in layers]
        finite = [window for window in windows if window is not None]
        groups.append(
            KVCacheGroupSpec(
                layers=layers,
                block_size=block_size,
                kernel_block_size=kernel_block_size(block_size, supported),
                sliding_window=max(finite) if len(finite) == len(windows) else None,
            )
        )
    return tuple(groups)


def num_blocks_for(num_bytes: int, bytes_per_block: int) -> int:
    """How many blocks fit, the null block among them; `bytes_per_block` is what one id takes in all tensors.

    Raises:
        KVCacheConfigError: not even the null block and one more.
    """
    num_blocks = num_bytes // bytes_per_block
    if num_blocks < MIN_BLOCKS:
        raise KVCacheConfigError(
            f"{num_bytes:,} bytes of KV cache hold {num_blocks} blocks of {bytes_per_block:,} bytes; the null block "
            f"and one more are needed: give at least {MIN_BLOCKS * bytes_per_block:,} bytes, or smaller blocks"
        )
    return num_blocks


def kv_cache_config(
    kv_layers: Sequence[KVLayerSpec],
    *,
    num_bytes: int | None = None,
    max_num_blocks: int | None = None,
    block_sizes: Sequence[int],
    dtype: torch.dtype,
    supported: Sequence[BlockSizes] = (),
    shared_pool: bool = False,
) -> KVCacheConfig:
    """The cache of a model in at most `num_bytes` and `max_num_blocks`: as many blocks as that allows, in every group.

    One of the two is enough. With `shared_pool`, block ids of all groups come from one pool, and the n-th layers of the
    groups share a tensor.

    Raises:
        KVCacheConfigError: as `kv_cache_groups` and `num_blocks_for`; with `shared_pool` also layers of different page
            sizes.
    """
    groups = kv_cache_groups(kv_layers, block_sizes, supported=supported)
    specs = tuple(
        KVCacheSpec(
            block_size=block_sizes[layer.group],
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=dtype,
            sliding_window=layer.sliding_window,
        )
        for layer in kv_layers
    )
    if not specs:
        raise KVCacheConfigError("a model without KV layers needs no KV cache: make no configuration for it")
    sharers = _sharers(groups, specs) if shared_pool else tuple((layer,) for layer in range(len(specs)))
    pages = [specs[layers[0]].page_bytes for layers in sharers]
    num_blocks = _num_blocks(num_bytes, max_num_blocks, sum(pages))
    tensors = [KVCacheTensor(num_blocks * page, layers) for page, layers in zip(pages, sharers, strict=True)]
    return KVCacheConfig(num_blocks, specs, groups, tuple(tensors))


def _num_blocks(num_bytes: int | None, max_num_blocks: int | None, bytes_per_block: int) -> int:
    """The most blocks within both limits, of which at least one is given."""
    if max_num_blocks is not None and max_num_blocks < MIN_BLOCKS:
        raise KVCacheConfigError(f"max_num_blocks={max_num_blocks}: the null block and one more are needed")
    if num_bytes is None:
        if max_num_blocks is None:
            raise KVCacheConfigError("a KV cache without a size: give num_bytes, max_num_blocks, or both")
        return max_num_blocks
    num_blocks = num_blocks_for(num_bytes, bytes_per_block)
    return num_blocks if max_num_blocks is None else min(num_blocks, max_num_blocks)


def _sharers(groups: Sequence[KVCacheGroupSpec], specs: Sequence[KVCacheSpec]) -> tuple[tuple[int, ...], ...]:
    """The n-th layers of all groups, for every n."""
    pages = {spec.page_bytes for spec in specs}
    if len(pages) > 1:
        by_group = [sorted({specs[i].page_bytes for i in group.layers}) for group in groups]
        raise KVCacheConfigError(
            f"layers that share tensors need pages of one size, and the groups' blocks have {by_group} bytes: "
            "choose block sizes that make them equal, or give every group a pool of its own"
        )
    most = max(len(group.layers) for group in groups)
    return tuple(tuple(group.layers[n] for group in groups if n < len(group.layers)) for n in range(most))


def check_kv_cache_config(config: KVCacheConfig) -> None:
    """A configuration made elsewhere has a place for every layer, and no two layers in one place.

    Raises:
        KVCacheConfigError: a layer in no group or tensor or in several, layers of one group in one tensor, bytes that
            are not `num_blocks` whole pages, blocks that kernel blocks do not divide or that differ within a group.
    """
    layers = list(range(len(config.specs)))
    for kind, named in (
        ("groups", [layer for group in config.groups for layer in group.layers]),
        ("tensors", [layer for tensor in config.tensors for layer in tensor.shared_by]),
    ):
        if sorted(named) != layers:
            raise KVCacheConfigError(
                f"the {kind} name the layers {sorted(named)}: name each of 0 to {len(layers) - 1} exactly once"
            )
    if config.num_blocks < MIN_BLOCKS:
        raise KVCacheConfigError(f"num_blocks={config.num_blocks}: the null block and one more are needed")
    for index, group in enumerate(config.groups):
        sizes = sorted({config.specs[layer].block_size for layer in group.layers})
        if sizes != [group.block_size] or group.block_size % group.kernel_block_size:
            raise KVCacheConfigError(
                f"KV group {index} has blocks of {group.block_size} tokens, its layers {sizes}, its kernels "
                f"{group.kernel_block_size}: the first two must agree, and the last divide them"
            )
    for tensor in config.tensors:
        _check_tensor(config, tensor)


def _check_tensor(config: KVCacheConfig, tensor: KVCacheTensor) -> None:
    of_group = [sum(layer in group.layers for layer in tensor.shared_by) for group in config.groups]
    if max(of_group) > 1:
        raise KVCacheConfigError(
            f"layers {tensor.shared_by} share a tensor, and {max(of_group)} of them are of one KV group: they would "
            "write over each other; let only layers of different groups share"
        )
    for layer in tensor.shared_by:
        page = config.specs[layer].page_bytes
        if tensor.num_bytes != config.num_blocks * page:
            raise KVCacheConfigError(
                f"layer {layer} lies in a tensor of {tensor.num_bytes:,} bytes: {config.num_blocks} blocks of {page:,} "
                f"bytes need {config.num_blocks * page:,}"
            )


def kv_cache_shape(config: KVCacheConfig, layer: int) -> tuple[int, int, int, int, int]:
    """The shape of a layer's cache: (kernel blocks, 2, tokens of a kernel block, KV heads, dim)."""
    spec = config.specs[layer]
    group = next(group for group in config.groups if layer in group.layers)
    num_blocks = config.num_blocks * group.num_kernel_blocks
    return num_blocks, 2, group.kernel_block_size, spec.num_kv_heads, spec.head_dim


def kv_cache_strides(shape: Sequence[int], order: Sequence[int] = NHD) -> tuple[int, ...]:
    """Strides, in elements, that lay `shape` out in memory with its dimensions in `order`, the outermost first.

    Blocks are outermost in every order that kernel blocks or shared tensors allow: a block is one run of bytes.

    Raises:
        KVCacheConfigError: an order that does not begin with 0 or does not name every dimension once.
    """
    if sorted(order) != list(range(len(shape))) or order[0] != 0:
        raise KVCacheConfigError(
            f"memory order {tuple(order)}: name each dimension of {tuple(shape)} once, blocks (0) first"
        )
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= shape[dimension]
    return tuple(strides)
