"""The ends of a step that verifies drafts: the reference's numbers, all of them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.kernels.triton.test_ends import LONGEST, ROWS, SIZES, integers, rows_of, state
from tests.laws import assert_pure, equal

from purestep.kernels.triton import cuda_donating  # isort: skip

pytestmark = quiet

OURS = cuda_donating()


@few(25)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(1, 5),
    st.integers(0, 999),
)
def test_inputs(counts: list[int], padded_reqs: int, padded_tokens: int, num_drafts: int, seed: int) -> None:
    """Rows with some drafts, fewer than they were given tokens for, less room or known tokens than they would need."""
    generator = torch.Generator().manual_seed(seed)
    ledger, token_ids, tables, room = state(seed)
    wide = integers(generator, ROWS, num_drafts + 2, low=-3, high=500).clamp(min=-1)
    rows = rows_of(seed, len(counts), padded_reqs)
    starts = torch.tensor([0, *counts, *[0] * padded_reqs], device=DEVICE).cumsum(0).int()
    arguments = (rows, starts, ledger, wide[:, :num_drafts], token_ids, tables, room)
    sizes = {"num_tokens": sum(counts) + padded_tokens, "max_seq_len": LONGEST // 2 if seed % 2 else 128}
    ours = assert_pure(OURS.lay_out_drafts, OURS, *arguments, block_sizes=SIZES, **sizes)
    expected = reference.lay_out_drafts(reference, *arguments, block_sizes=SIZES, **sizes)
    assert equal(ours, expected)


@few(5)
@given(st.integers(1, ROWS - 1), st.integers(0, 999))
def test_inputs_of_many_requests(num_reqs: int, seed: int) -> None:
    """More of their tokens than one program takes."""
    generator = torch.Generator().manual_seed(seed)
    ledger, token_ids, tables, room = state(seed)
    drafts = integers(generator, ROWS, 3, low=-1, high=500)
    starts = 4 * torch.arange(num_reqs + 1, device=DEVICE).int()
    arguments = (rows_of(seed, num_reqs, 0), starts, ledger, drafts, token_ids, tables[:1], room)
    sizes = {"block_sizes": SIZES[:1], "num_tokens": 4 * num_reqs, "max_seq_len": 128}
    ours = OURS.lay_out_drafts(OURS, *arguments, **sizes)
    assert equal(ours, reference.lay_out_drafts(reference, *arguments, **sizes))


@few(25)
@given(st.integers(1, ROWS - 1), st.integers(0, 3), st.integers(1, 6), st.integers(0, 999))
def test_advance(num_reqs: int, padding: int, width: int, seed: int) -> None:
    """Every column of the ledger, every token but those of the last row; both are written where they lie."""
    generator = torch.Generator().manual_seed(seed)
    ledger, token_ids, *_ = state(seed)
    token_ids = torch.cat([token_ids, token_ids[:, :6]], 1)
    rows, count = rows_of(seed, num_reqs, padding), num_reqs + padding
    discard, has_nan = (torch.rand(2, count, generator=generator) < 0.3).to(DEVICE)
    stops = (torch.rand(count, width, generator=generator) < 0.2).to(DEVICE)
    lengths = integers(generator, count, high=50)
    lengths[num_reqs:] = 0
    kept = integers(generator, count, 1, high=width + 1)
    kept = torch.where(has_nan[:, None], kept, kept.clamp(min=1))
    sampled = torch.where(
        torch.arange(width, device=DEVICE) < kept, integers(generator, count, width, high=500), -1
    )
    given_ = (rows, lengths, discard, sampled, stops, has_nan)
    expected = reference.advance_drafts(reference, ledger, token_ids, *given_)
    own = ledger.clone(), token_ids.clone()
    ours = OURS.advance_drafts(OURS, *own, *given_)
    assert ours[0].data_ptr() == own[0].data_ptr() and ours[1].data_ptr() == own[1].data_ptr()
    assert equal(ours[0], expected[0])
    assert equal(ours[1][:-1], expected[1][:-1])
    assert equal(ours[2:], expected[2:])
