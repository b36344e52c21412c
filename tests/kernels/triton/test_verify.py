"""Verification: the reference's, wherever drafts end, fall or stand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import equal

from purestep.kernels.triton.draw import draw  # isort: skip
from purestep.kernels.triton.verify import count_accepted, draw_last, verify_greedy  # isort: skip

pytestmark = quiet

VOCAB, K = 6, 3
ID = st.integers(0, 2)
REQUEST = st.tuples(
    st.lists(ID, min_size=K + 1, max_size=K + 1),
    st.lists(ID | st.just(-1), min_size=K, max_size=K),
    st.lists(st.sampled_from([0, 0, 0, 1]), min_size=K + 1, max_size=K + 1),
)


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@few(10)
@given(st.lists(REQUEST, min_size=1, max_size=3))
def test_greedy_equals_reference(requests: list[tuple[list[int], list[int], list[int]]]) -> None:
    best, drafts, unsound = map(ints, zip(*requests, strict=True))
    for given_ in (best, drafts, unsound > 0), (best[:, :1], drafts[:, :0], unsound[:, :1] > 0):
        assert equal(verify_greedy(*given_), reference.verify_greedy(*given_))


def random_case(vocab: int, reqs: int, seed: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Targets with forbidden ids, drafts, their numbers; probabilities of drafts; uniform and exponential noise."""
    generator = torch.Generator().manual_seed(seed)

    def unit(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    logits = unit(reqs, K + 1, vocab) * 4
    logits[unit(reqs, K + 1, vocab) < 0.2] = -math.inf
    logits[..., 1] = 1.0
    drafts = torch.randint(-1, min(vocab, 9), (reqs, K), generator=generator).int()
    counts = torch.randint(0, K + 1, (reqs,), generator=generator).int()
    q = unit(reqs, K, vocab) * (unit(reqs, K, vocab) < 0.7)
    q[..., 2] += 0.1
    given = [x.to(DEVICE) for x in (logits, drafts, counts)]
    noise = -unit(reqs, vocab).clamp(min=1e-6).log()
    return given, (q / q.sum(-1, keepdim=True)).to(DEVICE), unit(reqs, K).to(DEVICE), noise.to(DEVICE)


@few(10)
@given(st.booleans(), st.integers(0, 2**31), st.sampled_from([VOCAB, 5000]))
def test_random_equals_reference(with_probs: bool, seed: int, vocab: int) -> None:
    """Rows of one chunk and of two; a request's drafts may be fewer than there are places."""
    case, q, uniform, noise = random_case(vocab, 3, seed)
    probs = q if with_probs else None
    accepted = count_accepted(*case, probs, uniform * 0.3)
    assert equal(accepted, reference.count_accepted(*case, probs, uniform * 0.3))
    for places in (accepted, accepted * 0, case[2]):
        own = torch.minimum(places, case[2])
        assert equal(draw_last(*case, own, probs, noise), reference.draw_last(*case, own, probs, noise))


def test_token_behind_drafts_that_stand_is_drawn_plainly() -> None:
    """To the bit as `draw` does it, also where there is no place for a draft."""
    (logits, drafts, counts), q, _, noise = random_case(33, 4, 1)
    at = logits[torch.arange(4, device=DEVICE), counts.long()]
    for probs in (None, q):
        assert equal(draw_last(logits, drafts, counts, counts, probs, noise), draw(at, noise))
    none = counts * 0
    assert equal(draw_last(logits[:, :1], drafts[:, :0], none, none, None, noise), draw(logits[:, 0], noise))
    assert not count_accepted(logits[:, :1], drafts[:, :0], none, None, noise[:, :0]).any()


def test_nothing_left_of_a_difference_is_drawn_from_the_target() -> None:
    logits = torch.tensor([[[-math.inf, -math.inf, 0.0], [0.0, 0.0, 0.0]]], device=DEVICE)
    for probs in (None, torch.tensor([[[0.0, 0.0, 1.0]]], device=DEVICE)):
        noise = torch.ones(1, 3, device=DEVICE)
        assert int(draw_last(logits, ints([[2]]), ints([1]), ints([0]), probs, noise)) == 2


def test_rows_may_lie_apart() -> None:
    """Of wider tensors, as a batch of all requests has them."""
    (logits, drafts, counts), q, uniform, noise = random_case(40, 3, 5)
    wide = logits[:, :, 5:30], drafts.clamp(max=5), counts
    ours = count_accepted(*wide, q[:, :, 5:30], uniform)
    assert equal(ours, reference.count_accepted(*wide, q[:, :, 5:30], uniform))
    ours = draw_last(*wide, ours * 0, q[:, :, 5:30], noise[:, 5:30])
    assert equal(ours, reference.draw_last(*wide, counts.long() * 0, q[:, :, 5:30], noise[:, 5:30]))


@pytest.mark.gpu
def test_distribution_is_the_target_s() -> None:
    """Of 65,536 steps with one draft the first token follows the target within five standard deviations."""
    num = 2**16
    p, q = torch.randn(2, 8, device=DEVICE).softmax(-1)
    drafts = torch.multinomial(q, num, replacement=True)[:, None].int()
    ones = torch.ones(num, dtype=torch.int32, device=DEVICE)
    logits, probs = p.log().expand(num, 2, 8).contiguous(), q.expand(num, 1, 8).contiguous()
    accepted = count_accepted(logits, drafts, ones, probs, torch.rand(num, 1, device=DEVICE))
    noise = torch.empty(num, 8, device=DEVICE).exponential_()
    last = draw_last(logits, drafts, ones, accepted, probs, noise)
    counts = torch.where(accepted == 1, drafts[:, 0], last).bincount(minlength=8).double()
    deviation = (num * p * (1 - p)).sqrt()
    assert ((counts - num * p).abs() < 5 * deviation).all()
