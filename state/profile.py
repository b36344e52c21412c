"""Made-up batches: to warm kernels up, to keep idle ranks in step, and to find out how much memory a step takes.

Their requests are the null row, so what they write lies in the null block and in the null row, which nothing reads;
their ledger is a copy, and their draws are functions of the null row's own stream. So they may run at any time between
two steps, and nobody notices.
Source: vllm/v1/worker/gpu_model_runner.py _dummy_run and profile_run; vllm/v1/worker/gpu_worker.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from purestep.pure.dispatch import determine_batch_execution_and_padding
from purestep.pure.errors import DeviceMemoryError, DispatchError
from purestep.pure.padding import dummy_layout, dummy_query_lens, pad_layout
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchKeys
from purestep.pure.records.layout import Layout, SamplerShape, sampler_features, sampler_shape
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.sampling_rows import NUM_FLOATS, SamplingRows, packed_row
from purestep.pure.records.state import LEDGER_COLUMNS, ExecuteModelState, StepState
from purestep.pure.step import execute, sample
from purestep.state.device_memory import DeviceMemory
from purestep.state.graphs import GraphKey
from purestep.state.run import BoundStep


def dummy_run(
    bound: BoundStep,
    num_tokens: int,
    *,
    uniform_query_len: int | None = None,
    mixed: bool = False,
    context: int | None = None,
    keys: DispatchKeys | None = None,
    cudagraph_mode: CUDAGraphMode | None = None,
) -> ExecuteModelState | None:
    """Run a made-up batch of `num_tokens` up to logits, in the shape that `dummy_query_lens` gives it.

    Without `context` its requests are idle: no key is read, but memory is sized for the longest request. With it, each
    has so many tokens computed before and attends to them. With `keys` the batch is padded and replayed as a real one
    is, as a uniform decode if `uniform_query_len` is that of the keys; `cudagraph_mode` is then what it must be
    dispatched to, or NONE to run it eagerly. A full graph samples too, and gives None.

    Raises:
        DispatchError: no such shape, a context that does not fit, another mode, or a mode that is not captured.
        DeviceMemoryError: the device has not enough memory for the batch.
    """
    limits = bound.buffers.limits
    lens = dummy_query_lens(num_tokens, limits.max_num_reqs, uniform_query_len=uniform_query_len, mixed=mixed)
    if context is not None and not 0 <= context <= limits.max_model_len - max(lens):
        raise DispatchError(
            f"a made-up request of {max(lens)} tokens behind {context} computed ones, where max_model_len="
            f"{limits.max_model_len}: give a context of 0 to {limits.max_model_len - max(lens)}, or fewer tokens"
        )
    longest = limits.max_model_len if context is None else context + max(lens)
    layout = dummy_layout(lens, limits, sampler=_dummy_shape(limits.vocab_size), max_seq_len=longest)
    key = None
    if keys is not None and cudagraph_mode is not CUDAGraphMode.NONE:
        is_uniform = uniform_query_len == keys.uniform_query_len
        key = _graph_key(bound, layout, keys, cudagraph_mode, is_uniform)
    if key is not None:
        layout = pad_layout(layout, key.descriptor, null_row=limits.null_row)
    with _enough_memory(bound, lens), torch.no_grad():
        if key is not None and key.sampler is not None:
            assert bound.captured is not None
            with bound.buffers.put_back():
                _wake(bound.buffers.laid_out(layout), lens, context)
                bound.captured.replay(key)
            return None
        return _execute(bound, layout, lens, context, key)


def dummy_sampler(bound: BoundStep, executed: ExecuteModelState) -> StepOutput:
    """Sample what `dummy_run` executed, with all that commonly takes memory: top-k, top-p and a penalty.

    Raises:
        DeviceMemoryError: the device has not enough memory for the logits and what is made of them.
    """
    limits, state = bound.buffers.limits, executed.state
    floats, table = torch.zeros_like(state.sampling.floats), torch.zeros_like(state.sampling.table)
    words = packed_row(
        _dummy_params(limits.vocab_size), seed=limits.seed, stream=0, eos_token_ids=limits.eos_token_ids
    )
    row = torch.tensor(words, dtype=table.dtype)
    floats[limits.null_row] = row[:NUM_FLOATS].view(torch.float32)
    table[limits.null_row] = row[NUM_FLOATS:]
    executed = replace(executed, state=replace(state, sampling=SamplingRows(floats, table)))
    with _enough_memory(bound, executed.state.layout.query_start_loc.diff().tolist()), torch.no_grad():
        return sample(executed, kernels=bound.kernels)[1]


def profile_run(bound: BoundStep, max_num_tokens: int) -> None:
    """Run what takes most memory: as many tokens as a step may have, and as many decoding requests; each sampled.

    Raises:
        DeviceMemoryError: the device has not enough memory for them.
    """
    for num_tokens, query_len in _profiled(bound.buffers.limits, max_num_tokens):
        executed = dummy_run(bound, num_tokens, uniform_query_len=query_len)
        assert executed is not None
        dummy_sampler(bound, executed)


def profile_layouts(limits: BatchLimits, max_num_tokens: int) -> list[Layout]:
    """The layouts of the steps that `profile_run` runs."""
    sampler = _dummy_shape(limits.vocab_size)
    return [
        dummy_layout(
            dummy_query_lens(num_tokens, limits.max_num_reqs, uniform_query_len=query_len),
            limits,
            sampler=sampler,
            max_seq_len=limits.max_model_len,
        )
        for num_tokens, query_len in _profiled(limits, max_num_tokens)
    ]


def _profiled(limits: BatchLimits, max_num_tokens: int) -> tuple[tuple[int, int | None], ...]:
    """Tokens, and tokens of each request if they are all alike."""
    return (max_num_tokens, None), (min(max_num_tokens, limits.max_num_reqs), 1)


def determine_available_memory(
    bound: BoundStep,
    max_num_tokens: int,
    *,
    memory: DeviceMemory,
    gpu_memory_utilization: float,
    kv_cache_bytes: int | None = None,
) -> int:
    """Bytes that a KV cache may take: the given ones, else what is left of a share of the device's memory.

    The share is of all that the device has, and everybody's use counts: weights and the largest step of `profile_run`,
    other tensors of this process (a trainer's, say), other processes. Captured graphs are not counted: they take
    theirs from what the share leaves. `bound` should have a small cache of its own.

    Raises:
        DeviceMemoryError: nothing is left, or memory was given back by others while it was measured.
    """
    memory.reset_peak()
    free = memory.free()
    profile_run(bound, max_num_tokens)
    peak = memory.peak()
    memory.reset_peak()
    if kv_cache_bytes is not None:
        return kv_cache_bytes
    if memory.free() > free:
        raise DeviceMemoryError(
            f"{memory.free():,} bytes are free after a trial run, and {free:,} were before it: another process gave "
            "memory back meanwhile, so this measured nothing. Start again once it is done, or give kv_cache_bytes"
        )
    total = memory.total()
    others = total - memory.free() - memory.reserved()
    available = int(total * gpu_memory_utilization) - others - peak
    if available <= 0:
        raise DeviceMemoryError(
            f"gpu_memory_utilization={gpu_memory_utilization} of {total:,} bytes leaves no KV cache: weights and "
            f"a step of {max_num_tokens} tokens take {peak:,}, others {others:,}. Raise gpu_memory_utilization, lower "
            "max_num_batched_tokens or max_num_reqs, or free memory on the device"
        )
    return available


def _execute(
    bound: BoundStep, layout: Layout, lens: Sequence[int], context: int | None, key: GraphKey | None
) -> ExecuteModelState:
    """Execute on the buffers, but for ledger and layout, which are the batch's own."""
    buffers = bound.buffers
    state = buffers.read(buffers.generation)
    rows = torch.tensor(layout.row_of_index, device=buffers.device)
    starts = torch.tensor(layout.query_start_loc, device=buffers.device)
    state = replace(
        state,
        ledger=replace(state.ledger, table=state.ledger.table.clone()),
        layout=Layout(rows, starts, layout.bounds),
    )
    _wake(state, lens, context)
    if key is None:
        return execute(bound.model, bound.prepared, state, kernels=bound.kernels)
    assert bound.captured is not None
    call = bound.captured.pieces(key).call
    return execute(bound.model, bound.prepared, state, kernels=bound.kernels, call=call)


def _wake(state: StepState, lens: Sequence[int], context: int | None) -> None:
    """Make the null row run, `context` tokens into a history too long for any of its tokens to be kept."""
    if context is None:
        return
    facts = {
        "num_computed_tokens": context,
        "num_known_tokens": context + max(lens) + 1,
        "length_limit": state.token_ids.shape[1],
        "active": 1,
    }
    for name, value in facts.items():
        state.ledger.table[LEDGER_COLUMNS.index(name), -1] = value


def _graph_key(
    bound: BoundStep, layout: Layout, keys: DispatchKeys, wanted: CUDAGraphMode | None, is_uniform: bool
) -> GraphKey | None:
    """The graphs that a real batch of this layout would be replayed with; None: none, and that is as wanted."""
    execution = determine_batch_execution_and_padding(keys, layout.bounds, force_uniform_decode=is_uniform)
    mode, bounds = execution.cudagraph_mode, layout.bounds
    if wanted is not None and mode is not wanted:
        raise DispatchError(
            f"a made-up batch of {bounds.num_reqs} requests with {bounds.num_tokens} tokens is dispatched to "
            f"{mode.name} and not to {wanted.name}: ask for a shape that is captured so, or for no mode"
        )
    if mode is CUDAGraphMode.NONE or bound.captured is None:
        return None
    key = bound.captured.covering(execution, SamplerShape(), num_drafts=bounds.num_drafts)
    if key is None and wanted is not None:
        raise DispatchError(
            f"no graph of {execution.descriptor} is captured for {wanted.name}: capture it first, or ask for no mode"
        )
    return key


def _dummy_params(vocab_size: int) -> SamplingParams:
    return SamplingParams(temperature=0.5, top_p=0.9, top_k=max(vocab_size - 1, 1), repetition_penalty=1.1)


def _dummy_shape(vocab_size: int) -> SamplerShape:
    return sampler_shape(sampler_features(_dummy_params(vocab_size), vocab_size, ()), num_logprobs=-1)


@contextmanager
def _enough_memory(bound: BoundStep, lens: Sequence[int]) -> Iterator[None]:
    """Turn running out of device memory into an error that says what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{bound.buffers.device} ran out of memory in a trial step of {len(lens)} requests with {sum(lens)} tokens "
            f"({error}): lower max_num_reqs={bound.buffers.limits.max_num_reqs} or max_num_batched_tokens; once a KV "
            "cache is allocated, also gpu_memory_utilization or kv_cache_bytes"
        ) from error
