"""Penalties: the reference's, whatever the history holds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, few, quiet

from purestep.kernels.triton.penalties import penalize  # isort: skip

pytestmark = quiet

WEIGHT = st.tuples(
    st.sampled_from([1.0, 0.5, 1.3]), st.sampled_from([0.0, -0.5, 0.7]), st.sampled_from([0.0, 0.4, -1.0])
)
HISTORY = st.lists(st.integers(-2, 14), min_size=6, max_size=6)
REQUEST = st.tuples(HISTORY, st.integers(0, 6), st.integers(0, 6), WEIGHT)


@few(15)
@given(st.lists(REQUEST, min_size=1, max_size=3), st.integers(0, 2**31))
def test_equals_reference(requests: list[tuple[list[int], int, int, tuple[float, ...]]], seed: int) -> None:
    """Prompt and outputs count, ids outside the vocabulary and columns past the length do not."""
    logits = torch.randn(len(requests), 12, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    history = torch.tensor([h for h, *_ in requests], dtype=torch.int32, device=DEVICE)
    prompts = torch.tensor([min(a, b) for _, a, b, _ in requests], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([max(a, b) for _, a, b, _ in requests], dtype=torch.int32, device=DEVICE)
    weights = [torch.tensor(w, device=DEVICE) for w in zip(*(w for *_, w in requests), strict=True)]
    ours = penalize(logits, history, prompts, lengths, *weights)
    expected = reference.penalize(logits, history, prompts, lengths, *weights)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_large_batch() -> None:
    reqs, vocab, columns = 64, 128256, 5000
    logits = torch.randn(reqs, vocab, device=DEVICE)
    history = torch.randint(300, (reqs, columns), dtype=torch.int32, device=DEVICE)
    lengths = torch.randint(columns, (reqs,), dtype=torch.int32, device=DEVICE)
    prompts = lengths // 2
    weights = [torch.rand(reqs, device=DEVICE) + 0.5 for _ in range(3)]
    ours = penalize(logits, history, prompts, lengths, *weights)
    expected = reference.penalize(logits.double(), history, prompts, lengths, *weights)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-3)
