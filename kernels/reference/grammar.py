"""Structured output: the tokens that a grammar allows, as packed bits."""

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")
BITS = 32  # of a word


def apply_grammar_bitmask(logits: Tensor, bitmask: Tensor, mask_of_row: Tensor) -> Tensor:
    """Logits with -inf wherever the grammar of a row forbids the token; rows without one keep every bit.

    logits [rows, vocab]; bitmask int32 [masks, words], at least one mask of vocab bits: token v is allowed where bit
    v % 32 of word v // 32 is set; mask_of_row int [rows]: the mask of each row of logits, -1 for none.
    Source: vllm/v1/structured_output/utils.py apply_grammar_bitmask.
    """
    words = bitmask[mask_of_row.clamp(min=0)]  # [rows, words]
    bits = words[:, :, None] >> torch.arange(BITS, dtype=torch.int32, device=logits.device) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]] > 0
    return torch.where(allowed | (mask_of_row < 0)[:, None], logits, NEGATIVE_INFINITY)
