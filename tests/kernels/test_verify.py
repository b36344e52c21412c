"""Verification of drafts, against its definition in plain Python, and the law that it leaves distributions alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference.draw import draw
from purestep.kernels.reference.verify import count_accepted, draw_last, verify_greedy

INF = math.inf
VOCAB, K = 4, 3
ID = st.integers(0, VOCAB - 1)
SHARES = st.lists(st.integers(0, 4), min_size=VOCAB, max_size=VOCAB).filter(
    any
)  # a distribution, out of few numbers
UNIT = st.floats(1e-6, 1 - 1e-6)


def distribution(shares: list[int]) -> Tensor:
    return torch.tensor(shares, dtype=torch.float64) / sum(shares)


@given(
    st.lists(st.lists(ID, min_size=K + 1, max_size=K + 1), min_size=1, max_size=4),
    st.data(),
)
def test_greedy_keeps_what_agrees(best: list[list[int]], data: st.DataObject) -> None:
    """Drafts up to the first that is not the best or has no distribution, and the best there if it has one."""
    drafts = [data.draw(st.lists(ID | st.just(-1), min_size=K, max_size=K)) for _ in best]
    unsound = [
        data.draw(st.lists(st.sampled_from([False] * 4 + [True]), min_size=K + 1, max_size=K + 1))
        for _ in best
    ]
    ours, has_nan = verify_greedy(torch.tensor(best), torch.tensor(drafts).int(), torch.tensor(unsound))
    for own, nan, ids, guesses, bad in zip(
        ours.tolist(), has_nan.tolist(), best, drafts, unsound, strict=True
    ):
        n = 0
        while n < K and guesses[n] == ids[n] and not bad[n]:
            n += 1
        assert own == ids[:n] + ([-1] if bad[n] else [ids[n]]) + [-1] * (K - n)
        assert nan == bad[n]


@given(
    st.lists(SHARES, min_size=K, max_size=K),
    st.none() | st.lists(SHARES, min_size=K, max_size=K),
    st.lists(ID | st.just(-1), min_size=K, max_size=K),
    st.integers(0, K),
    st.lists(UNIT, min_size=K, max_size=K),
)
def test_drafts_stand_by_their_ratio(
    target: list[list[int]], q: list[list[int]] | None, drafts: list[int], count: int, u: list[float]
) -> None:
    """Draft j stands while p / q reaches its uniform number; one that q can not have made falls."""
    n = 0
    while n < count and drafts[n] >= 0:
        p = target[n][drafts[n]] / sum(target[n])
        chance = 1.0 if q is None else q[n][drafts[n]] / sum(q[n])
        if chance == 0 or p / chance < u[n] - 1e-12:
            break
        n += 1
    logits = torch.stack([*(distribution(row).log() for row in target), torch.zeros(VOCAB)])[None]
    probs = None if q is None else torch.stack([distribution(row) for row in q])[None]
    uniform = torch.tensor([u], dtype=torch.float64)
    ours = count_accepted(logits, torch.tensor([drafts]).int(), torch.tensor([count]), probs, uniform)
    assert int(ours) == n


@given(SHARES, st.none() | SHARES, ID, st.lists(st.floats(0.01, 9), min_size=VOCAB, max_size=VOCAB))
def test_fallen_draft_is_replaced_from_the_rest(
    target: list[int], q: list[int] | None, draft: int, clocks: list[float]
) -> None:
    """By the race of exponential clocks among what p has more of; ids that p forbids are never returned.

    Where p has more of nothing no draft falls, and roundings decide.
    """
    p = distribution(target)
    rest = [max(float(a - b), 0.0) for a, b in zip(p, distribution(q), strict=True)] if q else p.tolist()
    if q is None:
        rest[draft] = 0.0
    logits = torch.stack([p.log(), torch.zeros(VOCAB)])[None]
    arguments = (logits, torch.tensor([[draft]]).int(), torch.tensor([1]), torch.tensor([0]))
    probs = None if q is None else distribution(q)[None, None]
    ours = int(draw_last(*arguments, probs, torch.tensor([clocks], dtype=torch.float64)))
    score = [weight / clock for weight, clock in zip(rest, clocks, strict=True)]
    assert p[ours] > 0
    assert max(rest) < 1e-12 or score[ours] >= max(score) * (1 - 1e-9)


@pytest.mark.parametrize("count", [0, 1, K])
def test_token_behind_drafts_that_stand_is_drawn_plainly(count: int) -> None:
    """To the bit what `draw` gives for the target's row there: without drafts all is as without speculation."""
    torch.manual_seed(count)
    logits, noise = torch.randn(50, K + 1, 33), torch.rand(50, 33)
    counts = torch.full((50,), count)
    drafts, probs = torch.randint(33, (50, K)).int(), torch.rand(50, K, 33)
    for q in (None, probs):
        assert torch.equal(draw_last(logits, drafts, counts, counts, q, noise), draw(logits[:, count], noise))
    bare = draw_last(logits[:, :1], drafts[:, :0], counts * 0, counts * 0, None, noise)
    assert torch.equal(bare, draw(logits[:, 0], noise))


def test_nothing_left_of_a_difference_is_drawn_from_the_target() -> None:
    """p = q but for rounding, and a draft that fell all the same: forbidden ids stay forbidden."""
    logits = torch.tensor([[[-INF, -INF, 0.0], [0.0, 0.0, 0.0]]])
    one = torch.tensor([1])
    for q in (None, torch.tensor([[[0.0, 0.0, 1.0]]])):
        assert int(draw_last(logits, torch.tensor([[2]]).int(), one, one * 0, q, torch.ones(1, 3))) == 2


@pytest.mark.parametrize("with_probs", [False, True])
def test_distribution_is_the_target_s(with_probs: bool) -> None:
    """Chi-square of 40,000 steps of one draft: first tokens follow p, and second ones follow theirs."""
    num, generator = 40_000, torch.Generator().manual_seed(7)
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.2, 0.4], dtype=torch.float64)
    drafts = torch.multinomial(q, num, replacement=True, generator=generator)[:, None]
    if not with_probs:
        drafts = torch.ones_like(drafts)  # a guess that is always the same
    logits, ones = p.log().expand(num, 2, 4), torch.ones(num, dtype=torch.int64)
    probs = q.expand(num, 1, 4) if with_probs else None
    uniform = torch.rand(num, 1, dtype=torch.float64, generator=generator)
    noise = torch.empty(num, 4, dtype=torch.float64).exponential_(generator=generator)
    accepted = count_accepted(logits, drafts.int(), ones, probs, uniform)
    last = draw_last(logits, drafts.int(), ones, accepted, probs, noise)
    stood = accepted == 1
    first = torch.where(stood, drafts[:, 0], last)
    for tokens, expected in ((first, p[0]), (last[stood], p[1])):
        counts = torch.bincount(tokens, minlength=4).double()
        expected = expected * len(tokens)
        assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 0.1 % of samples of 3 degrees of freedom
    rate = torch.minimum(p[0], q).sum() if with_probs else p[0, 1]
    assert abs(float(stood.double().mean() - rate)) < 0.012
