"""Drafts stay within what a request may still say, and the last token is produced all the same."""

from itertools import product

from purestep.kernels.reference import reference
from purestep.pure.drafters.ngram import ngram, ngram_on_host
from purestep.pure.propose import host_drafts
from purestep.pure.record import replace
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.step import step
from tests.pure.drafters.driver import begun, laid_out
from tests.speculation import history, prefilled, run_plain
from tests.toy_model import toy_model

MAX_MODEL_LEN, NUM_DRAFTS = 16, 5
MODEL, PARAMS = toy_model()
SAME = SamplingParams(
    temperature=0, ignore_eos=True, max_tokens=None, logit_bias={1: 50.0}
)  # says 1 for ever
PATTERN = (1,) * MAX_MODEL_LEN


def test_drafts_fit_into_the_slots_that_remain() -> None:
    """A repeated pattern, up to the longest history, and up to max_tokens: n drafts where n + 1 tokens may follow.

    At one token short of the end there are none, and that token is produced; no entry of the table lies past its
    width. Tokens are those of plain steps.
    """
    drafter = ngram(num_drafts=NUM_DRAFTS, min_n=1, max_n=2)
    for length, max_tokens in product(range(MAX_MODEL_LEN - 7, MAX_MODEL_LEN), (None, 1, 2, 5)):
        requests = [(PATTERN[:length], replace(SAME, max_tokens=max_tokens))]
        limit = min(MAX_MODEL_LEN, length + (max_tokens or MAX_MODEL_LEN))
        state = begun(MODEL, PARAMS, drafter, requests, max_model_len=MAX_MODEL_LEN)
        for _ in range(MAX_MODEL_LEN):
            known = len(history(state, 0))
            assert state.ledger.drafts is not None
            count = int((state.ledger.drafts[0] >= 0).sum())
            assert count == max(min(NUM_DRAFTS, limit - known - 1), 0)
            if not state.ledger.active[0]:
                break
            state, _ = step(MODEL, PARAMS, laid_out(state, NUM_DRAFTS), kernels=reference, drafter=drafter)
        truth = run_plain(MODEL, PARAMS, prefilled(MODEL, PARAMS, requests, max_model_len=MAX_MODEL_LEN))
        assert history(state, 0) == history(truth, 0) and len(history(state, 0)) == limit


def test_drafts_of_the_host_fit_into_the_slots_that_remain() -> None:
    """The same between steps, beside a history that is empty and one that is shorter than the shortest match."""
    drafter = ngram_on_host(num_drafts=NUM_DRAFTS, min_n=1, max_n=20)
    for length in range(MAX_MODEL_LEN - 7, MAX_MODEL_LEN + 1):
        histories = [list(PATTERN[:length]), [], [1], [1, 2, 1]]
        _, drafts = host_drafts(drafter, None, histories, [MAX_MODEL_LEN] * 4)
        # Overlapping matches end with the history: of L equal tokens the ending of L - 1 begins at the first.
        assert len(drafts[0]) == min(1, max(MAX_MODEL_LEN - length - 1, 0))
        assert drafts[1:] == ((), (), (2, 1))
    long = (1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3)
    far = [[*long[:length], 1, 2, 3] for length in range(9, 13)]
    _, drafts = host_drafts(drafter, None, far, [MAX_MODEL_LEN] * 4)
    assert [len(own) for own in drafts] == [
        max(min(NUM_DRAFTS, MAX_MODEL_LEN - len(own) - 1), 0) for own in far
    ]
