"""Verification on buffers: captured or not, rewound or forked, it is the reference's step."""

from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.pure.absorb import absorb
from purestep.pure.fork import fork_request
from purestep.pure.padding import pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.prompt_logprobs import prompt_chunks
from purestep.pure.record import replace
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.dispatch import BatchExecution, CUDAGraphMode
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import SamplerShape
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.plan import StepPlan
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.settle import settle
from purestep.pure.update import update_states
from purestep.state import two_phase
from purestep.state.buffers import PersistentBuffers, leaves
from purestep.state.graphs import GraphKey
from purestep.state.moments import remember, rewind
from purestep.state.profile import dummy_run, dummy_sampler
from purestep.state.run import BoundStep, run
from tests.laws import assert_reruns, equal
from tests.profiles import examples
from tests.schedules import seeds
from tests.speculation import NUM_DRAFTS, limits_of
from tests.state.fake_graphs import FakeGraphs
from tests.tiny import cached_requests, new_request, scheduled, tiny_llama

VOCAB = 16
MODEL, PARAMS = tiny_llama(vocab_size=VOCAB)
LIMITS = limits_of(MODEL, 4)
KINDS = (
    SamplingParams(temperature=0, ignore_eos=True, max_tokens=20),
    SamplingParams(temperature=0.8, seed=4, top_k=9, ignore_eos=True, max_tokens=20),
)
NAMES = ("a", "b")
Drafts = dict[str, tuple[int, ...]]


class Rig:
    """Buffers, and a host that knows all that the device does."""

    def __init__(self, graph_api: FakeGraphs | None = None) -> None:
        buffers = PersistentBuffers(MODEL, LIMITS, dtype=torch.float64)
        self.bound = BoundStep(buffers, MODEL, PARAMS, donating, graph_api=graph_api)
        self.leased, self.batch = buffers.lease(), InputBatch.make_empty(LIMITS)
        self.plans: list[StepPlan] = []
        self.told: list[list[list[int]]] = []
        new = [
            new_request(name, (3, 1, 4 + i), (tuple(range(1 + 12 * i, 13 + 12 * i)),), KINDS[i], stream=i)
            for i, name in enumerate(NAMES)
        ]
        self.step(update_states(self.batch, scheduled(*new, counts=dict.fromkeys(NAMES, 3))))

    def step(self, batch: InputBatch, key: GraphKey | None = None) -> StepOutput:
        """Run the batch, and take in what comes out."""
        padded = batch if key is None else pad_batch(batch, key.descriptor)
        plan = plan_step(padded, self.leased.absorbed)
        self.leased, pending = run(self.bound, self.leased, plan, key=key)
        output = pending.result()
        self.plans.append(plan)
        self.told.append(output.sampled_token_ids.tolist())
        self.batch = settle(batch, batch, output)
        return output

    def guessed(self, drafts: Drafts) -> InputBatch:
        """The batch in which these requests run a token and these drafts; -1 for one that the device may have."""
        output = scheduled(
            cached=cached_requests(self.batch, *drafts),
            counts={name: 1 + len(own) for name, own in drafts.items()},
        )
        return update_states(self.batch, replace(output, scheduled_spec_decode_tokens=drafts))

    def guesses(self) -> list[torch.Tensor]:
        """Copies of the ledger and of the drafts."""
        found = leaves(self.leased.value)
        return [leaf.clone() for name, leaf in found if name.startswith(("ledger", "drafts"))]


def some(rng: Random) -> Drafts:
    return {
        name: tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, NUM_DRAFTS + 1))) for name in NAMES
    }


@examples(0.1)
@given(seeds, st.booleans())
def test_captured_verification_is_the_eager_one(rng: Random, padded: bool) -> None:
    """Replayed for batches of any drafts, and for padded ones."""
    captured, eager = Rig(FakeGraphs()), Rig()
    num_reqs = 4 if padded else 2
    sampler = replace(captured.batch.layout.bounds.sampler, random=True, truncated=True)
    descriptor = BatchDescriptor(num_reqs * (NUM_DRAFTS + 1), num_reqs, uniform=True)
    key = GraphKey(descriptor, sampler, num_drafts=NUM_DRAFTS)
    assert captured.bound.captured is not None
    captured.bound.captured.capture([key])
    for _ in range(3):
        drafts = some(rng)
        theirs = eager.step(eager.guessed(drafts))
        ours = captured.step(captured.guessed(drafts), key)
        assert ours.sampled_token_ids[:2].tolist() == theirs.sampled_token_ids.tolist()
        (table, left), (expected, _) = captured.guesses(), eager.guesses()
        assert equal(table[:, :-1], expected[:, :-1]) and (left == -1).all()


def test_a_graph_of_plain_steps_is_not_found_for_drafts() -> None:
    captured = Rig(FakeGraphs()).bound.captured
    assert captured is not None
    execution = BatchExecution(CUDAGraphMode.FULL, BatchDescriptor(8, 2, uniform=True), 8, 2)
    captured.capture([GraphKey(execution.descriptor, SamplerShape())])
    assert captured.covering(execution, SamplerShape()) is not None
    assert captured.covering(execution, SamplerShape(), num_drafts=NUM_DRAFTS) is None


@examples(0.15)
@given(seeds)
def test_rewinding_brings_drafts_and_tokens_back(rng: Random) -> None:
    """The same plans give the same tokens and the same ledger, whatever ran in between."""
    rig = Rig()
    rig.step(rig.guessed(some(rng)))
    drafts = rig.leased.value.ledger.drafts
    assert drafts is not None
    drafts[:2] = torch.tensor([[5, 6, -1], [7, -1, -1]])  # as a drafter on the device leaves them
    moment, num_plans, before = remember(rig.leased, rig.batch), len(rig.plans), rig.guesses()
    for _ in range(2):
        rig.step(rig.guessed(some(rng)))
    ledger = rig.leased.value.ledger.table.clone()
    rig.leased = rewind(moment, rig.leased)
    assert all(map(equal, rig.guesses(), before))
    assert_reruns(rig.bound, moment, rig.leased, rig.plans[num_plans:], rig.told[num_plans:], ledger)


def test_a_fork_has_its_parents_history_and_none_of_its_drafts() -> None:
    """Drafts that were drawn for its parent would make the two of them alike."""
    rig = Rig()
    state = rig.leased.value
    assert state.ledger.drafts is not None
    forked = fork_request(rig.batch, "b", "c", stream=9, goes_on=True)
    row, parent = forked.row_of["c"], forked.row_of["b"]
    state.ledger.drafts[[row, parent]] = 7
    plan = plan_step(forked, rig.leased.absorbed)
    after = absorb(replace(state, inbox=plan.inbox.to("cpu")), kernels=reference)
    assert after.ledger.drafts is not None
    assert after.ledger.drafts[[row, parent]].tolist() == [[-1] * NUM_DRAFTS, [7] * NUM_DRAFTS]
    assert torch.equal(after.ledger.table[:, row], after.ledger.table[:, parent])


def test_prompt_log_probabilities_beside_drafts_that_are_missing() -> None:
    """The device has fewer drafts than the host made room for, so a prompt's tokens lie before where it thinks."""
    rig = Rig()
    params = replace(KINDS[0], prompt_logprobs=2)
    new = new_request("c", (7, 8, 9, 2, 6), (tuple(range(30, 36)),), params)
    both = scheduled(new, cached=cached_requests(rig.batch, "a"), counts={"a": 1 + NUM_DRAFTS, "c": 5})
    beside = update_states(rig.batch, replace(both, scheduled_spec_decode_tokens={"a": (-1,) * NUM_DRAFTS}))
    alone = update_states(Rig().batch, scheduled(new, counts={"c": 5}))
    scores = []
    for batch, own in ((beside, rig), (alone, Rig())):
        plan = plan_step(batch, own.leased.absorbed)
        executed = two_phase.execute(own.bound, own.leased, plan)
        (rows,) = two_phase.prompt_logprobs(own.bound, executed, prompt_chunks(batch, {"c": ()}))
        scores.append(rows)
    torch.testing.assert_close(scores[0].logprobs, scores[1].logprobs, rtol=0, atol=1e-9)
    assert torch.equal(scores[0].logprob_token_ids, scores[1].logprob_token_ids)


def test_a_trial_run_takes_the_memory_of_verification() -> None:
    """As many rows of logits as a step with drafts of all requests has."""
    rig = Rig()
    before = rig.guesses()
    executed = dummy_run(rig.bound, 4 * (NUM_DRAFTS + 1), uniform_query_len=NUM_DRAFTS + 1)
    assert executed is not None and executed.logits is not None
    assert len(executed.logits) == 4 * (NUM_DRAFTS + 1)
    assert (dummy_sampler(rig.bound, executed).sampled_token_ids == -1).all()
    assert all(map(equal, rig.guesses(), before))
