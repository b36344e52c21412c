"""Drafts out of a request's own past: what followed when it last said the same words."""

import torch
from torch import Tensor


def propose_ngram(
    token_ids: Tensor,
    rows: Tensor,
    lengths: Tensor,
    room: Tensor,
    *,
    min_n: int,
    max_n: int,
    num_drafts: int,
) -> Tensor:
    """What followed the earliest earlier occurrence of a history's longest known ending: int32 [reqs, num_drafts].

    Of request i the history is the first lengths[i] entries of token_ids[rows[i]], token_ids int32 [rows, positions].
    Its last n tokens are looked for in it, for the largest n from max_n down to min_n (at least 1) that occurs at an
    earlier place; the occurrences may overlap. Drafts are the tokens behind the first such place, at most room[i] of
    them and none past the history's end; -1 behind the last.
    Source: vllm/v1/spec_decode/ngram_proposer.py.
    """
    tape = token_ids[rows]
    width = tape.shape[1]
    end = torch.arange(
        width, device=tape.device
    )  # of an occurrence, exclusive: a draft would be the token there
    runs = (end > 0) & (end < lengths[:, None])
    matched = torch.zeros_like(tape, dtype=torch.int64)
    for back in range(1, min(max_n, width) + 1):
        own = tape.gather(1, (lengths - back).clamp(min=0).to(torch.int64)[:, None])
        earlier = torch.nn.functional.pad(tape, (back, 0))[:, :width]
        runs = runs & (end >= back) & (earlier == own)
        matched = matched + runs.to(torch.int64)
    # One number that sorts by length first and by earliness second.
    longest, at = (matched * (width + 1) + width - end).max(-1)
    count = torch.minimum(lengths - at, room).clamp(max=num_drafts)
    count = torch.where(longest >= min_n * (width + 1), count, 0)[:, None]
    place = torch.arange(num_drafts, device=tape.device)
    drafts = tape.gather(1, (at[:, None] + place).clamp(max=width - 1))
    return torch.where(place < count, drafts, -1).to(torch.int32)
