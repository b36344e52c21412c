"""The ends of a step: the reference's numbers, all of them."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import assert_pure, equal

from purestep.kernels.triton import cuda_donating  # isort: skip

pytestmark = quiet

OURS = cuda_donating()
ROWS, LONGEST = 200, 90
SIZES = (16, 6)  # of blocks, per KV group


def integers(generator: torch.Generator, *shape: int, low: int = 0, high: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32).to(DEVICE)


def state(seed: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
    """A ledger whose last row is nobody's, token ids, block tables of two KV groups, and what rows have room for."""
    generator = torch.Generator().manual_seed(seed)
    ledger = integers(generator, 7, ROWS, high=LONGEST - 5)
    ledger[1] = ledger[0] + integers(generator, ROWS, high=4)
    ledger[3] = ledger[1] + integers(generator, ROWS, low=1, high=3)
    ledger[4:6] = integers(generator, 2, ROWS, high=2)
    ledger[:6, -1] = 0
    tables = tuple(integers(generator, ROWS, -(-LONGEST // size), low=1, high=1000) for size in SIZES)
    room = ledger[0] + integers(generator, ROWS, high=6)
    return ledger, integers(generator, ROWS, LONGEST, high=50000), tables, room


def rows_of(seed: int, num_reqs: int, padding: int) -> Tensor:
    """Distinct rows in any order, and the last one for requests of padding."""
    order = torch.randperm(ROWS - 1, generator=torch.Generator().manual_seed(seed))[:num_reqs]
    return torch.cat([order, order.new_full((padding,), ROWS - 1)]).int().to(DEVICE)


@few(15)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(0, 999),
)
def test_inputs(counts: list[int], padded_reqs: int, padded_tokens: int, seed: int) -> None:
    """Any counts of tokens, with padding behind: requests of the last row without a token, tokens of nobody.

    Some rows have fewer known tokens, less room or a lower bound than they would need.
    """
    ledger, token_ids, tables, room = state(seed)
    row_of_index = rows_of(seed, len(counts), padded_reqs)
    starts = torch.tensor([0, *counts, *[0] * padded_reqs], device=DEVICE).cumsum(0).int()
    arguments = (row_of_index, starts, ledger, token_ids, tables, room)
    kwargs: dict[str, Any] = {"block_sizes": SIZES, "num_tokens": sum(counts) + padded_tokens}
    kwargs["max_seq_len"] = LONGEST // 2 if seed % 2 else 128
    ours = assert_pure(OURS.lay_out, OURS, *arguments, **kwargs)
    assert equal(ours, reference.lay_out(reference, *arguments, **kwargs))


@few(5)
@given(st.integers(1, ROWS - 1), st.integers(0, 999))
def test_inputs_of_many_decodes(num_reqs: int, seed: int) -> None:
    """More of them than one program takes."""
    ledger, token_ids, tables, room = state(seed)
    starts = torch.arange(num_reqs + 1, device=DEVICE).int()
    arguments = (rows_of(seed, num_reqs, 0), starts, ledger, token_ids, tables[:1], room)
    kwargs: dict[str, Any] = {"block_sizes": SIZES[:1], "num_tokens": num_reqs, "max_seq_len": 128}
    assert equal(OURS.lay_out(OURS, *arguments, **kwargs), reference.lay_out(reference, *arguments, **kwargs))


@few(15)
@given(
    st.integers(1, ROWS - 1),
    st.integers(0, 3),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 999),
)
def test_advance(num_reqs: int, padding: int, dtype: torch.dtype, seed: int) -> None:
    """Every column of the ledger, every token but those of the last row; both are written where they lie."""
    generator = torch.Generator().manual_seed(seed)
    ledger, token_ids, *_ = state(seed)
    row_of_index = rows_of(seed, num_reqs, padding)
    count = num_reqs + padding
    flags = (torch.rand(3, count, generator=generator) < 0.3).to(DEVICE)
    lengths, sampled = integers(generator, 2, count, high=50)
    given_ = (row_of_index, lengths, flags[0], sampled.to(dtype), flags[1], flags[2])
    expected = reference.advance(reference, ledger, token_ids, *given_)
    own = ledger.clone(), token_ids.clone()
    ours = OURS.advance(OURS, *own, *given_)
    assert ours[0].data_ptr() == own[0].data_ptr() and ours[1].data_ptr() == own[1].data_ptr()
    assert equal(ours[0], expected[0])
    assert equal(ours[1][:-1], expected[1][:-1])
    assert equal(ours[2:], expected[2:])
