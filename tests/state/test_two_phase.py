"""A step in two launches is the step in one; what lies between them is good for one use."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given

from purestep.kernels.donating import donating
from purestep.pure.dispatch import dispatch_keys
from purestep.pure.errors import CaptureError, StaleStateError
from purestep.pure.grammar import GrammarMask
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig, DispatchKeys
from purestep.pure.settle import settle
from purestep.pure.strategies import ScheduledStep, schedules
from purestep.pure.update import update_states
from purestep.state.buffers import PersistentBuffers, leaves
from purestep.state.captures import graph_keys
from purestep.state.run import BoundStep, run
from purestep.state.two_phase import Executed, dispatched, execute, prompt_logprobs, sample, take_in
from tests.laws import digest
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs
from tests.tiny import decode, new_request, scheduled

VOCAB = 64
LIMITS = BatchLimits(max_num_reqs=3, max_model_len=24, vocab_size=VOCAB, block_sizes=(4,), num_blocks=(24,))
CONFIG = tiny_config(vocab_size=VOCAB)
MODEL, PARAMS = llama(CONFIG), random_params(CONFIG, std=0.5)
KEYS = dispatch_keys(DispatchConfig((2, 4, 8, 16, 48), 3), CUDAGraphMode.PIECEWISE)
HALVES = dispatch_keys(DispatchConfig((2, 4, 8, 16, 48), 3), CUDAGraphMode.FULL)


def bound_step(keys: DispatchKeys | None = None) -> BoundStep:
    api = None if keys is None else FakeGraphs()
    bound = BoundStep(PersistentBuffers(MODEL, LIMITS), MODEL, PARAMS, donating, api)
    if bound.captured is not None and keys is not None:
        bound.captured.capture(graph_keys(keys, two_phase=True))
    return bound


def first_batch() -> InputBatch:
    """Two prompts, one of them only in part."""
    new = (new_request("a", (5, 9, 2), ((1, 2),)), new_request("b", (7, 7, 1, 3, 8), ((3, 4),)))
    return update_states(InputBatch.make_empty(LIMITS), scheduled(*new, counts={"a": 3, "b": 4}))


def begun(bound: BoundStep) -> Executed:
    leased = bound.buffers.lease()
    return execute(bound, leased, plan_step(first_batch(), leased.absorbed))


@pytest.mark.parametrize("keys", [None, KEYS, HALVES], ids=["eager", "pieces", "halves"])
def test_execute_and_sample_are_run(keys: DispatchKeys | None, unchecked_records: None) -> None:
    @examples(0.1)
    @given(schedules(LIMITS, max_num_steps=8))
    def check(steps: Sequence[ScheduledStep]) -> None:
        """Every output and every byte that anybody reads, whatever is scheduled; with captured pieces too."""
        whole, halves = bound_step(), bound_step(keys)
        batch, one, two = InputBatch.make_empty(LIMITS), whole.buffers.lease(), halves.buffers.lease()
        for step in steps:
            batch = update_states(batch, step.output)
            if not step.output.req_ids:
                continue
            one, pending = run(whole, one, plan_step(batch, one.absorbed))
            padded, key = dispatched(halves, keys, batch, two.absorbed)
            assert (key is None) == (keys is None)
            executed = execute(halves, two, plan_step(padded, two.absorbed), key=key)
            two, other = sample(halves, executed)
            expected, found = pending.result(), other.result()
            num_reqs = len(batch.req_ids)
            for name in ("sampled_token_ids", "num_computed_tokens", "active", "has_nan"):
                assert (getattr(found, name)[:num_reqs] == getattr(expected, name)).all()
            for (name, ours), (_, theirs) in zip(leaves(two.value), leaves(one.value), strict=True):
                if name.startswith(
                    "kv"
                ):  # what lies in block 0 is nobody's; products of other sizes round otherwise
                    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-4, atol=1e-5)
                else:
                    rows = slice(None, -1) if name == "token_ids" else slice(None)
                    assert torch.equal(ours[rows], theirs[rows]), name
            batch = settle(batch, batch, expected)

    check()


def test_a_state_between_the_halves_is_sampled_once() -> None:
    bound = bound_step()
    executed = begun(bound)
    assert repr(executed) == "Executed(ExecuteModelState at step 2: 2 requests)"
    sample(bound, executed)

    for use in (
        lambda: sample(bound, executed),
        lambda: executed.value,
        lambda: prompt_logprobs(bound, executed, ()),
    ):
        with pytest.raises(StaleStateError, match=r"consumed at step 2; the buffers are at step 3"):
            use()
    assert repr(executed) == "ExecuteModelState(~consumed at step 2~)"


def test_a_lease_is_executed_once_and_its_state_gone_until_it_is_sampled() -> None:
    bound = bound_step()
    leased = bound.buffers.lease()
    plan = plan_step(first_batch(), leased.absorbed)
    executed = execute(bound, leased, plan)

    for launch in (execute, run, take_in):
        with pytest.raises(StaleStateError, match=r"consumed at step 1"):
            launch(bound, leased, plan)
    leased, pending = sample(bound, executed)
    batch = settle(plan.batch, plan.batch, pending.result())
    run(bound, leased, plan_step(decode(batch, "a"), leased.absorbed))


def test_a_state_is_sampled_on_its_own_buffers_only() -> None:
    bound, other = bound_step(), bound_step()
    executed = begun(bound)

    for use in (sample, lambda b, e: prompt_logprobs(b, e, ())):
        with pytest.raises(StaleStateError, match="other buffers"):
            use(other, executed)
    sample(bound, executed)


def test_a_step_that_fails_after_execute_voids_the_state_until_a_new_lease() -> None:
    bound = bound_step()
    executed = begun(bound)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    broken = BoundStep(bound.buffers, MODEL, PARAMS, replace(donating, greedy=fails))
    with pytest.raises(RuntimeError, match="out of luck"):
        sample(broken, executed)

    with pytest.raises(StaleStateError, match="failed half-way"):
        sample(bound, executed)
    sample(bound, begun(bound))


def test_masks_are_of_the_step_that_they_are_given_to() -> None:
    """The row with a mask gets the one token that is left; nothing else of the step is another."""
    bound = bound_step()
    _, plain = sample(bound, begun(bound))
    words = np.zeros((1, 2), np.int32)
    words[0, 1] = 1 << 9  # token 41
    executed = begun(bound)
    logits = executed.value.logits.clone()  # type: ignore[union-attr]
    _, masked = sample(bound, executed, grammar=GrammarMask(words, np.array([0, -1], np.int32)))

    assert (
        masked.result().sampled_token_ids.tolist()
        == [[41], [-1]]
        != plain.result().sampled_token_ids.tolist()
    )
    assert digest(executed._executed.logits) == digest(logits), "logits are the model's"


def test_a_plan_can_be_taken_in_without_a_step() -> None:
    """Blocks are zeroed, no token is run, and the next plan starts from there."""
    bound = bound_step()
    leased, pending = sample(bound, begun(bound))
    batch = settle(leased.absorbed, leased.absorbed, pending.result())
    tokens = leased.value.ledger.table.clone()
    batch = update_states(batch, replace(scheduled(counts={}), new_block_ids_to_zero=((3, 4),)))
    assert all(kv[3:5].any() for kv in leased.value.kv)

    leased = take_in(bound, leased, plan_step(batch, leased.absorbed))

    assert not any(kv[3:5].any() for kv in leased.value.kv)
    assert torch.equal(leased.value.ledger.table, tokens)
    assert all(kv[1].any() for kv in leased.value.kv)
    assert leased.absorbed is batch


def test_masks_apply_between_captured_halves() -> None:
    """The captured sample reads the logits that were masked, and one that was not captured runs eagerly on them."""
    words = np.zeros((1, 2), np.int32)
    words[0, 1] = 1 << 5  # token 37 alone
    mask = GrammarMask(words, np.array([0, -1], np.int32))
    for shapes in (None, []):
        bound = bound_step(HALVES)
        captured = bound.captured
        assert captured is not None
        if shapes is not None:
            captured.clear()
            captured.capture([key for key in graph_keys(HALVES, two_phase=True) if key.half == "execute"])
        leased = bound.buffers.lease()
        padded, key = dispatched(bound, HALVES, first_batch(), leased.absorbed)
        assert key is not None and key.half == "execute"
        executed = execute(bound, leased, plan_step(padded, leased.absorbed), key=key)
        wide = GrammarMask(words, np.array([0, *[-1] * (len(executed.value.inputs.discard) - 1)], np.int32))

        _, pending = sample(bound, executed, grammar=wide)

        assert pending.result().sampled_token_ids[0, 0] == 37
        unmasked = bound_step()
        _, expected = sample(unmasked, begun(unmasked), grammar=mask)
        assert (pending.result().sampled_token_ids[:2] == expected.result().sampled_token_ids).all()


def test_a_sample_is_captured_behind_its_execute_only() -> None:
    bound = bound_step(KEYS)
    assert bound.captured is not None
    execute_key, sample_key, *_ = graph_keys(HALVES, two_phase=True)

    with pytest.raises(CaptureError, match="no execute of it was just before"):
        bound.captured.capture([sample_key])
    bound.captured.capture([execute_key])
    with pytest.raises(CaptureError, match="all samples that read its logits behind it"):
        bound.captured.capture([sample_key])
