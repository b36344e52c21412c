"""What an engine is made of: the model, how much it can hold, and the buffers for it."""

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from purestep.kernels.donating import donating
from purestep.kernels.types import Kernels
from purestep.pure.dispatch import capture_descriptors, dispatch_keys
from purestep.pure.errors import InvalidParameterError, KVCacheConfigError
from purestep.pure.graph_modes import has_pieces, resolve_cudagraph_mode
from purestep.pure.kv_config import MIN_BLOCKS, kv_cache_config
from purestep.pure.models.model import Model
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.dispatch import AttentionCGSupport, CUDAGraphMode, DispatchConfig, DispatchKeys
from purestep.pure.records.kv_config import KVCacheConfig
from purestep.pure.records.layout import SamplerShape
from purestep.pure.records.params import Params
from purestep.pure.records.queue import SchedulerConfig
from purestep.state.buffers import PersistentBuffers
from purestep.state.device_memory import CudaMemory, DeviceMemory
from purestep.state.graph_api import GraphApi
from purestep.state.graphs import CaptureReport, GraphKey
from purestep.state.loading.load import load_model
from purestep.state.loading.loaded import LoadedModel
from purestep.state.profile import determine_available_memory
from purestep.state.progress import watched
from purestep.state.run import BoundStep
from purestep.state.weights import placed

DEFAULT_KV_CACHE_BYTES = 512 * 2**20
Source = str | Path | LoadedModel | tuple[Model, Params] | None


LEAST = {  # of the sizes that are whole numbers; a prompt and an output need 2 tokens
    "kv_cache_bytes": 1,
    "block_size": 1,
    "max_num_reqs": 1,
    "max_num_batched_tokens": 1,
    "block_horizon": 1,
    "max_model_len": 2,
    "steps_ahead": 0,
}


@attrs.frozen(kw_only=True)
class Sizes:
    """How much an engine holds and does at once. None: as much as model and cache allow."""

    kv_cache_bytes: int | None = None  # None: what gpu_memory_utilization leaves; without a GPU 512 MiB
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory that may be in use, by anybody
    block_size: int = 16
    max_model_len: int | None = None
    max_num_reqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    block_horizon: int = 64  # tokens that running requests are given blocks for ahead of time
    steps_ahead: int | None = (
        None  # steps begun before the last one's tokens are known; None: 1 on a GPU, else 0
    )
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY  # on a GPU
    capture_sizes: tuple[int, ...] | None = None  # numbers of tokens; None: up to max_num_reqs
    capture_progress: bool = True  # a bar while graphs are captured

    def __attrs_post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise InvalidParameterError(f"{name}={value!r}: it must be a whole number, at least {least}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidParameterError(
                f"gpu_memory_utilization={self.gpu_memory_utilization}: it is a share, above 0 and at most 1"
            )


def usable_device(device: torch.device | str) -> torch.device:
    """The device, if torch can use it.

    Raises:
        InvalidParameterError: no device's name, or a GPU where torch sees none.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidParameterError(f"device={device!r}: {error}") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InvalidParameterError(
            f"device={str(place)!r}: this torch sees no GPU: use device='cpu', or install a CUDA build of torch"
        )
    return place


def resolve(source: Source, *, dtype: torch.dtype, device: torch.device, tokenizer: Any) -> LoadedModel:
    """A model from wherever it is: a folder, file or hub id, None for the default, or one already in memory.

    Weights in memory are moved to `device` and cast to `dtype`; those that are so already are shared, not copied.

    Raises:
        ModelLoadError: a model that can not be loaded.
        InvalidParameterError: a torch module on another device.
    """
    if isinstance(source, tuple):
        model, params = source
        source = LoadedModel(name=model.name, model=model, params=params)
    if isinstance(source, LoadedModel):
        params = placed(source.model, source.params, dtype=dtype, device=device)
        return attrs.evolve(source, params=params, tokenizer=tokenizer or source.tokenizer)
    return load_model(source, dtype=dtype, device=device, tokenizer=tokenizer)


def kv_cache_of(
    loaded: LoadedModel,
    sizes: Sizes,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | None,
    memory: DeviceMemory | None = None,
) -> KVCacheConfig:
    """The KV cache for these sizes. If they say nothing, on a GPU: all that a trial run leaves, and can be of use.

    `memory` is that of the device; without a GPU it is not asked.

    Raises:
        InvalidParameterError: a cache too small for one block beside the null block, or no type for keys and values.
        DeviceMemoryError: the trial run finds no memory left.
    """
    layers, num_bytes = loaded.model.kv_layers, sizes.kv_cache_bytes
    if not dtype.is_floating_point:
        raise InvalidParameterError(
            f"dtype={dtype}: keys and values are floating-point numbers; use float32 or bfloat16"
        )
    num_groups = 1 + max((layer.group for layer in layers), default=0)
    config = partial(kv_cache_config, layers, block_sizes=(sizes.block_size,) * num_groups, dtype=dtype)
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)
    if num_bytes is None and memory is not None:
        smallest = config(max_num_blocks=MIN_BLOCKS)
        limits = limits_of(loaded, smallest, sizes, seed=0)
        bound = bind(loaded, limits, smallest, device=device, kernels=kernels, graph_api=None)
        num_bytes = determine_available_memory(
            bound,
            sizes.max_num_batched_tokens,
            memory=memory,
            gpu_memory_utilization=sizes.gpu_memory_utilization,
        )
        bound.buffers.close()
        most = 1 + sizes.max_num_reqs * -(-limits.max_model_len // sizes.block_size)
        return config(num_bytes=num_bytes, max_num_blocks=most)
    try:
        return config(num_bytes=DEFAULT_KV_CACHE_BYTES if num_bytes is None else num_bytes)
    except KVCacheConfigError as error:
        raise InvalidParameterError(
            f"kv_cache_bytes={num_bytes}, block_size={sizes.block_size}: {error}"
        ) from error


def limits_of(loaded: LoadedModel, kv_config: KVCacheConfig, sizes: Sizes, *, seed: int) -> BatchLimits:
    """What a batch can hold with this KV cache.

    Raises:
        InvalidParameterError: a length that the model's positions do not reach.
    """
    model = loaded.model
    max_model_len = sizes.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise InvalidParameterError(
            f"max_model_len={max_model_len}: the model knows {model.max_position_embeddings} positions; ask for no more"
        )
    return BatchLimits(
        max_num_reqs=sizes.max_num_reqs,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        block_sizes=kv_config.block_sizes,
        num_blocks=(kv_config.num_blocks,) * len(kv_config.groups),
        eos_token_ids=loaded.eos_token_ids,
        seed=seed,
        kernel_block_sizes=kv_config.kernel_block_sizes,
    )


def scheduler_config(limits: BatchLimits, sizes: Sizes, *, steps_ahead: int) -> SchedulerConfig:
    """The scheduler's part of the sizes."""
    return SchedulerConfig(
        num_blocks=limits.num_blocks,
        block_sizes=limits.block_sizes,
        max_num_reqs=limits.max_num_reqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        async_scheduling=steps_ahead > 0,
        enable_prefix_caching=sizes.enable_prefix_caching,
        block_horizon=sizes.block_horizon,
    )


def dispatch_keys_of(model: Model, limits: BatchLimits, sizes: Sizes) -> DispatchKeys:
    """The graphs that batches are dispatched to, of 1, 2, 4 and multiples of 8 tokens up to max_num_reqs by default.

    Raises:
        CUDAGraphModeError: a mode that the model does not allow.
        CaptureSizeError: capture sizes that are not ascending.
    """
    default = tuple(n for n in (1, 2, 4, *range(8, limits.max_num_reqs + 8, 8)) if n <= limits.max_num_reqs)
    capture_sizes = (
        tuple(sorted({*default, limits.max_num_reqs})) if sizes.capture_sizes is None else sizes.capture_sizes
    )
    mode, config = resolve_cudagraph_mode(
        sizes.cudagraph_mode,
        DispatchConfig(capture_sizes, limits.max_num_reqs),
        support=[AttentionCGSupport.ALWAYS],  # all of our kernels take any batch
        pieces=has_pieces(model),
    )
    return dispatch_keys(config, mode)


GREEDY_SHAPE = SamplerShape()
RANDOM_SHAPE = SamplerShape(random=True, truncated=True)


def graph_keys(keys: DispatchKeys, *, two_phase: bool = False) -> list[GraphKey]:
    """What is captured before the first step: pieces, then full graphs, greedy and random; the largest first.

    With `two_phase`, full graphs are those of the halves: each `execute`, and its samples behind it.
    """
    found, shapes = list[GraphKey](), (RANDOM_SHAPE, GREEDY_SHAPE)
    for mode, descriptors in capture_descriptors(keys):
        for descriptor in descriptors:
            if mode is CUDAGraphMode.PIECEWISE:
                found.append(GraphKey(descriptor, None))
            elif two_phase:
                found.append(GraphKey(descriptor, None, half="execute"))
                found += [GraphKey(descriptor, shape, half="sample") for shape in shapes]
            else:
                found += [GraphKey(descriptor, shape) for shape in shapes]
    return found


def bind(
    loaded: LoadedModel,
    limits: BatchLimits,
    kv_config: KVCacheConfig,
    *,
    device: torch.device,
    kernels: Kernels | None,
    graph_api: GraphApi | None,
) -> BoundStep:
    """The step on buffers of its own, with the kernels of its device unless others are given."""
    if kernels is None:
        kernels = cuda_kernels() if device.type == "cuda" else donating
    buffers = PersistentBuffers(loaded.model, limits, kv_config=kv_config, device=device)
    return BoundStep(
        buffers=buffers, model=loaded.model, params=loaded.params, kernels=kernels, graph_api=graph_api
    )


def cuda_kernels() -> Kernels:
    """The kernels of a GPU. Triton is imported here, when they are wanted."""
    from purestep.kernels.triton import cuda_donating

    return cuda_donating()


def capture(bound: BoundStep, keys: DispatchKeys, *, progress: bool) -> CaptureReport | None:
    """Capture what batches are dispatched to; None: this step has no graphs."""
    if bound.captured is None:
        return None
    return bound.captured.capture(
        graph_keys(keys), watch=lambda found: watched(list(found), "capturing", shown=progress)
    )
