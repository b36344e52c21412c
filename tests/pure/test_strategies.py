"""What the public strategies draw is legal, and reaches what a property test wants to see."""

from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.sampling_params import validate
from purestep.pure.settle import settle
from purestep.pure.strategies import (
    ScheduledStep,
    batch_limits,
    batches,
    logits,
    requests,
    sampling_params,
    schedules,
)
from purestep.pure.update import update_states
from tests import laws
from tests.profiles import examples
from tests.tiny import GREEDY, Loop
from tests.toy_model import VOCAB, toy_model

# The checker looks at random items of containers, which hypothesis does not allow while it draws.
pytestmark = pytest.mark.usefixtures("unchecked_records")

LIMITS = BatchLimits(3, 16, VOCAB, (2, 4), (14, 9), (0,))


@given(sampling_params(3, max_model_len=9, eos_token_ids=(0, 1)))
def test_sampling_parameters_are_valid(params: Any) -> None:
    validate(params, 3, 9, eos_token_ids=(0, 1))


@examples(0.5)
@given(st.data())
def test_requests_fit_their_limits(data: st.DataObject) -> None:
    limits = data.draw(batch_limits())
    request = data.draw(requests(limits))
    validate(
        request.sampling_params,
        limits.vocab_size,
        limits.max_model_len,
        eos_token_ids=request.eos_token_ids,
    )
    assert 0 < len(request.prompt_token_ids) < limits.max_model_len
    assert set(request.prompt_token_ids) <= set(range(limits.vocab_size))


@examples(0.3)
@given(st.data())
def test_schedules_are_taken_in_by_every_batch_on_the_way(data: st.DataObject) -> None:
    limits = data.draw(batch_limits())
    batch = InputBatch.make_empty(limits)
    for step in data.draw(schedules(limits)):
        batch = update_states(batch, step.output)
        laws.assert_rows_are_a_partition(batch)
        if step.output.req_ids:
            batch = settle(batch, batch, step.result)


@examples(0.1)
@given(schedules(LIMITS))
def test_schedules_run_on_a_device_whose_tokens_are_its_own(schedule: tuple[ScheduledStep, ...]) -> None:
    loop = Loop(*toy_model((0, 1)), LIMITS, kernels=reference)
    for step in schedule:
        if not step.output.req_ids:
            loop.batch = update_states(loop.batch, step.output)
            continue
        result: StepOutput = loop.step(step.output)
        assert result.num_computed_tokens.tolist() == step.result.num_computed_tokens.tolist()
        assert ((result.sampled_token_ids >= 0).numpy() == (step.result.sampled_token_ids >= 0)).all()


@examples(0.1)
@given(batches(LIMITS))
def test_batches_are_about_to_run(batch: InputBatch) -> None:
    laws.assert_rows_are_a_partition(batch)
    clock = batch.clock
    assert clock.num_begun - clock.num_settled == bool(batch.req_ids)


@given(logits(3, 5))
def test_logits_allow_a_token_in_every_row(table: torch.Tensor) -> None:
    assert table.shape == (3, 5) and table.dtype == torch.float32
    assert table.isfinite().any(-1).all() and not table.isnan().any() and (table < float("inf")).all()


def test_schedules_reach_chunks_preemption_resumption_and_aborts() -> None:
    def has_chunk(schedule: Any) -> bool:
        return any((step.result.sampled_token_ids < 0).any() for step in schedule)

    def resumes(schedule: Any) -> bool:
        return any(step.output.scheduled_cached_reqs.resumed_req_ids for step in schedule)

    def finishes(schedule: Any) -> bool:
        return any(step.output.finished_req_ids for step in schedule)

    greedy = st.just(GREEDY)
    once = settings(max_examples=2_000, database=None, phases=[Phase.generate])
    tight = replace(LIMITS, num_blocks=(9, 5))
    for reached in (has_chunk, resumes, finishes):
        find(schedules(tight, params=greedy), reached, settings=once)
