"""Which CUDA graph runs a batch: the keys that are captured, and the choice among them.

Capture and look-up read the same table, so a batch is given either a graph that was captured for it or an
explicit NONE. Cost: about 1 us a dispatch.
Source: vllm/v1/cudagraph_dispatcher.py and vllm/v1/worker/gpu_model_runner.py _determine_batch_execution_and_padding.
"""

from bisect import bisect_left
from collections.abc import Iterable, Set
from types import MappingProxyType
from typing import Protocol

from purestep.pure.errors import CaptureSizeError, DispatchError
from purestep.pure.records.dispatch import (
    BatchExecution,
    Coordination,
    CUDAGraphMode,
    DispatchConfig,
    DispatchKeys,
    LoRACapture,
)
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import LayoutBounds

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
RUNTIME_MODES = frozenset({NONE, PIECEWISE, FULL})
_ONLY_NONE = frozenset({NONE})


class Coordinate(Protocol):
    """How data-parallel ranks agree on one step; every rank calls it once a step.

    `num_tokens` and `num_tokens_padded` are this rank's, `cudagraph_mode` is what it would run in on its own.
    """

    def __call__(
        self, *, num_tokens: int, num_tokens_padded: int, uniform_decode: bool, cudagraph_mode: CUDAGraphMode
    ) -> Coordination: ...


def pad_table(capture_sizes: tuple[int, ...], max_capture_size: int) -> tuple[int, ...]:
    """The smallest capture size that holds each number of tokens from 0 to `max_capture_size`.

    Numbers beyond the last size become `max_capture_size + 1`, which no graph has. No tokens stay no tokens.

    Raises:
        CaptureSizeError: sizes that are not positive and ascending, or beyond `max_capture_size`.
    """
    for before, size in zip((0, *capture_sizes), capture_sizes, strict=False):
        if size <= before:
            raise CaptureSizeError(
                f"capture sizes {capture_sizes}: {size} follows {before}; give positive sizes in ascending order"
            )
    if capture_sizes and capture_sizes[-1] > max_capture_size:
        raise CaptureSizeError(
            f"capture size {capture_sizes[-1]} is beyond max_capture_size={max_capture_size}: "
            "drop the size or raise the limit"
        )
    sizes = (0, *capture_sizes, max_capture_size + 1)
    return tuple(sizes[bisect_left(sizes, n)] for n in range(max_capture_size + 1))


def lora_cases(lora: LoRACapture | None) -> tuple[int, ...]:
    """The numbers of active adapters that graphs are captured for, ascending; 0 stands for none."""
    if lora is None:
        return (0,)
    all_loras = lora.max_loras + 1
    if not lora.cudagraph_specialize_lora:
        return (all_loras,)
    if not lora.specialize_active_lora:
        return 0, all_loras
    powers = [1 << exponent for exponent in range(lora.max_loras.bit_length())]
    return (0, *powers, all_loras)


def dispatch_keys(config: DispatchConfig, mode: CUDAGraphMode, uniform_query_len: int = 1) -> DispatchKeys:
    """The graphs to capture for batches of this configuration.

    Batches of any kind have keys of every capture size in the mixed mode: FULL names how many requests it holds,
    PIECEWISE does not care. Where decode batches have graphs of their own, those hold `uniform_query_len` tokens of
    each request.

    Raises:
        CaptureSizeError: sizes out of order, a compile size that padding would change, or a uniform batch that would
            be padded to a number of tokens that does not divide among its requests.
    """
    sizes, max_num_reqs = config.capture_sizes, config.max_num_reqs
    table = pad_table(sizes, config.largest_size)
    _check_compile_sizes(config.compile_sizes, table)
    cases = lora_cases(config.lora)
    piecewise: dict[tuple[int, int], BatchDescriptor] = {}
    full: dict[tuple[int, bool, int], BatchDescriptor] = {}
    for size in sizes:
        for case in cases:
            if mode.mixed_mode is PIECEWISE:
                piecewise[size, case] = BatchDescriptor(size, None, False, case > 0, case)
            elif mode.mixed_mode is FULL:
                num_reqs = min(size, max_num_reqs)
                full[size, False, case] = BatchDescriptor(size, num_reqs, False, case > 0, case)
    if mode.separate_routine:
        _check_uniform_padding(table, uniform_query_len, max_num_reqs)
        for size in sizes:
            if uniform_query_len <= size <= uniform_query_len * max_num_reqs:
                for case in cases:
                    num_reqs = size // uniform_query_len
                    full[size, True, case] = BatchDescriptor(size, num_reqs, True, case > 0, case)
    return DispatchKeys(
        mode=mode,
        config=config,
        uniform_query_len=uniform_query_len,
        pad_table=table,
        lora_cases=_case_by_count(config.lora, cases),
        piecewise=MappingProxyType(piecewise),
        full=MappingProxyType(full),
    )


def _check_compile_sizes(compile_sizes: Iterable[int], table: tuple[int, ...]) -> None:
    for size in compile_sizes:
        if size < len(table) and table[size] != size:
            raise CaptureSizeError(
                f"compile size {size} would be padded to {table[size]}: make it a capture size too, or drop it"
            )


def _check_uniform_padding(table: tuple[int, ...], query_len: int, max_num_reqs: int) -> None:
    for num_tokens in range(query_len, min(query_len * max_num_reqs, len(table) - 1) + 1):
        padded = table[num_tokens]
        is_key = padded == num_tokens
        if padded % query_len and (is_key or num_tokens % query_len == 0):
            raise CaptureSizeError(
                f"a uniform decode batch of {num_tokens} tokens would run as {padded}, and {padded} is not a "
                f"multiple of its {query_len} tokens a request: give capture sizes that are multiples of "
                f"{query_len} up to {query_len * max_num_reqs}, as resolve_cudagraph_mode does"
            )


def _case_by_count(lora: LoRACapture | None, cases: tuple[int, ...]) -> tuple[int, ...]:
    """For 0, 1, ... active adapters the number that their graph is captured for; a batch without any has its own."""
    captured = [case for case in cases if case]
    most = 0 if lora is None else lora.max_loras + 1
    return (0, *(captured[bisect_left(captured, count)] for count in range(1, most + 1)))


def dispatch(
    keys: DispatchKeys,
    num_tokens: int,
    *,
    uniform_decode: bool = False,
    num_active_loras: int = 0,
    valid_modes: Set[CUDAGraphMode] | None = None,
    invalid_modes: Set[CUDAGraphMode] | None = None,
) -> tuple[CUDAGraphMode, BatchDescriptor]:
    """The mode in which a batch of so many tokens runs, and the shape it is padded to.

    A full graph is preferred, then pieces, then none; NONE pads nothing. A uniform decode batch has no full graph
    but its own. `valid_modes` (None: all) without `invalid_modes` may be used; a batch that no graph is large enough
    for, or any batch without graphs, runs as NONE whatever they say. More adapters than `max_loras` are refused where
    they are activated, not here.

    Raises:
        DispatchError: no mode is left; no graph fits and NONE is not allowed; a uniform batch whose tokens do not
            divide among requests.
    """
    allowed = RUNTIME_MODES if valid_modes is None else valid_modes
    if invalid_modes:
        allowed = allowed - invalid_modes
    if not allowed:
        raise DispatchError(f"no mode is left for {num_tokens} tokens: valid_modes has only invalid ones")
    table = keys.pad_table
    if keys.mode is NONE or num_tokens >= len(table) or allowed == _ONLY_NONE:
        return NONE, BatchDescriptor(num_tokens)
    padded, loras = table[num_tokens], _lora_case(keys, num_active_loras)
    if FULL in allowed:
        uniform = uniform_decode and keys.mode.separate_routine
        found = keys.full.get((padded, uniform, loras))
        if found is not None:
            return FULL, found
        if uniform and padded % keys.uniform_query_len:
            raise DispatchError(
                f"a uniform decode batch of {num_tokens} tokens, where every request runs {keys.uniform_query_len}: "
                f"give a multiple of it for at most {keys.config.max_num_reqs} requests, or uniform_decode=False"
            )
    if PIECEWISE in allowed:
        found = keys.piecewise.get((padded, loras))
        if found is not None:
            return PIECEWISE, found
    if NONE not in allowed:
        names = sorted(mode.name for mode in allowed)
        raise DispatchError(
            f"no captured graph of {', '.join(names)} holds {num_tokens} tokens (padded {padded}, uniform "
            f"{uniform_decode}, {num_active_loras} adapters) in mode {keys.mode.name}: allow NONE, or capture one"
        )
    return NONE, BatchDescriptor(num_tokens)


def _lora_case(keys: DispatchKeys, num_active_loras: int) -> int:
    """For how many adapters the graph of a batch with so many of them is captured."""
    if num_active_loras < len(keys.lora_cases):
        return keys.lora_cases[num_active_loras]
    lora = keys.config.lora
    return num_active_loras if lora is None or lora.specialize_active_lora else lora.max_loras + 1


def capture_descriptors(
    keys: DispatchKeys,
) -> tuple[tuple[CUDAGraphMode, tuple[BatchDescriptor, ...]], ...]:
    """What to capture, in order: PIECEWISE before FULL, the largest first, so that the smaller share its memory."""
    by_mode = ((PIECEWISE, keys.piecewise.values()), (FULL, keys.full.values()))
    return tuple(
        (mode, tuple(sorted(found, key=lambda d: (d.num_tokens, d.num_active_loras), reverse=True)))
        for mode, found in by_mode
        if found
    )


def is_uniform_decode(
    num_tokens: int,
    num_reqs: int,
    *,
    max_query_len: int,
    uniform_query_len: int,
    force: bool | None = None,
) -> bool:
    """Whether every request runs exactly `uniform_query_len` tokens; `force` overrides what the counts say."""
    if force is not None:
        return force
    return max_query_len == uniform_query_len and num_tokens == max_query_len * num_reqs


def determine_batch_execution_and_padding(
    keys: DispatchKeys,
    bounds: LayoutBounds,
    *,
    num_active_loras: int = 0,
    use_cascade_attention: bool = False,
    has_encoder_output: bool = False,
    force_eager: bool = False,
    force_uniform_decode: bool | None = None,
    sequence_parallel_size: int = 1,
    coordinate: Coordinate | None = None,
) -> BatchExecution:
    """How a batch of these bounds is run, and to what it is padded; decided from host facts alone.

    Cascade attention, and encoder output that a decoder reads in this very step, exclude full graphs. Under sequence
    parallelism tokens are padded to a multiple of the ranks. With `coordinate`, data-parallel ranks agree first.

    Raises:
        DispatchError: as `dispatch`; also where a rank has no graph of the size and mode that the ranks agreed on, or
            a graph's size does not divide among sequence-parallel ranks.
    """
    num_tokens, ranks = bounds.num_tokens, sequence_parallel_size
    uniform = is_uniform_decode(
        num_tokens,
        bounds.num_reqs,
        max_query_len=bounds.max_query_len,
        uniform_query_len=keys.uniform_query_len,
        force=force_uniform_decode,
    )
    mode, descriptor = dispatch(
        keys,
        -(-num_tokens // ranks) * ranks,
        uniform_decode=uniform,
        num_active_loras=num_active_loras,
        valid_modes=_ONLY_NONE if force_eager else None,
        invalid_modes=frozenset({FULL}) if use_cascade_attention or has_encoder_output else None,
    )
    if descriptor.num_tokens % ranks:
        raise DispatchError(
            f"{num_tokens} tokens would run as {descriptor.num_tokens}, which do not divide among {ranks} "
            "sequence-parallel ranks: give capture sizes that are multiples of it"
        )
    agreed = None
    if coordinate is not None:
        agreed = coordinate(
            num_tokens=num_tokens,
            num_tokens_padded=descriptor.num_tokens,
            uniform_decode=uniform,
            cudagraph_mode=mode,
        )
        if agreed.num_tokens_across_dp is not None:
            mode, descriptor = _dispatch_agreed(keys, agreed, uniform, num_active_loras, force_eager)
    return BatchExecution(
        cudagraph_mode=mode,
        descriptor=descriptor,
        num_tokens=num_tokens,
        num_reqs=bounds.num_reqs if descriptor.num_reqs is None else descriptor.num_reqs,
        should_ubatch=agreed is not None and agreed.should_ubatch,
        num_tokens_across_dp=None if agreed is None else agreed.num_tokens_across_dp,
    )


def _dispatch_agreed(
    keys: DispatchKeys, agreed: Coordination, uniform: bool, num_active_loras: int, force_eager: bool
) -> tuple[CUDAGraphMode, BatchDescriptor]:
    """Dispatch of the size and mode that the ranks agreed on."""
    assert agreed.num_tokens_across_dp is not None
    num_tokens = agreed.num_tokens_across_dp[agreed.rank]
    mode, descriptor = dispatch(
        keys,
        num_tokens,
        uniform_decode=uniform,
        num_active_loras=num_active_loras,
        valid_modes=_ONLY_NONE if force_eager else frozenset({agreed.cudagraph_mode}),
    )
    if descriptor.num_tokens != num_tokens:
        raise DispatchError(
            f"the ranks agreed on {num_tokens} tokens in mode {agreed.cudagraph_mode.name}; rank {agreed.rank} has a "
            f"graph of {descriptor.num_tokens}: give all ranks the same capture sizes"
        )
    return mode, descriptor
