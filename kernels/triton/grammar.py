"""Grammar masks: -inf is written where a bit is not set; what is allowed, and rows without a mask, are not touched."""

import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.shared import cdiv, check_floats, check_rows

WORDS = 128  # of a mask, per program: 4,096 tokens
BITS = tl.constexpr(32)  # of a word


def apply_grammar_bitmask(logits: Tensor, bitmask: Tensor, mask_of_row: Tensor) -> Tensor:
    """Logits [rows, vocab] with -inf wherever a row's mask forbids the token, in their own storage."""
    check_floats("apply_grammar_bitmask", logits)
    check_rows("apply_grammar_bitmask", logits=logits, bitmask=bitmask)
    rows, vocab = logits.shape
    if logits.numel():
        _forbid[(rows, cdiv(vocab, WORDS * 32))](
            logits, bitmask, mask_of_row, logits.stride(0), bitmask.stride(0), mask_of_row.stride(0), vocab,
            WORDS=WORDS,
        )  # fmt: skip
    return logits


@triton.jit(do_not_specialize_on_alignment=["bitmask", "mask_of_row"])
def _forbid(logits, bitmask, mask_of_row, step, mask_step, row_step, vocab, WORDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_of_row + row * row_step).to(tl.int64)
    if mask >= 0:
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        bits = tl.load(bitmask + mask * mask_step + word, mask=word * BITS < vocab, other=0)
        place = tl.arange(0, BITS)
        token = word[:, None] * BITS + place[None, :]
        forbidden = ((bits[:, None] >> place[None, :]) & 1) == 0
        tl.store(logits + row * step + token, float("-inf"), mask=forbidden & (token < vocab))
