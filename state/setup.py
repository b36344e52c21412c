"""What an engine is made of: the model, how much it can hold, and the buffers for it."""

from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import attrs
import torch

from purestep.kernels.types import Kernels
from purestep.pure.dispatch import dispatch_keys
from purestep.pure.drafters.joined import with_draft_params, with_drafter
from purestep.pure.errors import InvalidParameterError, KVCacheConfigError
from purestep.pure.graph_modes import has_pieces, resolve_cudagraph_mode
from purestep.pure.kv_config import FP8, MIN_BLOCKS, kv_cache_config, kv_cache_dtype
from purestep.pure.models.model import Model
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.dispatch import AttentionCGSupport, CUDAGraphMode, DispatchConfig, DispatchKeys
from purestep.pure.records.drafter import Drafter, HostDrafter
from purestep.pure.records.kv_config import KVCacheConfig
from purestep.pure.records.params import Params
from purestep.pure.records.queue import SchedulerConfig
from purestep.state.buffers import PersistentBuffers
from purestep.state.captures import capture_layouts, wanted_keys
from purestep.state.compilation import compile_steps
from purestep.state.device_memory import CudaMemory, DeviceMemory
from purestep.state.graph_api import CudaGraphs, GraphApi
from purestep.state.loading.load import load_model
from purestep.state.loading.loaded import LoadedModel, in_memory
from purestep.state.native import cpu_kernels
from purestep.state.profile import determine_available_memory, profile_layouts
from purestep.state.run import BoundStep
from purestep.state.sizes import UNROLL, Sizes
from purestep.state.weights import placed

DEFAULT_KV_CACHE_BYTES = 512 * 2**20
FP8_CAPABILITY = (8, 9)
AnyDrafter = Drafter | HostDrafter | None
Source = str | Path | LoadedModel | tuple[Model, Params] | None


def as_dtype(dtype: Any) -> torch.dtype:
    """The type, which its name may stand for.

    Raises: InvalidParameterError for what is neither.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise InvalidParameterError(
            f"dtype={dtype!r}: give a torch.dtype or its name, float32 or bfloat16 say"
        )
    return found


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


def graphs_for(sizes: Sizes, device: torch.device, given: GraphApi | None) -> GraphApi | None:
    """The graphs that were given, or the device's own if it has any and they are wanted.

    Raises: InvalidParameterError for a mode that wants them where there are none, and for what is no GraphApi.
    """
    mode = sizes.cudagraph_mode
    if given is not None and (isinstance(given, type) or not isinstance(given, GraphApi)):
        raise InvalidParameterError(
            f"graph_api={given!r}: give an object with capture(function) and num_bytes(), as CudaGraphs has, or None"
        )
    if given is not None or mode is CUDAGraphMode.NONE:
        return given
    if device.type == "cuda":
        return CudaGraphs(device)
    if mode is not None:
        raise InvalidParameterError(
            f"cudagraph_mode={mode.name} on {device}: only CUDA has graphs: use device='cuda', or leave the mode out"
        )
    return None


def resolve(source: Source, *, dtype: torch.dtype, device: torch.device, tokenizer: Any) -> LoadedModel:
    """A model from wherever it is: a folder, file or hub id, None for the default, or one already in memory.

    Weights in memory are moved to `device` and cast to `dtype`; those that are so already are shared, not copied.

    Raises:
        ModelLoadError: a model that can not be loaded.
        InvalidParameterError: a torch module on another device, or a tuple that is not (Model, Params).
    """
    if isinstance(source, tuple):
        source = in_memory(source)
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
    drafter: AnyDrafter = None,
    captures: bool = False,
) -> KVCacheConfig:
    """The KV cache for these sizes. If they say nothing, on a GPU: all that a trial run leaves, and can be of use.

    `memory` is that of the device; without a GPU it is not asked. If steps are to be captured,
    what they launch is compiled with what the trial run launches, on all cores at once.

    Raises:
        InvalidParameterError: a cache too small for one block beside the null block, or no type for keys and values,
            or not on this device.
        DeviceMemoryError: the trial run finds no memory left.
    """
    layers, num_bytes = loaded.model.kv_layers, sizes.kv_cache_bytes
    if not isinstance(kernels, Kernels | None):
        raise InvalidParameterError(
            f"kernels={kernels!r}: give a Kernels record, `reference` for example, or None"
        )
    if not dtype.is_floating_point:
        raise InvalidParameterError(
            f"dtype={dtype}: keys and values are floating-point numbers; use float32 or bfloat16"
        )
    num_groups = 1 + max((layer.group for layer in layers), default=0)
    dtype = kv_cache_dtype(sizes.kv_cache_dtype, dtype)
    if dtype == FP8 and kernels is None:
        check_fp8(device)
    config = partial(kv_cache_config, layers, block_sizes=(sizes.block_size,) * num_groups, dtype=dtype)
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)
    if num_bytes is None and memory is not None:
        smallest = config(max_num_blocks=MIN_BLOCKS)
        limits = limits_of(loaded, smallest, sizes, seed=0, drafter=drafter)
        how: Any = {"device": device, "kernels": kernels, "graph_api": None, "drafter": drafter}
        bound = bind(loaded, limits, smallest, sizes, **how)
        keys = wanted_keys(dispatch_keys_of(loaded.model, limits, sizes), sizes) if captures else []
        layouts = profile_layouts(limits, sizes.max_num_batched_tokens) + capture_layouts(keys, limits)
        compile_steps(bound, layouts)
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


def check_fp8(device: torch.device) -> None:
    """Nothing, if the kernels of this device store numbers of eight bits.

    Raises:
        InvalidParameterError: a GPU without them.
    """
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        raise InvalidParameterError(
            f"kv_cache_dtype='fp8' on a GPU of capability {found}: e4m3 numbers need {FP8_CAPABILITY} or more; use "
            "'auto', or 'float16'"
        )


def limits_of(
    loaded: LoadedModel,
    kv_config: KVCacheConfig,
    sizes: Sizes,
    *,
    seed: int,
    drafter: AnyDrafter = None,
) -> BatchLimits:
    """What a batch can hold with this KV cache.

    Raises:
        InvalidParameterError: a length that the model's positions do not reach, or that is no int32; no 64-bit seed.
    """
    model = loaded.model
    if not isinstance(seed, Integral) or not -(2**63) <= seed < 2**63:
        raise InvalidParameterError(f"seed={seed!r}: it is a whole number from -2**63 to 2**63 - 1")
    max_model_len = sizes.max_model_len or model.max_position_embeddings
    if max_model_len >= 2**31:
        raise InvalidParameterError(
            f"max_model_len={max_model_len}, and {loaded.name} names {model.max_position_embeddings} positions: "
            f"positions are int32: ask for fewer than {2**31}, as many as your prompts and outputs need"
        )
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
        seed=int(seed),
        kernel_block_sizes=kv_config.kernel_block_sizes,
        num_drafts=0 if drafter is None else drafter.num_drafts,
    )


def scheduler_config(
    limits: BatchLimits, sizes: Sizes, *, steps_ahead: int, drafter: AnyDrafter = None
) -> SchedulerConfig:
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
        num_spec_tokens=limits.num_drafts,
        drafts_on_device=isinstance(drafter, Drafter),
    )


def unroll_of(sizes: Sizes, graph_api: GraphApi | None, device: torch.device, drafter: AnyDrafter) -> int:
    """Decode steps in one replay.

    Raises:
        InvalidParameterError: several without graphs, or with a drafter, whose steps say several tokens by themselves.
    """
    if graph_api is None and (sizes.unroll or 1) > 1:
        raise InvalidParameterError(
            f"unroll={sizes.unroll} without graphs: several steps are one replay, on CUDA alone; leave it out"
        )
    if drafter is not None and (sizes.unroll or 1) > 1:
        raise InvalidParameterError(
            f"unroll={sizes.unroll} with a drafter: steps that verify drafts are not unrolled; leave out one of them"
        )
    default = UNROLL if graph_api is not None and device.type == "cuda" and drafter is None else 1
    return default if sizes.unroll is None else sizes.unroll


def dispatch_keys_of(model: Model, limits: BatchLimits, sizes: Sizes) -> DispatchKeys:
    """The graphs that batches are dispatched to, of 1, 2, 4 and multiples of 8 requests up to max_num_reqs by default.

    A decoding request runs a token and its drafts, or fewer (`fill_batch`).

    Raises:
        CUDAGraphModeError: a mode that the model does not allow.
        CaptureSizeError: capture sizes that are not ascending.
    """
    default = {n for n in (1, 2, 4, *range(8, limits.max_num_reqs + 8, 8)) if n <= limits.max_num_reqs}
    every, capture_sizes = 1 + limits.num_drafts, sizes.capture_sizes
    if capture_sizes is None:
        capture_sizes = tuple(sorted(every * n for n in {*default, limits.max_num_reqs}))
    wanted = CUDAGraphMode.FULL_DECODE_ONLY if sizes.cudagraph_mode is None else sizes.cudagraph_mode
    mode, config = resolve_cudagraph_mode(
        wanted,
        DispatchConfig(capture_sizes, limits.max_num_reqs),
        support=[AttentionCGSupport.ALWAYS],  # all of our kernels take any batch
        pieces=has_pieces(model),
        uniform_query_len=every,
    )
    return dispatch_keys(config, mode, every)


def bind(
    loaded: LoadedModel,
    limits: BatchLimits,
    kv_config: KVCacheConfig,
    sizes: Sizes,
    *,
    device: torch.device,
    kernels: Kernels | None,
    graph_api: GraphApi | None,
    drafter: AnyDrafter = None,
) -> BoundStep:
    """The step on buffers of its own, with the kernels of its device unless others are given.

    Raises:
        InvalidParameterError: what are no Kernels.
    """
    if not isinstance(kernels, Kernels | None):
        raise InvalidParameterError(
            f"kernels={kernels!r}: give a Kernels record, `reference` for example, or None"
        )
    if kernels is None:
        kernels = cuda_kernels() if device.type == "cuda" else cpu_kernels()
    own = drafter if isinstance(drafter, Drafter) else None
    buffers = PersistentBuffers(
        loaded.model,
        limits,
        kv_config=kv_config,
        device=device,
        drafter=own,
        calculate_kv_scales=sizes.calculate_kv_scales,
    )
    return BoundStep(
        buffers=buffers,
        model=loaded.model,
        params=loaded.params,
        kernels=kernels,
        graph_api=graph_api,
        drafter=own,
    )


def with_drafter_of(
    loaded: LoadedModel,
    drafter: AnyDrafter,
    draft_params: Params | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedModel:
    """The model with the layers and the weights of its drafter, where that is on the device and has any.

    Raises:
        InvalidParameterError: what is no drafter, or no Params; weights and nobody who reads them, or a drafter with
            layers and no weights.
    """
    if not isinstance(drafter, AnyDrafter) or not isinstance(draft_params, Params | None):
        raise InvalidParameterError(
            f"drafter={drafter!r}, draft_params={type(draft_params).__name__}: give a Drafter, a HostDrafter or None, "
            "and Params or None"
        )
    own = drafter if isinstance(drafter, Drafter) else None
    needed = own is not None and bool(own.kv_layers or own.linear_paths)
    if needed != (draft_params is not None):
        raise InvalidParameterError(
            f"drafter={drafter!r} and draft_params={'None' if draft_params is None else 'given'}: give the weights of "
            "a drafter that has some, and none with any other"
        )
    if own is None or draft_params is None:
        return loaded
    model = with_drafter(loaded.model, own)
    params = placed(model, with_draft_params(loaded.params, draft_params), dtype=dtype, device=device)
    return attrs.evolve(loaded, model=model, params=params)


def cuda_kernels() -> Kernels:
    """The kernels of a GPU. Triton is imported here, when they are wanted."""
    from purestep.kernels.triton import cuda_donating

    return cuda_donating()
