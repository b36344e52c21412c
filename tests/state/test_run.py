"""Buffers, leases and `run`: one owner of what changes, and no step on a state that is gone."""

import gc
import weakref

import numpy as np
import pytest
import torch

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.pure.errors import DispatchError, ExtrasError, FreshStorageError, PlanBaseError, StaleStateError
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.layout import Layout, SamplerShape
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from purestep.pure.records.state import StepState
from purestep.pure.step import step
from purestep.pure.update import update_states
from purestep.state.buffers import PersistentBuffers, leaves
from purestep.state.lease import Leased
from purestep.state.run import BoundStep, run
from tests.laws import equal

LIMITS = BatchLimits(max_num_reqs=3, max_model_len=24, vocab_size=64, block_sizes=(4,), num_blocks=(12,))


def bound_step() -> BoundStep:
    config = tiny_config()
    model = llama(config)
    buffers = PersistentBuffers(model, LIMITS)
    return BoundStep(buffers, model, random_params(config, std=0.5), donating)


def first_batch() -> InputBatch:
    """Two prompts, one of them only in part."""
    new = (
        NewRequestData("a", (5, 9, 2), SamplingParams(temperature=0.0), ((1, 2),)),
        NewRequestData("b", (7, 7, 1, 3, 8), SamplingParams(seed=3), ((3, 4),)),
    )
    counts = np.array([3, 4], np.int32)
    output = SchedulerOutput(new, CachedRequestData.make_empty(), ("a", "b"), counts)
    return update_states(InputBatch.make_empty(LIMITS), output)


def addresses(state: StepState) -> list[int]:
    return [leaf.data_ptr() for _, leaf in leaves(state)]


def test_a_run_on_buffers_is_the_step_of_the_reference() -> None:
    bound = bound_step()
    leased = bound.buffers.lease()
    start, batch = leased.clone(), first_batch()
    plan = plan_step(batch, leased.absorbed)

    leased, pending = run(bound, leased, plan)

    expected, output = step(
        bound.model, bound.params, replace(start, inbox=plan.inbox.to("cpu")), kernels=reference
    )
    assert equal(leased.value.ledger, expected.ledger)
    assert equal(leased.value.token_ids, expected.token_ids)
    for ours, theirs in zip(leased.value.kv, expected.kv, strict=True):
        assert (ours[1:] - theirs[1:]).abs().max() < 1e-5  # block 0 is written by padding, and read by nobody
    assert pending.result().sampled_token_ids.tolist() == output.sampled_token_ids.tolist()


def test_steps_leave_every_buffer_where_it_was() -> None:
    bound = bound_step()
    leased = bound.buffers.lease()
    before = addresses(leased.value)

    leased, _ = run(bound, leased, plan_step(first_batch(), leased.absorbed))

    assert addresses(leased.value) == before


def test_a_consumed_state_is_refused_and_says_at_which_step() -> None:
    bound = bound_step()
    old = bound.buffers.lease()
    plan = plan_step(first_batch(), old.absorbed)
    run(bound, old, plan)

    with pytest.raises(StaleStateError, match=r"consumed at step 1; the buffers are at step 2"):
        run(bound, old, plan)
    with pytest.raises(StaleStateError):
        old.clone()
    assert repr(old) == "StepState(~consumed at step 1~)"


def test_a_clone_is_not_touched_by_later_steps() -> None:
    bound = bound_step()
    leased = bound.buffers.lease()
    leased, _ = run(bound, leased, plan_step(first_batch(), leased.absorbed))
    clone = leased.clone()
    kept = [leaf.clone() for _, leaf in leaves(clone)]

    run(bound, leased, plan_step(leased.absorbed, leased.absorbed))

    assert all(torch.equal(a, b) for (_, a), b in zip(leaves(clone), kept, strict=True))


def test_a_plan_from_another_batch_is_refused_and_the_lease_stays_good() -> None:
    bound = bound_step()
    leased = bound.buffers.lease()
    batch = first_batch()

    with pytest.raises(PlanBaseError, match="plan_step"):
        run(bound, leased, plan_step(batch, InputBatch.make_empty(LIMITS)))
    run(bound, leased, plan_step(batch, leased.absorbed))


def test_a_batch_that_is_padded_past_the_buffers_is_refused_and_the_lease_stays_good() -> None:
    bound = bound_step()
    leased, batch = bound.buffers.lease(), first_batch()
    layout = batch.layout
    wide = Layout(
        np.append(layout.row_of_index, np.full(2, LIMITS.null_row, np.int32)),
        np.append(layout.query_start_loc, np.full(2, layout.query_start_loc[-1])),
        replace(layout.bounds, num_reqs=4),
    )

    with pytest.raises(DispatchError, match=r"a layout of 4 requests, padding included.*max_num_reqs=3"):
        run(bound, leased, plan_step(replace(batch, layout=wide), leased.absorbed))
    with pytest.raises(DispatchError, match="a layout of 4 requests"):
        bound.buffers.laid_out(wide)
    run(bound, leased, plan_step(batch, leased.absorbed))


def test_whole_steps_of_requests_with_processors_are_refused_and_the_lease_stays_good() -> None:
    bound = bound_step()
    leased, batch = bound.buffers.lease(), first_batch()
    bounds = replace(batch.layout.bounds, sampler=SamplerShape(extras=True))
    asking = replace(batch, layout=replace(batch.layout, bounds=bounds))

    with pytest.raises(ExtrasError, match="a whole step of requests with logits_processors"):
        run(bound, leased, plan_step(asking, leased.absorbed))
    run(bound, leased, plan_step(batch, leased.absorbed))


def test_kernels_that_do_not_donate_are_refused_with_the_leaf_and_its_size() -> None:
    bound = bound_step()
    fresh = BoundStep(bound.buffers, bound.model, bound.params, reference)
    leased = bound.buffers.lease()

    with pytest.raises(FreshStorageError, match=r"ledger came back in fresh storage \(\d+ bytes"):
        run(fresh, leased, plan_step(first_batch(), leased.absorbed))


def test_a_step_that_fails_voids_the_lease_until_a_new_one() -> None:
    bound = bound_step()

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    broken = BoundStep(bound.buffers, bound.model, bound.params, replace(donating, greedy=fails))
    leased = bound.buffers.lease()
    plan = plan_step(first_batch(), leased.absorbed)
    with pytest.raises(RuntimeError, match="out of luck"):
        run(broken, leased, plan)

    with pytest.raises(StaleStateError, match=r"failed half-way"):
        run(bound, leased, plan)
    leased = bound.buffers.lease()
    run(bound, leased, plan_step(first_batch(), leased.absorbed))


def test_closed_buffers_are_gone() -> None:
    bound = bound_step()
    leased = bound.buffers.lease()
    storage = [weakref.ref(leaf) for _, leaf in leaves(leased.value)]

    bound.buffers.close()
    gc.collect()

    assert [ref() for ref in storage] == [None] * len(storage)
    with pytest.raises(StaleStateError, match="closed"):
        leased.value  # noqa: B018
    assert repr(bound.buffers) == "PersistentBuffers(closed)"


def test_a_lease_prints_what_it_is_on() -> None:
    leased: Leased = bound_step().buffers.lease()

    assert repr(leased) == "Leased(StepState at step 1: 3 rows x 24 tokens, 2 layers)"


def test_a_lease_on_other_buffers_is_refused() -> None:
    bound, other = bound_step(), bound_step()
    lease, foreign = bound.buffers.lease(), other.buffers.lease()

    with pytest.raises(StaleStateError, match="other buffers"):
        run(bound, foreign, plan_step(first_batch(), foreign.absorbed))
    run(bound, lease, plan_step(first_batch(), lease.absorbed))
