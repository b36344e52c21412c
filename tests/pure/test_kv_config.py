"""The KV cache's configuration: bytes counted, places distinct, sizes that kernels support."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import KVCacheConfigError
from purestep.pure.initial import initial_state
from purestep.pure.kv_config import (
    HND,
    KV_CACHE_DTYPES,
    NHD,
    check_kv_cache_config,
    group_by_window,
    kernel_block_size,
    kv_cache_config,
    kv_cache_dtype,
    kv_cache_groups,
    kv_cache_shape,
    kv_cache_strides,
    num_blocks_for,
)
from purestep.pure.models.model import KVLayerSpec, Model
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.kv_config import KVCacheConfig, KVCacheTensor, MultipleOf, kernel_block_ids
from tests.laws import assert_pure
from tests.profiles import examples

Setup = tuple[list[tuple[int, int, int | None, int]], list[int], int]  # layers, block sizes, room for blocks
kernel_sizes = st.one_of(
    st.sampled_from((1, 2, 4, 8, 16)), st.sampled_from((2, 4, 8)).map(lambda base: (base,))
)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Layers of any shape in any of some groups, every group used; plain values, made records by `_config`."""
    num_groups = draw(st.integers(1, 3))
    numbers = list(range(num_groups)) + draw(st.lists(st.integers(0, num_groups - 1), max_size=4))
    layers = [
        (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.none() | st.integers(1, 9)), group)
        for group in draw(st.permutations(numbers))
    ]
    return (
        layers,
        draw(st.lists(st.integers(1, 8), min_size=num_groups, max_size=num_groups)),
        draw(st.integers(2, 7)),
    )


@st.composite
def pooled(draw: st.DrawFn) -> Setup:
    """Groups whose pages have one size: blocks of as many elements a token as they have fewer tokens."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 4, 8)), min_size=1, max_size=3))
    numbers = list(range(len(sizes))) + draw(st.lists(st.integers(0, len(sizes) - 1), max_size=4))
    layers = []
    for group in draw(st.permutations(numbers)):
        elements = 8 // sizes[group]
        heads = draw(st.sampled_from([n for n in (1, 2, 4, 8) if elements % n == 0]))
        layers.append((heads, elements // heads, None, group))
    return layers, sizes, draw(st.integers(2, 5))


def _layers(setup: Setup) -> tuple[KVLayerSpec, ...]:
    return tuple(KVLayerSpec(*fields) for fields in setup[0])


def _config(setup: Setup, spare: int = 0, **options: Any) -> KVCacheConfig:
    """In as many bytes as hold the wanted blocks, and a few more."""
    layers, block_sizes, num_blocks = _layers(setup), setup[1], setup[2]
    known = {"block_sizes": block_sizes, "dtype": torch.float16} | options
    smallest = kv_cache_config(layers, num_bytes=1 << 40, **known)
    per_block = sum(tensor.num_bytes for tensor in smallest.tensors) // smallest.num_blocks
    return assert_pure(
        kv_cache_config, layers, num_bytes=num_blocks * per_block + min(spare, per_block - 1), **known
    )


@given(setups(), st.integers(0, 500))
def test_as_many_blocks_as_fit_and_every_layer_has_its_place(setup: Setup, spare: int) -> None:
    """Bytes are exact: pages of every layer times blocks; groups are those that the layers name."""
    config = _config(setup, spare)
    check_kv_cache_config(config)
    assert config.num_blocks == setup[2]
    pages = [2 * setup[1][group] * heads * dim * 2 for heads, dim, _, group in setup[0]]
    assert [spec.page_bytes for spec in config.specs] == pages
    assert config.num_bytes == config.num_blocks * sum(pages)
    assert config.block_sizes == config.kernel_block_sizes == tuple(setup[1])
    for number, group in enumerate(config.groups):
        assert group.layers == tuple(i for i, layer in enumerate(setup[0]) if layer[3] == number)
        windows = [setup[0][i][2] for i in group.layers]
        assert group.sliding_window == (None if None in windows else max(windows))  # type: ignore[type-var]


@given(pooled())
def test_a_shared_pool_needs_tensors_for_the_largest_group_only(setup: Setup) -> None:
    """The n-th layers of all groups share one; an id takes one page in each, whoever has it."""
    config = _config(setup, shared_pool=True)
    check_kv_cache_config(config)
    assert len(config.tensors) == max(len(group.layers) for group in config.groups)
    for n, tensor in enumerate(config.tensors):
        assert tensor.shared_by == tuple(g.layers[n] for g in config.groups if n < len(g.layers))
        assert tensor.num_bytes == config.num_blocks * config.specs[0].page_bytes


@examples(0.2)  # every byte of a cache is written and read
@given(pooled(), st.booleans(), st.sampled_from((NHD, HND)), st.data())
def test_what_one_layer_writes_no_other_layer_overwrites(
    setup: Setup, shared_pool: bool, order: tuple[int, ...], data: st.DataObject
) -> None:
    """Each layer writes all blocks of its group and finds them as it left them, in either memory order.

    In a shared pool the groups' blocks are different ones; apart, every group has all of them.
    """
    config = _config(setup, shared_pool=shared_pool)
    owner = data.draw(
        st.lists(
            st.integers(0, len(config.groups) - 1), min_size=config.num_blocks, max_size=config.num_blocks
        )
    )
    storages = {
        layer: torch.zeros(tensor.num_bytes // 2, dtype=torch.float16)
        for tensor in config.tensors
        for layer in tensor.shared_by[:1]
    }
    written = []
    for layer in range(len(config.specs)):
        first = next(t.shared_by[0] for t in config.tensors if layer in t.shared_by)
        shape = kv_cache_shape(config, layer)
        view = storages[first].as_strided(shape, kv_cache_strides(shape, order))
        group = next(g for g, spec in enumerate(config.groups) if layer in spec.layers)
        own = [b for b in range(config.num_blocks) if not shared_pool or owner[b] == group]
        values = torch.arange(view[own].numel(), dtype=torch.float16).view_as(view[own]) * 8 + layer
        view[own] = values
        written.append((view, own, values))
    for view, own, values in written:
        assert torch.equal(view[own], values)


@given(st.integers(1, 64), st.lists(st.lists(kernel_sizes, min_size=1, max_size=3), max_size=3))
def test_a_kernel_block_is_the_largest_that_all_kernels_take(
    block_size: int, kernels: list[list[Any]]
) -> None:
    """The scheduler's own size if all take it, else the largest divisor that some kernel names and all take."""
    supported = [tuple(MultipleOf(*s) if isinstance(s, tuple) else s for s in sizes) for sizes in kernels]

    def takes(sizes: list[Any], size: int) -> bool:
        return any(size % s[0] == 0 if isinstance(s, tuple) else size == s for s in sizes)

    named = {s for sizes in kernels for s in sizes if isinstance(s, int)}
    possible = [
        s
        for s in sorted(named | {block_size}, reverse=True)
        if block_size % s == 0 and all(takes(sizes, s) for sizes in kernels)
    ]
    if possible:
        assert kernel_block_size(block_size, supported) == possible[0]
    else:
        with pytest.raises(
            KVCacheConfigError, match=f"block_size={block_size}: the attention kernels support"
        ):
            kernel_block_size(block_size, supported)


@given(st.lists(st.integers(0, 999), max_size=6), st.integers(1, 4), st.integers(1, 5))
def test_kernel_blocks_cover_the_same_slots(ids: list[int], ratio: int, kernel_size: int) -> None:
    """Slots counted through the scheduler's table equal slots counted through the kernels', token by token."""
    block_size = ratio * kernel_size
    expanded = kernel_block_ids(np.array(ids, np.int32), block_size=block_size, kernel_block_size=kernel_size)
    assert expanded.dtype == np.int32
    by_scheduler = [block * block_size + offset for block in ids for offset in range(block_size)]
    by_kernel = [block * kernel_size + offset for block in expanded.tolist() for offset in range(kernel_size)]
    assert by_kernel == by_scheduler


@pytest.mark.parametrize("kernel_size", [12, 32])
def test_a_kernel_block_must_divide_the_schedulers(kernel_size: int) -> None:
    """Upstream refuses it too."""
    with pytest.raises(
        KVCacheConfigError, match=f"16 tokens can not be cut into kernel blocks of {kernel_size}"
    ):
        kernel_block_ids(np.array([1], np.int32), block_size=16, kernel_block_size=kernel_size)


@given(st.lists(st.none() | st.integers(1, 4), max_size=12))
def test_layers_are_grouped_by_how_far_they_see(windows: list[int | None]) -> None:
    """Two layers share a group exactly if they have one window; groups are numbered as they first occur."""
    groups = group_by_window(windows)
    for (i, a), (j, b) in itertools.combinations(enumerate(windows), 2):
        assert (groups[i] == groups[j]) == (a == b)
    assert list(dict.fromkeys(groups)) == list(range(len(set(groups))))


def test_block_tables_of_upstream_with_smaller_kernel_blocks(oracle_dir: Path) -> None:
    """Ids multiplied out as recorded, and the recorded slots through them."""
    cases = json.loads((oracle_dir / "block_table.json").read_text())
    assert len(cases) == 36
    smaller = 0
    for case in cases:
        size, block_size = case["kernel_block_size"], case["block_size"]
        smaller += block_size > size
        slots = []
        starts = case["query_start_loc"]
        for index, (row, more) in enumerate(zip(case["rows"], case["appended"], strict=True)):
            ids = np.array(row + more, np.int32)
            table = kernel_block_ids(ids, block_size=block_size, kernel_block_size=size).tolist()
            assert table == case["table_rows"][index]
            span = slice(starts[index], starts[index + 1])
            slots += [table[p // size] * size + p % size for p in case["positions"][span]]
        assert slots == case["slot_mapping"]
    assert smaller > 0


@pytest.mark.parametrize("name", ["hybrid_groups", "single_greedy"])
def test_groups_are_those_of_upstream(traces_dir: Path, models_dir: Path, name: str) -> None:
    """The recorded groups: window and number of layers of each, in order."""
    meta = json.loads((traces_dir / f"{name}.json").read_text())["meta"]
    recorded = meta["kv_cache_groups"]
    hf_config = json.loads((models_dir / meta["model"] / "config.json").read_text())
    kinds = hf_config.get("layer_types") or ["full_attention"] * hf_config["num_hidden_layers"]
    windows = [hf_config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    numbers = group_by_window(windows)
    layers = [KVLayerSpec(2, 16, window, group) for window, group in zip(windows, numbers, strict=True)]
    groups = kv_cache_groups(layers, [meta["block_size"]] * len(recorded))
    assert [(g.sliding_window, len(g.layers), g.block_size) for g in groups] == [
        (entry["sliding_window"], entry["layers"], entry["block_size"]) for entry in recorded
    ]


def test_shapes_are_those_of_the_device_state() -> None:
    """`initial_state` allocates what the configuration says, where kernels take the scheduler's blocks."""
    setup: Setup = ([(2, 4, None, 0), (1, 8, 3, 1)], [4, 2], 6)
    config = _config(setup)
    limits = BatchLimits(2, 16, 11, config.block_sizes, (config.num_blocks,) * 2)
    model = Model("none", (), None, _layers(setup), 11, 16)
    cache = initial_state(model, limits, dtype=torch.float16).kv
    for layer, kv in enumerate(cache):
        assert tuple(kv.shape) == kv_cache_shape(config, layer)
        assert kv.stride() == kv_cache_strides(tuple(kv.shape))
    assert sum(kv.nbytes for kv in cache) == config.num_bytes


def test_smaller_kernel_blocks_are_more_blocks_of_the_same_bytes() -> None:
    """Blocks of 12 tokens that kernels see as three of 4."""
    setup: Setup = ([(2, 4, None, 0)], [12], 5)
    config = _config(setup, supported=[(4, 8), (MultipleOf(4),)])
    assert (config.block_sizes, config.kernel_block_sizes) == ((12,), (4,))
    assert kv_cache_shape(config, 0) == (15, 2, 4, 2, 4)
    assert 2 * int(np.prod(kv_cache_shape(config, 0))) == config.num_bytes


def test_the_same_bytes_give_a_hybrid_model_more_blocks_from_one_pool() -> None:
    """Two groups of two layers: an id takes two pages instead of four."""
    layers = [KVLayerSpec(2, 16, window, group) for window, group in ((8, 0), (None, 1)) * 2]
    known: dict[str, Any] = {"num_bytes": 10**6, "block_sizes": (16, 16), "dtype": torch.bfloat16}
    apart, shared = kv_cache_config(layers, **known), kv_cache_config(layers, **known, shared_pool=True)
    assert (apart.num_blocks, shared.num_blocks) == (122, 244)
    assert [t.shared_by for t in shared.tensors] == [(0, 1), (2, 3)]


def test_memory_orders() -> None:
    """Strides in elements of a cache of 5 blocks of 4 tokens, 2 heads of 3."""
    shape = (5, 2, 4, 2, 3)
    assert kv_cache_strides(shape, NHD) == torch.empty(shape).stride()
    assert kv_cache_strides(shape, HND) == torch.empty(5, 2, 2, 4, 3).transpose(2, 3).stride()
    for order in ((0, 1, 2, 3), (1, 0, 2, 3, 4), (0, 1, 1, 3, 4)):
        with pytest.raises(KVCacheConfigError, match="name each dimension of"):
            kv_cache_strides(shape, order)


@pytest.mark.parametrize(
    ("setup", "options", "message"),
    [
        (([(1, 1, None, 1)], [4], 2), {}, r"name the KV groups \[1\], and there are 1 block sizes"),
        (([(1, 1, None, 0)], [4, 4], 2), {}, r"name the KV groups \[0\], and there are 2 block sizes"),
        (([(1, 1, None, 0)], [0], 2), {}, "block_size=0 of KV group 0: it must be at least 1"),
        (([], [], 2), {}, "a model without KV layers"),
        (
            ([(1, 1, None, 0), (2, 1, None, 1)], [4, 4], 2),
            {"shared_pool": True},
            r"pages of one size, and the groups' blocks have \[\[16\], \[32\]\] bytes",
        ),
        (
            ([(1, 1, None, 0)], [6], 2),
            {"supported": [(4,), (MultipleOf(4),)]},
            "block_size=6: the attention kernels support 4; multiples of 4",
        ),
    ],
)
def test_caches_that_can_not_be_laid_out_are_refused(
    setup: Setup, options: dict[str, Any], message: str
) -> None:
    """Groups without block sizes and the reverse, empty blocks, pages that differ, blocks that no kernel takes."""
    with pytest.raises(KVCacheConfigError, match=message):
        kv_cache_config(_layers(setup), num_bytes=1000, block_sizes=setup[1], dtype=torch.float16, **options)


@given(setups(), st.integers(2, 9))
def test_the_smaller_of_two_limits_decides(setup: Setup, most: int) -> None:
    """By bytes, by blocks, or by both: one configuration for one number of blocks."""
    by_bytes = _config(setup)
    known: dict[str, Any] = {"block_sizes": setup[1], "dtype": torch.float16}
    by_blocks = kv_cache_config(_layers(setup), max_num_blocks=setup[2], **known)
    assert by_blocks == by_bytes
    both = kv_cache_config(_layers(setup), num_bytes=by_bytes.num_bytes, max_num_blocks=most, **known)
    assert both.num_blocks == min(most, setup[2])


@pytest.mark.parametrize(
    ("limits", "message"),
    [({}, "without a size"), ({"max_num_blocks": 1}, "max_num_blocks=1: the null block")],
)
def test_a_cache_of_no_size_or_of_one_block_is_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(KVCacheConfigError, match=message):
        kv_cache_config([KVLayerSpec(1, 1)], block_sizes=[4], dtype=torch.float16, **limits)


def test_too_few_bytes_are_refused_with_the_number_needed() -> None:
    """The null block alone is no cache."""
    assert num_blocks_for(200, 100) == 2
    with pytest.raises(
        KVCacheConfigError, match=r"1,999 bytes of KV cache hold 1 blocks of 1,000 .* least 2,000"
    ):
        num_blocks_for(1999, 1000)


def test_a_broken_configuration_is_refused() -> None:
    """Whatever another program got wrong: coverage, sharing, bytes, blocks."""
    setup: Setup = ([(1, 2, None, 0), (1, 2, None, 0), (1, 2, None, 1)], [4, 4], 3)
    good = _config(setup)
    first, second, third = good.tensors
    g0, g1 = good.groups
    broken = {
        "the tensors name the layers \\[0, 1\\]": replace(good, tensors=(first, second)),
        "the tensors name the layers \\[0, 1, 1, 2\\]": replace(good, tensors=(first, second, second, third)),
        "the groups name the layers \\[0, 1\\]": replace(good, groups=(g0,)),
        "num_blocks=1: the null block": replace(good, num_blocks=1),
        "layers \\(0, 1\\) share a tensor, and 2": replace(
            good, tensors=(KVCacheTensor(first.num_bytes, (0, 1)), third)
        ),
        "layer 0 lies in a tensor of 97 bytes: 3 blocks of 32 bytes need 96": replace(
            good, tensors=(KVCacheTensor(97, (0,)), second, third)
        ),
        "KV group 1 has blocks of 8 tokens, its layers \\[4\\]": replace(
            good, groups=(g0, replace(g1, block_size=8))
        ),
        "KV group 0 has blocks of 4 tokens, its layers \\[4\\], its kernels 3": replace(
            good, groups=(replace(g0, kernel_block_size=3), g1)
        ),
    }
    for message, config in broken.items():
        with pytest.raises(KVCacheConfigError, match=message):
            check_kv_cache_config(config)
    check_kv_cache_config(good)


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
def test_types_of_a_cache_by_upstreams_names(model_dtype: torch.dtype) -> None:
    """Auto is the model's own; what is none is refused with those that there are."""
    found = {name: assert_pure(kv_cache_dtype, name, model_dtype) for name in KV_CACHE_DTYPES}
    assert found["auto"] == model_dtype
    assert found["fp8"] == found["fp8_e4m3"] == torch.float8_e4m3fn
    for name in ("float32", "bfloat16", "float16"):
        assert found[name] == getattr(torch, name)
    with pytest.raises(KVCacheConfigError, match=r"kv_cache_dtype='int4': give one of auto, .*fp8"):
        kv_cache_dtype("int4", model_dtype)
