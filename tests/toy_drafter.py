"""Guesses at what the toy model says: most are right, some are wrong from some place on, and there may be none."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from purestep.pure.records.drafter import Drafter, Proposal
from tests.toy_model import MODULUS, VOCAB, WEIGHTS


def guesses(tokens: Tensor, lengths: Tensor, num_drafts: int) -> Tensor:
    """Drafts behind the first `lengths` of `tokens` [reqs, positions]: int32 [reqs, num_drafts], -1 behind the last."""
    place = torch.arange(tokens.shape[1])
    history = torch.where(place < lengths[:, None], tokens.to(torch.int64) + 1, 0)
    total, drafts = (history * WEIGHTS[: len(place)]).sum(-1) % MODULUS, list[Tensor]()
    for ahead in range(num_drafts):
        is_wrong = total // VOCAB % 4 == 0
        drafts.append((total + is_wrong) % MODULUS % VOCAB)
        weight = WEIGHTS[(lengths + ahead).clamp(max=len(WEIGHTS) - 1).long()]
        total = (total + (drafts[-1] + 1) * weight) % MODULUS
    count = (lengths % (num_drafts + 2))[:, None]
    return torch.where(torch.arange(num_drafts) < count, torch.stack(drafts, 1), -1).to(torch.int32)


def toy_drafter(num_drafts: int) -> Drafter:
    """Such guesses on the device."""

    def propose(params: Any, executed: Any, state: Any, output: Any, *, kernels: Any) -> Proposal:
        rows = state.layout.row_of_index
        lengths = state.ledger.num_known_tokens.index_select(0, rows)
        return Proposal(guesses(state.token_ids.index_select(0, rows), lengths, num_drafts))

    return Drafter(num_drafts, propose)


def guessed(history: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    """Such guesses on the host."""
    drafts = guesses(torch.tensor([history]), torch.tensor([len(history)]), num_drafts)[0].tolist()
    return tuple([token for token in drafts if token >= 0])
