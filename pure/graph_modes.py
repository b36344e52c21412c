"""The CUDA graph mode that kernels and model allow, and capture sizes that fit it."""

import math
from collections.abc import Iterable

from purestep.pure.errors import CaptureSizeError, CUDAGraphModeError
from purestep.pure.models.model import Model
from purestep.pure.record import replace
from purestep.pure.records.dispatch import AttentionCGSupport, CUDAGraphMode, DispatchConfig

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


def has_pieces(model: Model) -> bool:
    """Whether parts of the model can be captured apart from attention."""
    return any(not piece.is_attention for piece in model.pieces)


def resolve_cudagraph_mode(
    mode: CUDAGraphMode,
    config: DispatchConfig,
    *,
    support: Iterable[AttentionCGSupport],
    pieces: bool,
    uniform_query_len: int = 1,
    sequence_parallel_size: int = 1,
    num_state_rows: int | None = None,
) -> tuple[CUDAGraphMode, DispatchConfig]:
    """The mode that kernels and model allow instead of `mode`, and the configuration with sizes that fit it.

    `support` is that of the attention kernels of each KV group; the least counts. `pieces` is `has_pieces(model)`.
    `num_state_rows` is how many requests' recurrent state the cache holds, None if the model keeps none.

    Raises:
        CUDAGraphModeError: pieces of a model that has none; FULL where attention can not be captured at all; full
            graphs for more requests than there is state for.
        CaptureSizeError: no capture size holds a multiple of the tokens of a uniform decode batch.
    Source: vllm/config/compilation.py resolve_cudagraph_mode_and_sizes.
    """
    if not mode:
        return mode, config
    if mode.has_mode(PIECEWISE) and not pieces:
        raise CUDAGraphModeError(
            f"mode {mode.name} captures the parts of a model between its attention layers, and this model is one "
            "piece with attention inside: use FULL, FULL_DECODE_ONLY or NONE"
        )
    level = min(support, default=AttentionCGSupport.ALWAYS)
    mode = _allowed_mode(mode, level, pieces, uniform_query_len)
    if mode.decode_mode is FULL and uniform_query_len > 1:
        sizes = _uniform_sizes(config, uniform_query_len, sequence_parallel_size)
        config = replace(config, capture_sizes=sizes, max_capture_size=sizes[-1])
    if num_state_rows is not None and mode.has_mode(FULL) and config.max_num_reqs > num_state_rows:
        raise CUDAGraphModeError(
            f"full graphs for {config.max_num_reqs} requests, and recurrent state for {num_state_rows}: "
            "lower max_num_reqs, or give the KV cache more memory"
        )
    return mode, config


def _allowed_mode(
    mode: CUDAGraphMode, level: AttentionCGSupport, pieces: bool, uniform_query_len: int
) -> CUDAGraphMode:
    """`mode` without the full graphs that attention of this level can not run in."""
    if mode.mixed_mode is FULL and level is not AttentionCGSupport.ALWAYS:
        if level is AttentionCGSupport.NEVER:
            raise CUDAGraphModeError(
                "mode FULL captures attention, and attention of some KV group supports no graph (NEVER): "
                f"use {'PIECEWISE' if pieces else 'NONE'}"
            )
        mode = CUDAGraphMode.FULL_AND_PIECEWISE if pieces else CUDAGraphMode.FULL_DECODE_ONLY
    needed = (
        AttentionCGSupport.UNIFORM_BATCH
        if uniform_query_len > 1
        else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    if mode.decode_mode is FULL and level < needed:
        return PIECEWISE if pieces else NONE
    return mode


def _uniform_sizes(config: DispatchConfig, query_len: int, ranks: int) -> tuple[int, ...]:
    """The capture sizes rounded up to multiples of a uniform batch's tokens a request, and of the ranks."""
    unit = max(query_len, ranks)
    if math.lcm(query_len, ranks) != unit:
        raise CaptureSizeError(
            f"no capture size in use divides both by {query_len} tokens a request and by {ranks} sequence-parallel "
            "ranks: choose a number of drafts for which one divides the other"
        )
    largest = config.largest_size
    rounded = sorted(
        {size for size in (-(-s // unit) * unit for s in config.capture_sizes) if size <= largest}
    )
    if not rounded and unit > largest:
        raise CaptureSizeError(
            f"uniform decode batches run multiples of {unit} tokens, and capture sizes end at {largest}: "
            f"raise the largest to {unit}, or use fewer drafts"
        )
    return tuple(rounded) or (unit,)
