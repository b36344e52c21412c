"""Which request a token belongs to, and what the rows of a batch say."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.shared import cdiv, early_launch, next_power_of_2, take_turn

TOKENS = 128  # per program
WORDS = 1024  # of a row, per program
TABLES = 4  # that one launch reads


def ragged_index(query_start_loc: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The request of each token of a batch laid end to end, and the token's place within it: int64 [tokens] each."""
    index = torch.empty(num_tokens, dtype=torch.int64, device=query_start_loc.device)
    offset = torch.empty_like(index)
    num_reqs = query_start_loc.shape[0] - 1
    if num_tokens:
        _ragged_index[(cdiv(num_tokens, TOKENS),)](
            query_start_loc, index, offset, num_tokens, num_reqs, STEPS=num_reqs.bit_length(), TOKENS=TOKENS
        )
    return index, offset


@triton.jit
def request_of(query_start_loc, token, num_reqs, STEPS: tl.constexpr, TOKENS: tl.constexpr):
    """The request of each token and the token's place within it; padding counts on in the last. 2**STEPS > num_reqs."""
    low = tl.zeros([TOKENS], tl.int32)  # the requests that end at or before the token
    high = low + num_reqs
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        before = tl.load(query_start_loc + 1 + middle, mask=searching, other=0) <= token
        low = tl.where(searching & before, middle + 1, low)
        high = tl.where(searching & ~before, middle, high)
    own = tl.minimum(low, num_reqs - 1)
    return own, token - tl.load(query_start_loc + own)


@triton.jit(do_not_specialize=["num_tokens", "num_reqs"], do_not_specialize_on_alignment=["query_start_loc"])
def _ragged_index(
    query_start_loc, index, offset, num_tokens, num_reqs, STEPS: tl.constexpr, TOKENS: tl.constexpr
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    own, place = request_of(query_start_loc, token, num_reqs, STEPS, TOKENS)
    tl.store(index + token, own.to(tl.int64), mask=token < num_tokens)
    tl.store(offset + token, place.to(tl.int64), mask=token < num_tokens)


def take_rows(tables: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, ...]:
    """Of each table [all rows, ...] the given rows [reqs], in their order; words of 32 bits, in one launch."""
    if not 0 < len(tables) <= TABLES or not all(map(_is_words, tables)):
        return tuple([table.index_select(0, rows) for table in tables])
    outs = tuple([table.new_empty(rows.shape[0], *table.shape[1:]) for table in tables])
    widths = [out[0].numel() if len(out) else 0 for out in outs]
    if max(widths):
        missing = TABLES - len(tables)
        pairs = [
            (table.view(torch.int32), out.view(torch.int32)) for table, out in zip(tables, outs, strict=True)
        ]
        _take_rows[(rows.shape[0], cdiv(max(widths), WORDS))](
            rows, *(part for pair in (*pairs, *[(None, None)] * missing) for part in pair),
            *(table.stride(0) for table in tables), *[0] * missing, *widths, *[0] * missing,
            BLOCK=min(next_power_of_2(max(widths)), WORDS), num_warps=1 if max(widths) <= 64 else 4,
            **early_launch(),
        )  # fmt: skip
    return outs


def _is_words(table: Tensor) -> bool:
    """Whether its rows are words of 32 bits that lie side by side."""
    return table.itemsize == 4 and table.ndim in (1, 2) and (table.ndim == 1 or table.stride(1) == 1)


@triton.jit
def _take_row(source, target, step, width, row, index, column):
    if source is not None:
        word = tl.load(source + row * step + column, mask=column < width, other=0)
        tl.store(target + index * width + column, word, mask=column < width)


WIDTHS = ["width_a", "width_b", "width_c", "width_d", "step_a", "step_b", "step_c", "step_d"]


@triton.jit(do_not_specialize=WIDTHS, do_not_specialize_on_alignment=["rows", "a", "b", "c", "d"])
def _take_rows(
    rows, a, to_a, b, to_b, c, to_c, d, to_d, step_a, step_b, step_c, step_d, width_a, width_b, width_c, width_d,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    index = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index).to(tl.int64)
    _take_row(a, to_a, step_a, width_a, row, index, column)
    _take_row(b, to_b, step_b, width_b, row, index, column)
    _take_row(c, to_c, step_c, width_c, row, index, column)
    _take_row(d, to_d, step_d, width_d, row, index, column)
