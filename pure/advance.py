"""`advance`: the next state, once the step's tokens are known."""

import torch
from jaxtyping import Bool
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.record import replace
from purestep.pure.records.inputs import StepInputs
from purestep.pure.records.outputs import SampledTokens, StepOutput
from purestep.pure.records.state import Ledger, StepState


def advance(
    state: StepState, inputs: StepInputs, sampled: SampledTokens, *, kernels: Kernels
) -> tuple[StepState, StepOutput]:
    """The ledger and the tapes after the step, and what the host will be told.

    Rows that ran have computed their tokens. A token is kept, appended to the row's tape and counted unless the row is
    discarded (its history is not fully computed), ran idle, or its logits were NaN. A row stops being active with a
    stop id, at its length limit, or with NaN logits: later steps of the same layout run it idle and change nothing
    of it, so a loop of steps needs no host. Where drafts were verified several tokens may be kept, up to the first that
    ends the row; keys and values of drafts that fell lie behind the computed length, where the next step writes.
    """
    batch = (
        state.token_ids,
        state.layout.row_of_index,
        inputs.seq_lens,
        inputs.discard,
        sampled.token_ids,
        sampled.stops,
        sampled.has_nan,
    )
    table, drafts = state.ledger.table, state.ledger.drafts
    if inputs.drafts is None:
        table, token_ids, kept, computed, stays, has_nan = kernels.advance(kernels, table, *batch)
        kept = kept[:, None]
        drafts = _left(state, kept[:, 0] >= 0, kernels)
    else:
        table, drafts, token_ids, kept, computed, stays, has_nan = kernels.advance_drafts(
            kernels, table, drafts, *batch
        )
    output = StepOutput(
        sampled_token_ids=kept,
        num_computed_tokens=computed,
        active=stays,
        has_nan=has_nan,
        logprobs_tensors=sampled.logprobs_tensors,
        id_logprobs=sampled.id_logprobs,
        kept_mass=sampled.kept_mass,
    )
    return replace(state, ledger=Ledger(table, drafts), token_ids=token_ids), output


def _left(state: StepState, kept: Bool[Tensor, " reqs"], kernels: Kernels) -> Tensor | None:
    """The rows' drafts: guesses at what follows a row's tokens are nothing to it once it has other ones."""
    drafts = state.ledger.drafts
    if drafts is None:
        return None
    nobody = drafts.shape[0] - 1
    row = torch.where(kept, state.layout.row_of_index, nobody)
    written: Tensor = kernels.write(drafts, (row,), drafts.new_full((), -1))
    return written
