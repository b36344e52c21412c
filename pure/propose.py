"""`propose`: the guesses that the next step will verify."""

from collections.abc import Sequence
from typing import Any

import torch

from purestep.kernels.types import Kernels
from purestep.pure.errors import DrafterError
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter, Drafts, Histories, HostDrafter, Proposal
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.state import ExecuteModelState, Ledger, StepState


def propose(
    drafter: Drafter | None,
    params: Params,
    executed: ExecuteModelState,
    state: StepState,
    output: StepOutput,
    *,
    kernels: Kernels,
) -> tuple[StepState, StepOutput]:
    """The state with drafts for the next step, and the output that tells them; without a drafter, both as they are.

    Requests that kept a token get drafts, fewer than they may still say: the token behind the drafts is theirs too. So
    no draft lies at or past a row's length limit or the end of its tape. Those whose history is not fully computed
    get none; rows that ran idle keep what they have.

    Raises:
        DrafterError: a drafter that the state was not made for, or that proposes something else than drafts.
    Source: vllm/v1/worker/gpu_model_runner.py propose_draft_token_ids.
    """
    if drafter is None:
        return state, output
    _check(drafter, state)
    table, before, rows = state.ledger.table, state.ledger.drafts, state.layout.row_of_index
    assert before is not None
    proposal = drafter.propose(params, executed, state, output, kernels=kernels)
    _check_proposal(proposal, (len(rows), drafter.num_drafts))
    seq_lens, (num_rows, longest) = executed.inputs.seq_lens, state.token_ids.shape
    drafts, told = kernels.put_drafts(
        kernels, table, before, rows, seq_lens, output.sampled_token_ids, proposal.drafts, longest=longest
    )
    probs = state.draft_probs
    if proposal.probs is not None and probs is not None:
        own = torch.where(seq_lens == 0, num_rows - 1, rows)  # a row that ran idle keeps what it has
        probs = kernels.write(probs, (own,), proposal.probs.to(probs.dtype))
    state = replace(
        state,
        ledger=Ledger(table, drafts),
        kv=state.kv if proposal.kv is None else proposal.kv,
        draft_probs=probs,
        drafter=state.drafter if proposal.kept is None else proposal.kept,
    )
    return state, replace(output, draft_token_ids=told)


def host_drafts(
    drafter: HostDrafter, kept: Any, histories: Histories, limits: Sequence[int]
) -> tuple[Any, Drafts]:
    """What a drafter on the host keeps now, and its drafts for requests with these known tokens and length limits.

    A limit is the number of known tokens at which the request stops.
    """
    budgets = [
        max(min(drafter.num_drafts, limit - len(history) - 1), 0)
        for history, limit in zip(histories, limits, strict=True)
    ]
    kept, drafts = drafter.propose(kept, histories, budgets)
    return kept, tuple(tuple(own[:budget]) for own, budget in zip(drafts, budgets, strict=True))


def equip(state: StepState, drafter: Drafter, *, vocab_size: int) -> StepState:
    """The state with what a drafter needs beside the ledger's drafts: their probabilities, and what it keeps."""
    rows, device = state.token_ids.shape[0], state.token_ids.device
    probs = torch.zeros(rows, drafter.num_drafts, vocab_size, device=device) if drafter.draws else None
    return replace(state, draft_probs=probs, drafter=drafter.init(num_rows=rows, device=device))


def _check_proposal(proposal: Proposal, shape: tuple[int, int]) -> None:
    if not isinstance(proposal, Proposal) or proposal.drafts.shape != shape:
        what = list(proposal.drafts.shape) if isinstance(proposal, Proposal) else repr(proposal)
        raise DrafterError(
            f"the drafter proposed {what} for {shape[0]} requests with up to {shape[1]} drafts each: give a Proposal "
            f"whose drafts are {list(shape)}, -1 behind a request's last"
        )


def _check(drafter: Drafter, state: StepState) -> None:
    places = 0 if state.ledger.drafts is None else state.ledger.drafts.shape[1]
    if places != drafter.num_drafts:
        raise DrafterError(
            f"the drafter proposes {drafter.num_drafts} tokens a request, and the state has places for {places}: make "
            f"it with BatchLimits(num_drafts={drafter.num_drafts})"
        )
    if drafter.draws and state.draft_probs is None:
        raise DrafterError(
            "the drafter draws its tokens, and the state has no place for what they were drawn from: make it with "
            "equip(state, drafter, vocab_size=...)"
        )
