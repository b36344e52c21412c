"""N-gram drafts on the device and on the host: the same, and never more than a request may still say."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from purestep.pure.drafters.ngram import ngram, ngram_drafts, ngram_on_host
from purestep.pure.errors import DrafterError
from purestep.pure.propose import host_drafts
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter, HostDrafter
from purestep.pure.step import step, unroll
from tests.kernels.test_ngram import by_search
from tests.laws import assert_pure, equal
from tests.profiles import examples
from tests.pure.drafters.driver import GREEDY, RANDOM, begun, check_greedy, drafted_run, laid_out
from tests.schedules import seeds
from tests.speculation import history
from tests.toy_model import toy_model

MODEL, PARAMS = toy_model((0, 1))
DRAFTER = ngram(num_drafts=3, min_n=1, max_n=3)
HISTORY = st.lists(st.integers(0, 2), max_size=14)


@given(HISTORY, st.integers(0, 6), st.integers(1, 3), st.integers(0, 4))
def test_host_follows_the_rule(tokens: list[int], most: int, min_n: int, wider: int) -> None:
    ours = ngram_drafts(np.array(tokens, np.int32), most, min_n, min_n + wider)
    assert list(ours) == by_search(tokens, most, min_n, min_n + wider, most)


@examples(0.3)
@given(seeds)
def test_drafts_of_every_step_are_those_of_the_history(rng: Random) -> None:
    """What the device proposes behind a step is what the host would propose of the tapes; tokens are plain ones."""
    requests = [
        (
            [rng.randrange(3) for _ in range(rng.randrange(1, 9))],
            replace(
                rng.choice([GREEDY, RANDOM]), max_tokens=rng.randrange(1, 12), logit_bias={1: 9.0, 2: 9.0}
            ),
        )
        for _ in range(rng.randrange(1, 4))
    ]
    host = ngram_on_host(num_drafts=3, min_n=1, max_n=3)
    state = begun(MODEL, PARAMS, DRAFTER, requests)
    rows = range(len(requests))
    for _ in range(5):
        state, output = step(MODEL, PARAMS, laid_out(state, 3), kernels=reference, drafter=DRAFTER)
        histories = [history(state, row) for row in rows]
        limits = [int(state.ledger.length_limit[row]) for row in rows]
        _, expected = host_drafts(host, None, histories, limits)
        for row in rows:
            own = output.draft_token_ids[row].tolist()
            ran = bool(output.sampled_token_ids[row, 0] >= 0)
            wanted = list(expected[row]) if ran else []
            assert own == wanted + [-1] * (3 - len(wanted))
            if ran:
                assert state.ledger.drafts[row].tolist() == own


def test_greedy_tokens_are_those_of_plain_steps() -> None:
    """Also where drafts stand: a bias makes the toy say little else than a few tokens over and over."""
    params = replace(GREEDY, logit_bias={1: 50.0})
    assert check_greedy(MODEL, PARAMS, DRAFTER, [((1, 1, 2, 1, 1), params), ((4, 5), params)]) > 0.8
    check_greedy(MODEL, PARAMS, DRAFTER, [((1, 2, 3, 1, 2), GREEDY), ((4, 5), GREEDY)])


def test_drafts_do_not_move_a_stream_of_noise() -> None:
    """A request that draws says the same beside others with drafts, without any, and where it has none itself."""
    biased = replace(GREEDY, logit_bias={1: 50.0})
    unbiased = replace(RANDOM, temperature=3.0, stop_token_ids=())
    both = begun(MODEL, PARAMS, DRAFTER, [((3, 9), unbiased), ((1, 1, 1), biased)])
    single = begun(MODEL, PARAMS, DRAFTER, [((3, 9), unbiased)])
    ends = [drafted_run(MODEL, PARAMS, state, DRAFTER)[0] for state in (both, single)]
    assert history(ends[0], 0) == history(ends[1], 0)


def test_an_unrolled_loop_is_as_many_steps() -> None:
    """Drafts are made and verified without a host."""
    params = replace(GREEDY, logit_bias={1: 50.0})
    state = laid_out(begun(MODEL, PARAMS, DRAFTER, [((1, 1, 2, 1, 1), params), ((4, 5), GREEDY)]), 3)
    at_once, outputs = unroll(MODEL, PARAMS, state, 4, kernels=reference, drafter=DRAFTER)
    for output in outputs:
        state, single = step(MODEL, PARAMS, laid_out(state, 3), kernels=reference, drafter=DRAFTER)
        assert equal(single, output)
    assert equal(at_once.ledger, state.ledger) and equal(at_once.token_ids, state.token_ids)


def test_without_a_drafter_a_step_proposes_nothing() -> None:
    state = begun(MODEL, PARAMS, DRAFTER, [((1, 1, 1), GREEDY)])
    state, output = step(MODEL, PARAMS, laid_out(state, 3), kernels=reference)
    assert output.draft_token_ids is None and (state.ledger.drafts[:1] == -1).all()


def test_rows_that_run_idle_keep_their_drafts() -> None:
    """As they keep all else: what could not run for want of blocks is run as it was, later."""
    params = replace(GREEDY, logit_bias={1: 50.0})
    state = begun(MODEL, PARAMS, DRAFTER, [((1, 1, 1), params), ((1, 1), params)])
    before = state.ledger.drafts[0].tolist()
    assert before[0] >= 0
    full = replace(state, room=torch.where(torch.arange(3) == 0, 3, state.room).to(torch.int32))
    after, output = step(MODEL, PARAMS, laid_out(full, 3), kernels=reference, drafter=DRAFTER)
    assert output.sampled_token_ids[0].tolist() == [-1] * 4 and output.sampled_token_ids[1, 0] >= 0
    assert after.ledger.drafts[0].tolist() == before and output.draft_token_ids[0].tolist() == [-1] * 3


def test_a_step_with_a_drafter_is_pure() -> None:
    state = laid_out(begun(MODEL, PARAMS, DRAFTER, [((1, 2, 1, 2), GREEDY), ((4, 5), RANDOM)]), 3)
    assert_pure(step, MODEL, PARAMS, state, kernels=reference, drafter=DRAFTER)


@pytest.mark.parametrize(
    ("num_drafts", "min_n", "max_n"), [(0, 1, 1), (2, 0, 1), (2, 3, 2), ("2", 1, 1), (2, 1, 1.5)]
)
def test_numbers_that_ask_for_nothing_are_refused(num_drafts: int, min_n: int, max_n: int) -> None:
    for make in (ngram, ngram_on_host):
        with pytest.raises(DrafterError, match=f"num_drafts={num_drafts!r}, min_n={min_n} and max_n={max_n}"):
            make(num_drafts=num_drafts, min_n=min_n, max_n=max_n)


@pytest.mark.parametrize("num_drafts", [None, 0, -1, 1.5, "3", True])
def test_a_number_of_drafts_of_ones_own_drafter_is_judged_too(
    num_drafts: Any, unchecked_records: None
) -> None:
    for make in (Drafter, HostDrafter):
        with pytest.raises(DrafterError, match="at least 1"):
            make(num_drafts, lambda *_: None)
