"""The runner verifies what upstream's scheduler sends: known drafts and the device's, steps ahead of what is known.

A scheduler that runs ahead takes all drafts for accepted, and corrects its counts once it learns better.
"""

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.pure.dispatch import dispatch_keys
from purestep.pure.drafters.ngram import ngram
from purestep.pure.models.stages import split
from purestep.pure.record import replace
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig
from purestep.pure.records.drafter import Drafter, HostDrafter, Proposal
from purestep.pure.records.outputs import DraftTokenIds
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.buffers import PersistentBuffers
from purestep.state.captures import graph_keys
from purestep.state.run import BoundStep
from purestep.state.runner import GPUModelRunner
from tests.laws import digest
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs
from tests.state.test_runner import (
    BLOCK_SIZE,
    GREEDY,
    KINDS,
    LIMITS,
    LONGEST,
    MODEL,
    PARAMS,
    PROMPT,
    VOCAB,
    alone,
)
from tests.state.test_stages import Pipeline
from tests.state.upstream import Upstream, serve

NUM_DRAFTS = 3
DRAFTED = replace(LIMITS, num_drafts=NUM_DRAFTS)
REQUESTS = st.lists(
    st.tuples(PROMPT, st.sampled_from([kind for kind in KINDS if not kind.is_random])), min_size=1, max_size=4
)


def runner(*, on_device: Drafter | None = None, graph_api: Any = None, **changes: Any) -> GPUModelRunner:
    buffers = PersistentBuffers(MODEL, DRAFTED, dtype=PARAMS.tree["norm"].dtype, drafter=on_device)
    return GPUModelRunner(
        BoundStep(buffers, MODEL, PARAMS, donating, graph_api, drafter=on_device), **changes
    )


def served(
    own: GPUModelRunner,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    steps_ahead: int,
    **how: Any,
) -> list[tuple[int, ...]]:
    """What each request got."""
    seed = how.pop("seed", None)
    scheduler = Upstream(
        num_blocks=64,
        block_size=BLOCK_SIZE,
        max_model_len=LONGEST,
        rng=None if seed is None else Random(seed),
        num_drafts=NUM_DRAFTS,
        **how,
    )
    for i, (prompt, params) in enumerate(requests):
        scheduler.add(f"r{i}", prompt, params)
    serve(own, scheduler, steps_ahead=steps_ahead)
    return [tuple(client.outputs) for client in scheduler.clients.values()]


def guesser(seed: int) -> HostDrafter:
    """Guesses at random."""

    def propose(kept: int, histories: Any, budgets: Any) -> Any:
        rng = Random(kept)
        return kept + 1, tuple(tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0, n))) for n in budgets)

    return HostDrafter(NUM_DRAFTS, propose, lambda: seed)


def device_guesser(right: int) -> Drafter:
    """So many right guesses out of what it has seen, as the longest n-gram has it, and wrong ones behind."""
    own = ngram(num_drafts=NUM_DRAFTS, min_n=1, max_n=3)

    def propose(*args: Any, **kwargs: Any) -> Proposal:
        drafts = own.propose(*args, **kwargs).drafts
        place = torch.arange(NUM_DRAFTS)
        return Proposal(torch.where((place < right) | (drafts < 0), drafts, (drafts + 1) % VOCAB))

    return Drafter(NUM_DRAFTS, propose)


@examples(0.1)
@given(REQUESTS, st.integers(4, 40), st.none() | st.integers(0, 9), st.integers(0, 99))
def test_drafts_that_the_scheduler_sends_give_what_a_request_gets_alone(
    unchecked_records: None,
    requests: list[tuple[list[int], SamplingParams]],
    budget: int,
    seed: int | None,
    guesses: int,
) -> None:
    """In chunks, with preemptions, cut by the budget."""
    tokens = served(runner(drafter=guesser(guesses)), requests, 0, budget=budget, seed=seed)
    assert tokens == [alone(tuple(p), params, f"r{i}") for i, (p, params) in enumerate(requests)]


@pytest.mark.parametrize("on_device", [None, 2])
def test_captured_halves_verify_however_many_drafts_each_request_has(on_device: int | None) -> None:
    """Every step behind the prompts replays its first half, and its second where that was captured."""
    keys = dispatch_keys(DispatchConfig((4, 8), 4), CUDAGraphMode.FULL_DECODE_ONLY, 1 + NUM_DRAFTS)
    api, drafter = FakeGraphs(), None if on_device is None else device_guesser(on_device)
    how: Any = {"drafter": guesser(5)} if drafter is None else {"on_device": drafter}
    own = runner(graph_api=api, dispatch_keys=keys, **how)
    assert own._bound.captured is not None
    own._bound.captured.capture(graph_keys(keys, two_phase=True))
    requests = [([5, 9, 2, 7, 1], GREEDY), ([1, 1, 3, 8, 1, 1], replace(GREEDY, max_tokens=5))]

    assert served(own, requests, 0, budget=40) == [alone(tuple(p), each, "r0") for p, each in requests]
    assert api.num_replays == 2 * (own.input_batch.clock.num_begun - 1)


@examples(0.1)
@given(
    REQUESTS,
    st.integers(4, 40),
    st.none() | st.integers(0, 9),
    st.integers(0, NUM_DRAFTS),
    st.sampled_from([None, 0, 1]),
)
def test_drafts_that_stay_on_the_device_give_it_too_ahead_of_what_is_known(
    unchecked_records: None,
    requests: list[tuple[list[int], SamplingParams]],
    budget: int,
    seed: int | None,
    right: int,
    steps_ahead: int | None,
) -> None:
    """The scheduler does not know how many there are: it gives places, and corrects its counts later."""
    own = runner(on_device=device_guesser(right), async_scheduling=steps_ahead is not None)
    tokens = served(own, requests, steps_ahead or 0, budget=budget, seed=seed, num_device_drafts=NUM_DRAFTS)
    assert tokens == [alone(tuple(p), params, f"r{i}") for i, (p, params) in enumerate(requests)]


def test_drafts_of_the_device_can_be_taken_and_sent_back() -> None:
    """As upstream does it in step: the scheduler learns of them, and sends those that it wants verified."""
    requests = [([5, 9, 2, 5, 9, 2], GREEDY), ([1, 1], KINDS[1])]
    own = runner(on_device=device_guesser(2))
    assert served(own, requests, 0, budget=40) == [
        alone(tuple(p), params, f"r{i}") for i, (p, params) in enumerate(requests)
    ]
    drafts = own.take_draft_token_ids()
    assert drafts is not None and all(-1 not in tokens for tokens in drafts.draft_token_ids)
    ahead = runner(on_device=device_guesser(2), async_scheduling=True)
    served(ahead, requests, 1, budget=40, num_device_drafts=NUM_DRAFTS)
    assert ahead.take_draft_token_ids() is None


def masks(*allowed: Sequence[int]) -> np.ndarray:
    """A mask for each of these sets of ids."""
    words = np.zeros((len(allowed), 1), np.int32)
    for row, ids in enumerate(allowed):
        words[row, 0] = sum(1 << token for token in ids)
    return words


@pytest.mark.parametrize("scheduled", [3, 2])
def test_masks_are_found_though_the_device_has_fewer_drafts_than_were_scheduled(scheduled: int) -> None:
    """Two requests with disjoint alphabets: one has one draft, the other three; each token is legal.

    A mask is for the place of a token, counted by what was scheduled, wherever the row of logits lies.
    """
    alphabets = {"a": (1, 2, 3), "b": (8, 9, 10)}
    guesses = torch.tensor([[2, -1, -1], [9, 8, 10]], dtype=torch.int32)
    names = ["a", "b"]  # in rows 0 and 1

    def propose(params: Any, executed: Any, state: Any, output: Any, *, kernels: Any) -> Proposal:
        return Proposal(guesses[state.layout.row_of_index])

    own = runner(on_device=Drafter(NUM_DRAFTS, propose))
    scheduler = Upstream(
        num_blocks=64, block_size=BLOCK_SIZE, budget=40, max_model_len=LONGEST, num_device_drafts=scheduled
    )
    for name in names:
        scheduler.add(name, (5, 9, 2), replace(GREEDY, max_tokens=20))
    while any(len(client.outputs) < 12 for client in scheduler.clients.values()):
        output = scheduler.schedule()
        own.execute_model(output)
        drafts, order = output.scheduled_spec_decode_tokens, ["b", "a"]
        counts = {name: 1 + len(drafts.get(name, ())) for name in names}
        bitmask = masks(*(alphabets[name] for name in order for _ in range(counts[name])))
        grammar = SimpleNamespace(structured_output_request_ids=order, grammar_bitmask=bitmask)
        result: Any = own.sample_tokens(grammar)
        scheduler.update(output, result)
    for name in names:
        outputs = scheduler.clients[name].outputs
        assert set(outputs) <= set(alphabets[name])


class Stages(Pipeline):
    """Runners of two stages as one; the last one drafts."""

    def __init__(self, drafter: HostDrafter) -> None:
        runners = []
        for part, is_last in zip(split(MODEL, (1,)), (False, True), strict=True):
            buffers = PersistentBuffers(part, DRAFTED, dtype=PARAMS.tree["norm"].dtype)
            bound = BoundStep(buffers, part, PARAMS, donating)
            own = drafter if is_last else None
            runners.append(
                GPUModelRunner(bound, is_first_stage=not is_last, is_last_stage=is_last, drafter=own)
            )
        super().__init__(runners)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.runners[-1].take_draft_token_ids()

    def assert_agreed(self) -> None:
        """Both batches and both ledgers have the same tokens and counts."""
        ours, theirs = (own.input_batch for own in self.runners)
        assert digest((ours.rows, ours.columns)) == digest((theirs.rows, theirs.columns))
        tables = [own._now.leased.value.ledger.table[:4] for own in self.runners]  # all counts
        assert torch.equal(*tables)


@examples(0.06)
@given(REQUESTS, st.integers(4, 40), st.none() | st.integers(0, 9), st.integers(0, 99))
def test_stages_give_what_a_request_gets_alone_and_agree_on_what_was_accepted(
    unchecked_records: None,
    requests: list[tuple[list[int], SamplingParams]],
    budget: int,
    seed: int | None,
    guesses: int,
) -> None:
    stages: Any = Stages(guesser(guesses))
    tokens = served(stages, requests, 0, budget=budget, seed=seed)
    assert tokens == [alone(tuple(p), params, f"r{i}") for i, (p, params) in enumerate(requests)]
    stages.assert_agreed()
