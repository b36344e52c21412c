"""Failures of the field, brought back one by one: on each small patch the test that is named after it must fail.

A mutant is patched into this process where the code looks a function up; `failure` is its entry in the collection of
field failures. Without any patch the same tests must pass.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from purestep.kernels.donating import donating
from purestep.kernels.types import Kernels
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.inputs import prepare_inputs
from purestep.pure.record import replace
from purestep.pure.records.inputs import StepInputs
from purestep.pure.records.outputs import SampledTokens
from purestep.pure.records.queue import Queue, RequestState
from purestep.pure.records.sampling_rows import packed_row
from purestep.pure.records.state import ExecuteModelState, StepState
from purestep.pure.sampling import sample_tokens
from purestep.pure.scheduler import set_version
from purestep.pure.scheduler.admission import Beginning
from purestep.state.buffers import PersistentBuffers
from tests.bugs import test_kv_cache, test_prefill, test_sampling, tiny_engine
from tests.bugs.buffer_mutants import BUFFER_MUTANTS
from tests.bugs.drafter_mutants import DRAFTER_MUTANTS
from tests.bugs.moment_mutants import MOMENT_MUTANTS
from tests.bugs.processor_mutants import PROCESSOR_MUTANTS
from tests.bugs.runner_mutants import RUNNER_MUTANTS
from tests.bugs.speculation_mutants import SPECULATION_MUTANTS
from tests.mutant import Mutant
from tests.state import test_engine

# A package may hold a function of a module's name, so modules are fetched by their full names.
plan, step, turns, setup, admission, updating = map(
    importlib.import_module,
    (
        "purestep.pure.plan",
        "purestep.pure.step",
        "purestep.state.turns",
        "purestep.state.setup",
        "purestep.pure.scheduler.admission",
        "purestep.pure.scheduler.update",
    ),
)
_beginnings, _leave = admission._beginnings, updating.leave

Beginnings = tuple[RequestState, list[Beginning]]


# H1: the query of a fully cached prompt is empty; a preempted request is taken for a decode.


def runs_nothing_on_a_full_hit(queue: Queue, state: RequestState) -> Beginnings:
    state, (best, *others) = _beginnings(queue, state)
    if best.num_computed == len(state.tokens) - 1:
        best = replace(best, num_computed=len(state.tokens), sources=(None,) * len(best.sources))
    return state, [best, *others]


def continues_what_was_preempted(queue: Queue, state: RequestState) -> Beginnings:
    state, (best, *others) = _beginnings(queue, state)
    if state.num_preemptions:
        best = replace(best, num_computed=len(state.tokens) - 1)
    return state, [best, *others]


# H3: the end of a prefill is taken from the prompt, not from the history.


def keeps_what_lies_past_the_prompt(state: StepState, *, kernels: Kernels) -> StepInputs:
    inputs = prepare_inputs(state, kernels=kernels)
    ledger, rows = state.ledger, state.layout.row_of_index
    prompt = (ledger.num_known_tokens - ledger.num_output_tokens)[rows]
    return replace(inputs, discard=~ledger.active[rows] | (inputs.seq_lens < prompt))


# H7: padding has slot -1, which as an index is the last one.


def pads_with_minus_one(state: StepState, *, kernels: Kernels) -> StepInputs:
    inputs = prepare_inputs(state, kernels=kernels)
    sizes = torch.tensor(state.block_sizes)[:, None]
    return replace(inputs, slot_mapping=torch.where(inputs.slot_mapping < sizes, -1, inputs.slot_mapping))


# H7: a row has no end, so its slots are in blocks of whoever has what its last request had.


def runs_without_room(state: StepState, *, kernels: Kernels) -> StepInputs:
    return prepare_inputs(replace(state, room=torch.full_like(state.room, 1 << 20)), kernels=kernels)


# H11: another algorithm for large batches, which cuts ties.


def truncates_large_batches_exactly(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    if len(logits) < 8:
        return donating.truncate(logits, top_k, top_p, min_p)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(logits.shape[1]).expand_as(order)
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, place < top_k[:, None])
    return torch.where(kept, logits, float("-inf"))


# H13: logits are divided by the temperature as they are.


def divides_by_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits / torch.where(temperature < 1e-5, 1.0, temperature).to(logits.dtype)[:, None]


# H15: the placeholders of unpenalised rows are counted as the last token once any row is penalised.


def penalizes_placeholders(logits: Tensor, *arguments: Tensor) -> Tensor:
    *_, repetition, frequency, presence = arguments
    penalized = donating.penalize(logits, *arguments)
    neutral = (repetition == 1) & (frequency == 0) & (presence == 0)
    last = torch.arange(logits.shape[1]) == logits.shape[1] - 1
    return torch.where(neutral[:, None] & last, penalized - frequency.max(), penalized)


# H17: of what ends a request, only its own stop ids are held back.


def packs_no_end_of_sequence(params: Any, *, seed: int, stream: int, eos_token_ids: Any) -> list[int]:
    return packed_row(params, seed=seed, stream=stream, eos_token_ids=())


# H18: noise is a function of the seed alone, or of the place in the batch.


def draws_by_seed(seed: Tensor, stream: Tensor, output_index: Tensor, **how: int) -> Tensor:
    return donating.uniforms(seed, torch.zeros_like(stream), output_index, **how)


def draws_by_index(seed: Tensor, stream: Tensor, output_index: Tensor, **how: int) -> Tensor:
    return donating.uniforms(seed, torch.arange(len(stream)), output_index, **how)


# H19: NaN is made a number; blocks of a poisoned request are offered to the prefix cache.


def samples_sanitised(executed: ExecuteModelState, **how: Any) -> SampledTokens:
    assert executed.logits is not None
    return sample_tokens(replace(executed, logits=executed.logits.nan_to_num(0.0)), **how)


def leaves_as_if_clean(queue: Queue, rows: Any, poisoned: Any = ()) -> tuple[Queue, tuple[RequestState, ...]]:
    return _leave(queue, rows)


# H37: keys and values of the old weights stay.


def keeps_kv(queue: Queue, version: int, *, keep_kv: bool = False) -> Queue:
    return set_version(queue, version, keep_kv=True)


# H41: somebody remembers every engine's buffers.


class RememberedBuffers(PersistentBuffers):
    all_of_them: tuple[PersistentBuffers, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        RememberedBuffers.all_of_them += (self,)


def with_kernels(**functions: Any) -> dict[str, Kernels]:
    return {"donating": replace(donating, **functions)}


MUTANTS = [
    *BUFFER_MUTANTS,
    *DRAFTER_MUTANTS,
    *MOMENT_MUTANTS,
    *RUNNER_MUTANTS,
    *PROCESSOR_MUTANTS,
    *SPECULATION_MUTANTS,
    Mutant(
        "H1",
        "a full hit runs no token",
        test_prefill.test_a_fully_cached_prompt_computes_its_last_token_and_changes_no_cached_block,
        admission,
        {"_beginnings": runs_nothing_on_a_full_hit},
        error=SchedulerOutputError,
    ),
    Mutant(
        "H1",
        "a preempted request is a decode",
        test_prefill.test_a_preempted_request_computes_its_whole_history_again,
        admission,
        {"_beginnings": continues_what_was_preempted},
    ),
    Mutant(
        "H3",
        "a prefill ends with the prompt",
        test_prefill.test_a_resumed_request_keeps_no_token_before_its_whole_history_is_computed,
        step,
        {"prepare_inputs": keeps_what_lies_past_the_prompt},
    ),
    Mutant(
        "H7",
        "padding has slot -1",
        test_kv_cache.test_padding_writes_no_block_that_a_request_holds,
        step,
        {"prepare_inputs": pads_with_minus_one},
    ),
    Mutant(
        "H7",
        "a row goes on without blocks",
        test_kv_cache.test_a_row_that_outruns_its_blocks_writes_no_block_of_another_request,
        step,
        {"prepare_inputs": runs_without_room},
    ),
    Mutant(
        "H11",
        "top-k cuts ties in large batches",
        test_sampling.test_top_k_keeps_the_same_tokens_in_a_batch_of_any_size,
        test_sampling,
        with_kernels(truncate=truncates_large_batches_exactly),
    ),
    Mutant(
        "H13",
        "logits / temperature overflows",
        test_sampling.test_temperatures_near_zero_tend_to_greedy_and_stay_finite,
        test_sampling,
        with_kernels(scale_by_temperature=divides_by_temperature),
    ),
    Mutant(
        "H15",
        "placeholders are penalised",
        test_sampling.test_penalties_of_a_neighbour_change_no_bit_of_an_unpenalised_request,
        test_sampling,
        with_kernels(penalize=penalizes_placeholders),
    ),
    Mutant(
        "H17",
        "the model's end is free before min_tokens",
        test_sampling.test_min_tokens_holds_back_stop_ids_and_the_models_own_end,
        plan,
        {"packed_row": packs_no_end_of_sequence},
    ),
    Mutant(
        "H18",
        "noise by seed alone",
        test_sampling.test_prompts_with_one_seed_draw_independently,
        tiny_engine,
        with_kernels(uniforms=draws_by_seed),
    ),
    Mutant(
        "H18",
        "noise by place in the batch",
        test_sampling.test_prompts_with_one_seed_draw_independently,
        tiny_engine,
        with_kernels(uniforms=draws_by_index),
    ),
    Mutant(
        "H19",
        "NaN is made a number",
        test_sampling.test_a_request_of_nan_ends_as_an_error_and_none_of_its_blocks_is_used_again,
        step,
        {"sample_tokens": samples_sanitised},
    ),
    Mutant(
        "H19",
        "poisoned blocks stay in the prefix cache",
        test_sampling.test_a_request_of_nan_ends_as_an_error_and_none_of_its_blocks_is_used_again,
        updating,
        {"leave": leaves_as_if_clean},
    ),
    Mutant(
        "H37",
        "old keys and values are kept",
        test_kv_cache.test_new_weights_never_meet_keys_and_values_of_old_ones,
        turns,
        {"set_version": keeps_kv},
    ),
    Mutant(
        "H41",
        "buffers are remembered",
        test_engine.test_closing_or_dropping_the_engine_frees_every_buffer,
        setup,
        {"PersistentBuffers": RememberedBuffers},
    ),
]


@cache
def passes(test: Callable[[], None]) -> bool:
    """Whether a test passes on the code as it is; if not, it raises."""
    test()
    return True


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.failure}: {mutant.what}")
def test_a_failure_that_is_brought_back_is_found(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, unchecked_records: None
) -> None:
    assert passes(mutant.test)
    monkeypatch.delenv(
        "CI", raising=False
    )  # there pytest spells out how long lists differ, which nobody reads here
    for name, patched in mutant.names.items():
        monkeypatch.setattr(mutant.module, name, patched)
    with pytest.raises(mutant.error):
        mutant.test()
