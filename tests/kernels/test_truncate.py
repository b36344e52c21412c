"""Cutting the tail: the rule row by row, ties included, and the requests that cut nothing."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference.truncate import truncate
from tests.laws import equal

VOCAB = 8
INF = math.inf
# Whole numbers close together: ties everywhere, at the largest, at the k-th, at the cut of top-p. And a logit so
# far below that its probability is 0.
WHOLE = st.lists(st.sampled_from([-INF, -500.0, 0.0, 1.0, 2.0, 3.0]), min_size=VOCAB, max_size=VOCAB)
FLOATS = st.lists(st.floats(-50, 50, width=32), min_size=VOCAB, max_size=VOCAB)
STRANGE = st.lists(st.sampled_from([-INF, -500.0, -0.0, 1.0, INF, math.nan]), min_size=VOCAB, max_size=VOCAB)
TOP_K = st.sampled_from([-1, 0, 1, 2, 3, 5, VOCAB - 1, VOCAB, VOCAB + 5])
TOP_P = st.sampled_from([1e-9, 0.2, 0.35, 0.5, 0.75, 0.9, 0.999, 1.0])
MIN_P = st.sampled_from([0.0, 0.03, 0.1, 0.3, 0.9, 1.0])
CUT = st.tuples(TOP_K, TOP_P, MIN_P)
Request = tuple[list[float], tuple[int, float, float]]
REQUEST = st.tuples(WHOLE | FLOATS | STRANGE, CUT)


def run(requests: list[Request]) -> Tensor:
    top_k, top_p, min_p = zip(*(cut for _, cut in requests), strict=True)
    logits = torch.tensor([row for row, _ in requests])
    return truncate(logits, torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p))


def kept(row: list[float], cut: tuple[int, float, float]) -> set[int]:
    """The ids that one request keeps, by the rule in words; leaves out examples that hinge on a rounding."""
    top_k, top_p, min_p = cut
    rank = sorted(range(VOCAB), key=lambda token: (-row[token], token))
    rank = [token for token in rank if row[token] > -INF]
    ratio = {token: math.exp(row[token] - row[rank[0]]) for token in rank}
    assume(all(abs(r - min_p) > 1e-5 or min_p == 0 or r == min_p == 1 for r in ratio.values()))
    rank = [token for token in rank if ratio[token] >= min_p]
    if top_k == 1:
        rank = rank[:1]
    elif 1 < top_k <= len(rank):
        rank = [token for token in rank if row[token] >= row[rank[top_k - 1]]]
    if top_p < 1:
        total, mass, enough = sum(ratio[token] for token in rank), 0.0, 0
        while mass / total < top_p:
            mass, enough = mass + ratio[rank[enough]], enough + 1
            assume(abs(mass / total - top_p) > 1e-5)
        rank = rank[:enough]
    return set(rank)


@given(WHOLE | FLOATS, CUT)
def test_one_request_keeps_what_the_rule_says(row: list[float], cut: tuple[int, float, float]) -> None:
    """min-p, then the k largest and their ties (none for k = 1), then just enough mass, lower ids first."""
    assume(max(row) > -INF)
    ours = run([(row, cut)])[0]
    expected = kept(row, cut)
    assert ours.tolist() == [logit if token in expected else -INF for token, logit in enumerate(row)]


@given(st.lists(REQUEST, min_size=1, max_size=9), st.data())
def test_batch_does_not_matter(requests: list[Request], data: st.DataObject) -> None:
    """A request keeps the same among others as alone, whatever they hold and ask, NaN included."""
    place = data.draw(st.integers(0, len(requests) - 1))
    assert equal(run(requests)[place], run([requests[place]])[0])


@given(WHOLE | FLOATS | STRANGE, st.sampled_from([-1, 0, VOCAB, VOCAB + 1]), st.lists(REQUEST, max_size=3))
def test_neutral_request_keeps_every_bit(row: list[float], top_k: int, others: list[Request]) -> None:
    ours = run([(row, (top_k, 1.0, 0.0)), *others])[0]
    assert equal(ours, torch.tensor(row))


@given(WHOLE | FLOATS, TOP_P, MIN_P)
def test_one_best_is_greedy(row: list[float], top_p: float, min_p: float) -> None:
    """k = 1 keeps one id: the lowest of the largest."""
    assume(max(row) > -INF)
    ours = run([(row, (1, top_p, min_p))])[0]
    assert (ours > -INF).nonzero().flatten().tolist() == [row.index(max(row))]


@given(REQUEST)
def test_something_is_kept(request: Request) -> None:
    """A row keeps one of its largest logits; kept ones keep every bit, the others are -inf. NaN keeps the row."""
    row, cut = request
    ours, logits = run([(row, cut)])[0], torch.tensor(row)
    is_kept = ~ours.isneginf()
    assert equal(ours[is_kept], logits[is_kept])
    assert equal(ours, logits) if logits.isnan().any() else ours.max() == logits.max()


@pytest.mark.parametrize("batch", [1, 8])
def test_ties_at_the_kth(batch: int) -> None:
    """[3, 2, 2, 2, 1] with k = 2 keeps four logits, in a batch of one and of eight."""
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]]).expand(batch, 5)
    ours = truncate(logits, torch.full((batch,), 2), torch.ones(batch), torch.zeros(batch))
    assert ours.tolist() == [[3.0, 2.0, 2.0, 2.0, -INF]] * batch


def test_ties_at_the_mass() -> None:
    """Of eight equal logits p = 0.5 keeps the four lowest ids, which meet it exactly; p = 0.51 a fifth."""
    ours = truncate(torch.zeros(2, 8), torch.zeros(2), torch.tensor([0.5, 0.51]), torch.zeros(2))
    assert ours.isfinite().tolist() == [[True] * 4 + [False] * 4, [True] * 5 + [False] * 3]


def test_mass_example() -> None:
    """log [0.5, 0.3, 0.2] with p = 0.6 keeps the first two."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    ours = truncate(logits, torch.zeros(1), torch.tensor([0.6]), torch.zeros(1))
    assert ours.isfinite().tolist() == [[True, True, False]]
