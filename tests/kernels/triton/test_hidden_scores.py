"""Log-probabilities straight from hidden states: those of logits, to the last rank and tie."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.record import replace
from purestep.kernels.reference import compositions, reference
from purestep.kernels.triton import cuda_donating, shared
from tests.kernels.triton.device import DEVICE, few, quiet

from purestep.kernels.triton import hidden_scores  # isort: skip

pytestmark = quiet

TILES = (64, 64, 64), (128, 256, 64)
KERNELS = cuda_donating()


def whole_numbers(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small ones, of which products are exact, so that many logits are alike."""
    numbers = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype).to(DEVICE)


def assert_is_the_references(
    ours: tuple[Tensor, ...], x: Tensor, weight: Tensor, ids: Tensor, n: int
) -> None:
    expected = reference.score(x.double() @ weight.double().T, ids, n)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[2], expected[2])
    torch.testing.assert_close(ours[1], expected[1].float(), rtol=1e-6, atol=4e-6, equal_nan=True)
    assert [t.dtype for t in ours] == [torch.int32, torch.float32, torch.int64]


@few(8)
@given(
    st.sampled_from([1, 65, 130]),
    st.sampled_from([256, 512]),
    st.integers(0, 1),
    st.sampled_from(TILES),
    st.integers(0, 2**31),
)
def test_ranks_and_ties_are_the_references(
    rows: int, vocab: int, n: int, tile: tuple[int, int, int], seed: int
) -> None:
    """Whatever tiles there are, of rows that lie in a wider table."""
    x = whole_numbers(rows, 136, seed=seed)[:, :128]
    weight = whole_numbers(vocab, 128, seed=seed + 1)
    ids = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    ids = ids.to(DEVICE)
    ours = hidden_scores.score_by(x, weight, ids, n, tile=tile)
    assert_is_the_references(ours, x, weight, ids, n)


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, 3e38])
def test_odd_weights_tell_what_odd_logits_tell(odd: float) -> None:
    """A token whose logits are no numbers, in the second tile; every row's own token in turn, that one too."""
    x, weight = whole_numbers(70, 64, seed=0), whole_numbers(128, 64, seed=1)
    x[:, 0] = torch.tensor([1.0, -1.0], device=DEVICE).repeat(35)
    weight[66] = 0.0
    weight[66, 0] = odd
    ids = torch.arange(70, device=DEVICE).int()
    ids[::7] = 66
    ours = hidden_scores.score_by(x, weight, ids, 1, tile=TILES[0])
    assert_is_the_references(ours, x, weight, ids, 1)


def test_a_row_is_told_the_same_whoever_is_beside_it() -> None:
    """To the bit, alone and in another place."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator).bfloat16().to(DEVICE) for rows in (130, 320))
    ids = torch.arange(130, device=DEVICE).int()
    together = hidden_scores.score_by(x, weight, ids, 1, tile=TILES[0])
    for part in (slice(3, 4), slice(64, 130)):
        alone = hidden_scores.score_by(x[part], weight, ids[part], 1, tile=TILES[0])
        assert all(torch.equal(own, all_of[part]) for own, all_of in zip(alone, together, strict=True))


@pytest.fixture
def on_a_large_chip() -> Any:
    with mock.patch.object(shared, "is_hopper_or_later", lambda: True):
        yield


@pytest.mark.usefixtures("on_a_large_chip")
def test_rows_are_told_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, if there are very many."""
    monkeypatch.setattr(hidden_scores, "ROWS_AT_ONCE", 60)
    x, weight = (whole_numbers(rows, 64, seed=rows) for rows in (70, 256))
    ids = torch.arange(70, device=DEVICE).int()
    with mock.patch.object(compositions, "score_hidden", side_effect=AssertionError):
        ours = KERNELS.score_hidden(KERNELS, x, weight, ids, 1)
    assert_is_the_references(ours, x, weight, ids, 1)


@pytest.mark.usefixtures("on_a_large_chip")
@pytest.mark.parametrize(
    ("rows", "width", "vocab", "n", "dtype", "parts"),
    [
        (20, 64, 256, 1, torch.bfloat16, {}),
        (70, 72, 256, 1, torch.bfloat16, {}),
        (70, 64, 80, 1, torch.bfloat16, {}),
        (70, 64, 256, 2, torch.bfloat16, {}),
        (70, 64, 256, 1, torch.float32, {}),
        (70, 64, 256, 1, torch.float16, {}),
        (70, 64, 256, 1, torch.bfloat16, {"linear": reference.linear}),
        (70, 64, 256, 1, torch.bfloat16, {"score": reference.score}),
        (70, 64, 256, 1, torch.bfloat16, {"logits": reference.logits}),
    ],
)
def test_others_are_composed(
    rows: int, width: int, vocab: int, n: int, dtype: torch.dtype, parts: dict[str, Any]
) -> None:
    """Few rows, odd widths and vocabularies, several likely tokens, other types, sets with other parts."""
    x, weight = (whole_numbers(count, width, seed=count, dtype=dtype) for count in (rows, vocab))
    ids, kernels = torch.arange(rows, device=DEVICE).int(), replace(KERNELS, **parts)
    with mock.patch.object(hidden_scores, "score_by", side_effect=AssertionError):
        ours = kernels.score_hidden(kernels, x, weight, ids, n)
    assert_is_the_references(ours, x, weight, ids, n)
