"""Hypothesis strategies for records and schedules, for property tests of what is built on them.

Everything drawn is legal: parameters pass `validate`, a schedule is one that the scheduler made. hypothesis is needed
by this module alone and is no dependency of purestep: `pip install hypothesis`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from purestep.pure.arrays import frozen
from purestep.pure.errors import InvalidParameterError
from purestep.pure.record import record, replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.queue import Queue, Request, SchedulerConfig
from purestep.pure.records.sampling_params import LOGPROBS_MODES, MAX_BIAS, SamplingParams, validate
from purestep.pure.records.scheduler_output import NOTHING, SchedulerOutput
from purestep.pure.scheduler import abort, add, make_queue, schedule, update
from purestep.pure.scheduler.rows import rows_of
from purestep.pure.settle import settle
from purestep.pure.update import update_states

REQ_IDS = ("a", "b", "c", "d", "e", "f")
MAX_NUM_STEPS = 12


@record
class ScheduledStep:
    """One step of a schedule, and what an imagined device says of it: its tokens mean nothing."""

    output: SchedulerOutput
    result: StepOutput  # on the host; empty where nothing is scheduled


def batch_limits(*, vocab_size: int = 16, max_num_groups: int = 2) -> st.SearchStrategy[BatchLimits]:
    """Small limits with one KV group or more; the cache holds one request of full length at least."""

    @st.composite
    def limits(draw: st.DrawFn) -> BatchLimits:
        max_model_len = draw(st.integers(4, 24))
        sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=max_num_groups))
        spare = draw(st.integers(0, 2 * max_model_len))
        return BatchLimits(
            max_num_reqs=draw(st.integers(1, 4)),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            block_sizes=tuple(sizes),
            num_blocks=tuple(1 + -(-(max_model_len + spare) // size) for size in sizes),
            eos_token_ids=draw(st.sampled_from([(), (0,), (0, 1)])),
            seed=draw(st.integers(0, 3)),
        )

    return limits()


def sampling_params(
    vocab_size: int, *, max_model_len: int, eos_token_ids: tuple[int, ...] = ()
) -> st.SearchStrategy[SamplingParams]:
    """Parameters of every kind, neutral ones the likeliest; they are valid for this vocabulary, context and end."""
    token, floats = st.integers(0, vocab_size - 1), st.floats
    few = st.lists(token, max_size=3, unique=True).map(tuple)

    def build(fields: dict[str, Any]) -> SamplingParams:
        fits = {"min_tokens": min(fields["min_tokens"], fields["max_tokens"] or max_model_len)}
        if fields["allowed_token_ids"] is not None:  # nothing may forbid all that is allowed
            fits |= {"bad_words_token_ids": (), "stop_token_ids": ()}
        return SamplingParams(**(fields | fits))

    def is_valid(params: SamplingParams) -> bool:
        try:
            validate(params, vocab_size, max_model_len, eos_token_ids=eos_token_ids)
        except InvalidParameterError:  # the end is all that is allowed, or the vocabulary is tiny
            return False
        return True

    return (
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 1.0]) | floats(1e-5, 4.0),
                "top_p": st.just(1.0) | floats(0.05, 1.0),
                "top_k": st.just(0) | st.integers(-1, vocab_size + 2),
                "min_p": st.just(0.0) | floats(0.0, 1.0),
                "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
                "max_tokens": st.none() | st.integers(1, max_model_len),
                "min_tokens": st.just(0) | st.integers(0, 3),
                "stop_token_ids": st.just(()) | few,
                "ignore_eos": st.booleans(),
                "presence_penalty": st.just(0.0) | floats(-2.0, 2.0),
                "frequency_penalty": st.just(0.0) | floats(-2.0, 2.0),
                "repetition_penalty": st.just(1.0) | floats(0.1, 3.0),
                "logprobs": st.none() | st.integers(-1, vocab_size),
                "logprobs_mode": st.sampled_from(LOGPROBS_MODES),
                "logit_bias": st.just({}) | st.dictionaries(token, floats(-MAX_BIAS, MAX_BIAS), max_size=3),
                "allowed_token_ids": st.none() | st.lists(token, min_size=1, max_size=5, unique=True),
                "bad_words_token_ids": st.just(())
                | st.lists(st.lists(token, min_size=1, max_size=3), max_size=2),
            }
        )
        .map(build)
        .filter(is_valid)
    )


def requests(
    limits: BatchLimits,
    *,
    req_ids: Sequence[str] = REQ_IDS,
    params: st.SearchStrategy[SamplingParams] | None = None,
) -> st.SearchStrategy[Request]:
    """Requests that fit the limits; `params` says how they are sampled, by default in any way."""
    every = _all_params(limits)
    token = st.integers(0, limits.vocab_size - 1)
    longest = max(1, min(limits.max_model_len - 1, 12))
    return st.builds(
        Request,
        req_id=st.sampled_from(req_ids),
        prompt_token_ids=st.lists(token, min_size=1, max_size=longest).map(tuple),
        sampling_params=every if params is None else params,
        priority=st.sampled_from([0, 0, 1]),
        stream=st.integers(0, 3),
        eos_token_ids=st.just(limits.eos_token_ids),
    )


def schedules(
    limits: BatchLimits,
    *,
    params: st.SearchStrategy[SamplingParams] | None = None,
    max_num_steps: int = MAX_NUM_STEPS,
) -> st.SearchStrategy[tuple[ScheduledStep, ...]]:
    """What the scheduler says from the empty batch on, while requests arrive, are chunked, preempted and aborted.

    It depends on no token: nothing is shared through the prefix cache, and by default requests are stopped by nothing
    but their length. So a schedule can also be run on a real device. With `params` that name stop ids, tokens of
    the imagined device end requests.
    """
    every = _all_params(limits)
    own = every.map(_without_stops) if params is None else params

    @st.composite
    def steps(draw: st.DrawFn) -> tuple[ScheduledStep, ...]:
        queue, made = make_queue(draw(_configs(limits))), []
        for arrival in range(draw(st.integers(1, max_num_steps))):
            for request in draw(st.lists(requests(limits, params=own), max_size=2)):
                if request.req_id not in queue.live:
                    queue = add(queue, replace(request, arrival=arrival))
            queue = abort(queue, draw(st.sampled_from([(), (), (), REQ_IDS[:1], REQ_IDS[1:2]])))
            queue, output = schedule(queue)
            result = _imagined(queue, limits.vocab_size - 1)
            if output.req_ids:
                queue, _ = update(queue, output.req_ids, result)
            made.append(ScheduledStep(_without_tokens(output), result))
        return tuple(made)

    return steps()


def batches(
    limits: BatchLimits, *, params: st.SearchStrategy[SamplingParams] | None = None
) -> st.SearchStrategy[InputBatch]:
    """Batches about to run a step, with everything settled before it."""

    def last(schedule: Sequence[ScheduledStep]) -> InputBatch:
        batch = InputBatch.make_empty(limits)
        for step in schedule[:-1]:
            batch = update_states(batch, step.output)
            batch = settle(batch, batch, step.result) if step.output.req_ids else batch
        return update_states(batch, schedule[-1].output)

    return schedules(limits, params=params).map(last)


def logits(num_reqs: int, vocab_size: int) -> st.SearchStrategy[Tensor]:
    """float32 [num_reqs, vocab_size]: ties, large numbers and forbidden tokens, one token at least being allowed."""
    value = st.integers(-3, 3).map(float) | st.floats(-80.0, 80.0, width=32) | st.just(float("-inf"))
    row = st.tuples(st.lists(value, min_size=vocab_size, max_size=vocab_size), st.integers(0, vocab_size - 1))

    def build(rows: list[tuple[list[float], int]]) -> Tensor:
        allowed = torch.tensor([place for _, place in rows], dtype=torch.int64)[:, None]
        table = torch.tensor([values for values, _ in rows], dtype=torch.float32).view(num_reqs, vocab_size)
        return table.scatter(1, allowed, table.gather(1, allowed).clamp(min=-80.0))

    return st.lists(row, min_size=num_reqs, max_size=num_reqs).map(build)


def _all_params(limits: BatchLimits) -> st.SearchStrategy[SamplingParams]:
    return sampling_params(
        limits.vocab_size, max_model_len=limits.max_model_len, eos_token_ids=limits.eos_token_ids
    )


def _configs(limits: BatchLimits) -> st.SearchStrategy[SchedulerConfig]:
    return st.builds(
        SchedulerConfig,
        num_blocks=st.just(limits.num_blocks),
        block_sizes=st.just(limits.block_sizes),
        max_num_reqs=st.just(limits.max_num_reqs),
        max_num_batched_tokens=st.integers(1, 2 * limits.max_model_len),
        max_model_len=st.just(limits.max_model_len),
        enable_prefix_caching=st.just(False),
        block_horizon=st.sampled_from([1, 1, 4]),
    )


def _without_stops(params: SamplingParams) -> SamplingParams:
    return replace(params, stop_token_ids=(), ignore_eos=True)


def _imagined(queue: Queue, token: int) -> StepOutput:
    """What a device says of the last step in flight that samples the same token everywhere."""
    if not queue.in_flight:
        nothing = frozen(np.zeros(0, np.int32))
        return StepOutput(nothing[:, None], nothing, nothing.astype(bool), nothing.astype(bool))
    step = queue.in_flight[-1]
    computed = queue.running.counts.num_computed[rows_of(queue.running, step.ticket)]
    kept = np.where(step.samples, token, -1).astype(np.int32)
    yes = np.ones(len(kept), np.bool_)
    return StepOutput(frozen(kept[:, None]), computed, frozen(yes), frozen(~yes))


def _without_tokens(output: SchedulerOutput) -> SchedulerOutput:
    """The output without the tokens that the imagined device gave."""
    cached = output.scheduled_cached_reqs
    return replace(output, scheduled_cached_reqs=replace(cached, all_token_ids=NOTHING))
