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
    drafts = integers(generator, ROWS, width + 1, low=-1, high=500)[:, : width - 1]
    expected = reference.advance_drafts(reference, ledger, drafts, token_ids, *given_)
    own = ledger.clone(), drafts.clone(), token_ids.clone()
    ours = OURS.advance_drafts(OURS, *own, *given_)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(ours, own, strict=False))
    assert equal(ours[:2], expected[:2])
    assert equal(ours[2][:-1], expected[2][:-1])
    assert equal(ours[3:], expected[3:])


@few(25)
@given(st.integers(1, ROWS - 1), st.integers(0, 3), st.integers(1, 5), st.booleans(), st.integers(0, 999))
def test_put_drafts(num_reqs: int, padding: int, num_drafts: int, wide: bool, seed: int) -> None:
    """Every row's drafts, where they lie, and what is told of them."""
    generator = torch.Generator().manual_seed(seed)
    ledger, *_ = state(seed)
    rows, count = rows_of(seed, num_reqs, padding), num_reqs + padding
    lengths = integers(generator, count, high=3)
    lengths[num_reqs:] = 0
    sampled = integers(generator, count, 3, low=-1, high=3)
    proposed = integers(generator, count, num_drafts, low=-2, high=500).clamp(min=-1)
    drafts = integers(generator, ROWS, num_drafts + 1, low=-1, high=500)[:, :num_drafts]
    given_ = (rows, lengths, sampled, proposed.T.contiguous().T.long() if wide else proposed)
    longest = 20 if seed % 2 else LONGEST
    expected = reference.put_drafts(reference, ledger, drafts, *given_, longest=longest)
    own = drafts.clone()
    ours = OURS.put_drafts(OURS, ledger, own, *given_, longest=longest)
    assert ours[0].data_ptr() == own.data_ptr()
    assert equal(ours, expected)
