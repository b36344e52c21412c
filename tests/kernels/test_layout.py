"""Which request a token belongs to."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from purestep.kernels.reference.layout import ragged_index
from tests.laws import assert_pure


def start_loc(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8), padding=st.integers(0, 4))
def test_every_token_is_in_its_request_at_its_place(lengths: list[int], padding: int) -> None:
    """Tokens laid end to end are counted request by request; empty requests own none."""
    index, offset = assert_pure(ragged_index, start_loc(lengths), sum(lengths) + padding)
    expected = [(r, i) for r, length in enumerate(lengths) for i in range(length)]
    assert list(zip(index.tolist(), offset.tolist(), strict=True))[: sum(lengths)] == expected
    assert index.dtype == offset.dtype == torch.int64


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8), padding=st.integers(1, 4))
def test_padding_counts_on_in_the_last_request(lengths: list[int], padding: int) -> None:
    """A token past the end is never out of range: it is the last request's, behind its own tokens."""
    index, offset = ragged_index(start_loc(lengths), sum(lengths) + padding)
    assert index[-padding:].tolist() == [len(lengths) - 1] * padding
    assert offset[-padding:].tolist() == list(range(lengths[-1], lengths[-1] + padding))


@pytest.mark.usefixtures("unchecked_records")
def test_same_in_every_world() -> None:
    """vmap over batches, a trace and a compiled graph all give what a plain call gives."""
    starts = torch.stack([start_loc([2, 0, 3]), start_loc([1, 4, 0])])
    expected = [ragged_index(row, 6) for row in starts]
    mapped = torch.func.vmap(lambda row: ragged_index(row, 6))(starts)
    traced = make_fx(lambda row: ragged_index(row, 6))(starts[0])
    compiled = torch.compile(ragged_index, fullgraph=True, backend="aot_eager")
    for i in range(2):
        for got in ((mapped[0][i], mapped[1][i]), traced(starts[i]), compiled(starts[i], 6)):
            assert all(torch.equal(a, b) for a, b in zip(got, expected[i], strict=True))
