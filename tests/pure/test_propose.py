"""`propose`: whatever a drafter says, a state gets drafts that fit; what it keeps is handed on."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.pure.drafters.ngram import ngram_on_host
from purestep.pure.errors import DrafterError
from purestep.pure.propose import equip, host_drafts, propose
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter, HostDrafter, Proposal
from purestep.pure.step import execute, sample, step
from tests.laws import assert_pure
from tests.pure.drafters.driver import GREEDY, acceptance, begun, drafted_run, laid_out
from tests.speculation import history, prefilled, run_plain
from tests.toy_model import toy_model

MODEL, PARAMS = toy_model((0, 1))
REQUESTS = [((1, 2, 3), GREEDY), ((4, 5), GREEDY)]


def says(drafts: Tensor, *given: Any, kernels: Any) -> Proposal:
    """A drafter that always says the same, and counts how often it was asked."""
    _, _, state, _ = given
    return Proposal(drafts, kept=state.drafter + 1)


def saying(*drafts: list[int]) -> Drafter:
    table = torch.tensor(drafts, dtype=torch.int32)
    return Drafter(table.shape[1], partial(says, table), init=zero)


def zero(*, num_rows: int, device: Any) -> Tensor:
    return torch.zeros(num_rows, device=device)


def test_a_drafter_that_knows_the_future_is_always_right() -> None:
    """Two functions make a drafter: this one reads what plain steps said."""
    truth = run_plain(MODEL, PARAMS, prefilled(MODEL, PARAMS, REQUESTS, num_drafts=0)).token_ids

    def foresee(params: Any, executed: Any, state: Any, output: Any, *, kernels: Any) -> Proposal:
        rows = state.layout.row_of_index
        place = state.ledger.num_known_tokens[rows][:, None] + torch.arange(4)
        return Proposal(truth[rows[:, None], place.clamp(max=truth.shape[1] - 1)])

    drafter = Drafter(4, foresee)
    start = begun(MODEL, PARAMS, drafter, REQUESTS)
    end, outputs = drafted_run(MODEL, PARAMS, start, drafter)
    assert [history(end, row) for row in (0, 1)] == [
        truth[row, : len(history(end, row))].tolist() for row in (0, 1)
    ]
    assert acceptance(start, outputs) == 1 and len(outputs) == 4  # 16 tokens behind the first one


def test_what_a_drafter_says_ends_at_its_first_gap() -> None:
    drafter = saying([7, -1, 3], [1, 2, 3])
    state = begun(MODEL, PARAMS, drafter, REQUESTS)
    assert state.ledger.drafts[:2].tolist() == [[7, -1, -1], [1, 2, 3]]


def test_what_it_keeps_is_handed_on() -> None:
    drafter = saying([1, 2], [3, 4])
    state = begun(MODEL, PARAMS, drafter, REQUESTS)
    for times in (1, 2, 3):
        assert (state.drafter == times).all()
        state, output = step(MODEL, PARAMS, laid_out(state, 2), kernels=reference, drafter=drafter)
        assert output.draft_token_ids.tolist() == [[1, 2], [3, 4]]


def test_places_for_more_or_fewer_drafts_are_refused() -> None:
    state = begun(MODEL, PARAMS, saying([1, 2], [3, 4]), REQUESTS)
    with pytest.raises(DrafterError, match="3 tokens a request, and the state has places for 2"):
        step(MODEL, PARAMS, laid_out(state, 2), kernels=reference, drafter=saying([1, 2, 3], [3, 4, 5]))


def test_the_stages_of_drafting_are_pure() -> None:
    drafter = replace(saying([1, 2], [3, 4]), draws=True)
    state = laid_out(begun(MODEL, PARAMS, drafter, REQUESTS), 2)
    executed = execute(MODEL, PARAMS, state, kernels=reference)
    after, output = sample(executed, kernels=reference)
    assert_pure(propose, drafter, PARAMS, executed, after, output, kernels=reference)
    assert propose(None, PARAMS, executed, after, output, kernels=reference) == (after, output)
    assert assert_pure(equip, after, drafter, vocab_size=11).draft_probs.shape == (3, 2, 11)
    on_host = ngram_on_host(num_drafts=2, min_n=1, max_n=2)
    assert assert_pure(host_drafts, on_host, None, [[1, 2, 1]], [9]) == (None, ((2, 1),))


def test_drafts_of_the_host_are_cut() -> None:
    """To what each request may still say, whatever the drafter gives."""
    endless = HostDrafter(
        3, lambda kept, histories, budgets: (kept + 1, ((5,) * 9,) * len(histories)), lambda: 0
    )
    kept, drafts = host_drafts(endless, endless.init(), [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]], [9, 4, 4, 4])
    assert kept == 1 and drafts == ((5, 5, 5), (5,), (), ())
