"""What a set may do in one pass is what its parts do one after the other."""

from typing import Any

import pytest
import torch
from torch import Tensor

from purestep.kernels.record import replace
from purestep.kernels.reference import compositions, reference
from tests.laws import assert_pure, equal


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, RESIDUAL, GAIN, WEIGHT, BIAS = (
    normal(*shape, seed=i) for i, shape in enumerate([(3, 8), (3, 8), (8,), (6, 8), (6,)])
)


def test_norm_linear() -> None:
    """Of the sum, which is given back; of x alone without a residual."""
    y, total = assert_pure(reference.norm_linear, reference, X, RESIDUAL, GAIN, 1e-5, WEIGHT, BIAS)
    assert equal(total, RESIDUAL + X)
    assert equal(y, reference.linear(reference.rms_norm(total, GAIN, 1e-5), WEIGHT, BIAS))
    y, total = reference.norm_linear(reference, X, None, GAIN, 1e-5, WEIGHT)
    assert total is X
    assert equal(y, reference.linear(reference.rms_norm(X, GAIN, 1e-5), WEIGHT))


def test_norm_gate_up() -> None:
    """The first half of the weight is the gate."""
    y, total = assert_pure(reference.norm_gate_up, reference, X, RESIDUAL, GAIN, 1e-5, WEIGHT)
    both = reference.linear(reference.rms_norm(RESIDUAL + X, GAIN, 1e-5), WEIGHT)
    assert equal(total, RESIDUAL + X)
    assert equal(y, torch.nn.functional.silu(both[:, :3]) * both[:, 3:])


def test_logits_are_wide() -> None:
    narrow = assert_pure(reference.logits, reference, X.bfloat16(), WEIGHT.bfloat16())
    assert equal(narrow, reference.linear(X.bfloat16(), WEIGHT.bfloat16()).float())
    assert reference.logits(reference, X, WEIGHT).dtype == torch.float64


@pytest.mark.parametrize(("num_logprobs", "most"), [(0, 2), (4, 2), (5, 1)])
def test_scores_of_hidden_states_are_those_of_logits(
    num_logprobs: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And logits of all rows are never there at once: of fewer where whole rows are sorted."""
    for name, value in (("MAX_SCORED_ROWS", 2), ("MAX_SORTED_ROWS", 1), ("SORTED_FROM", 4)):
        monkeypatch.setattr(compositions, name, value)
    x, weight = X.mul(3).round(), WEIGHT.mul(3).round()  # exact products
    ids, seen = torch.tensor([5, 0, 2]), list[int]()

    def logits(*arguments: Any) -> Tensor:
        made = reference.logits(*arguments)
        seen.append(len(made))
        return made

    counting = replace(reference, logits=logits)
    found = counting.score_hidden(counting, x, weight, ids, num_logprobs)
    expected = reference.score(reference.logits(reference, x, weight), ids, num_logprobs)[:3]
    assert equal(found, expected)
    assert equal(assert_pure(reference.score_hidden, reference, x, weight, ids, num_logprobs), expected)
    assert max(seen) == most and sum(seen) == 3
    nothing = reference.score_hidden(reference, x[:0], weight, ids[:0], num_logprobs)
    assert [tuple(part.shape) for part in nothing] == [(0, 1 + num_logprobs), (0, 1 + num_logprobs), (0,)]


def test_attend_qkv() -> None:
    """Two query heads and one key head, normed and turned before they attend; values are neither."""
    qkv, kv = normal(3, 4 * 4, seed=7), torch.zeros(3, 2, 4, 1, 4, dtype=torch.float64)
    batch = (torch.tensor([0, 3]), torch.tensor([3]), torch.tensor([[1]]), torch.arange(4, 7))
    angle, gains = normal(3, 2, seed=8), normal(2, 4, seed=9)
    bounds = {"max_query_len": 3, "max_seq_len": 3, "scale": 0.5}
    how = {"cos": angle.cos(), "sin": angle.sin(), "q_gain": gains[0], "k_gain": gains[1], "eps": 1e-5}
    out, written = assert_pure(reference.attend_qkv, reference, qkv, kv, *batch, **how, **bounds)

    q, k, v = qkv.view(3, 4, 4).split([2, 1, 1], dim=1)
    q, k = reference.rms_norm(q, gains[0], 1e-5), reference.rms_norm(k, gains[1], 1e-5)
    q, k = reference.rotate(q, k, angle.cos(), angle.sin())
    expected, wanted = reference.attend(q, k, v, kv, *batch, **bounds)
    assert equal(out, expected) and equal(written, wanted)


def test_a_set_is_composed_of_its_own_parts() -> None:
    """Whoever replaces a part replaces it everywhere."""
    ours = replace(reference, linear=lambda x, weight, bias=None: 0 * reference.linear(x, weight, bias))
    for function in (ours.norm_linear, ours.norm_gate_up):
        assert not function(ours, X, RESIDUAL, GAIN, 1e-5, WEIGHT)[0].any()
    assert not ours.logits(ours, X, WEIGHT).any()
