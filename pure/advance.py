"""`advance`: the next state, once the step's tokens are known."""

import torch

from purestep.kernels.types import Kernels
from purestep.pure.record import replace
from purestep.pure.records.inputs import StepInputs
from purestep.pure.records.outputs import SampledTokens, StepOutput
from purestep.pure.records.state import Ledger, StepState


def advance(
    state: StepState, inputs: StepInputs, sampled: SampledTokens, *, kernels: Kernels
) -> tuple[StepState, StepOutput]:
    """The ledger and the tapes after the step, and what the host will be told.

    Active rows have computed their tokens. A token is kept, appended to the row's tape and counted unless the row is
    discarded (its history is not fully computed), frozen, or its logits were NaN. A row stops being active with a
    stop id, at its length limit, or with NaN logits: later steps of the same layout run it idle and change nothing
    of it, so a loop of steps needs no host.
    """
    ledger, rows = state.ledger, state.layout.row_of_index
    active = ledger.active[rows]
    has_nan = active & sampled.has_nan
    kept = active & ~inputs.discard & ~has_nan
    computed = torch.where(active, inputs.seq_lens, ledger.num_computed_tokens[rows])
    known = ledger.num_known_tokens[rows]
    limit = ledger.length_limit[rows]
    stays = active & ~has_nan & ~(kept & (sampled.stops | (known + 1 >= limit)))
    counted = kept.to(torch.int32)
    changed = torch.stack(
        [
            computed,
            known + counted,
            ledger.num_output_tokens[rows] + counted,
            limit,
            stays.to(torch.int32),
            (ledger.has_nan[rows] | has_nan).to(torch.int32),
        ]
    )
    columns = torch.arange(len(changed), device=rows.device)[:, None]
    table = kernels.write(ledger.table, (columns, rows[None, :]), changed)
    table = kernels.write(table, (columns.new_full((), len(changed)),), ledger.step + 1)
    # A token that is not kept is written where the null row begins, which nothing reads.
    place = torch.where(kept, known, 0)
    row = torch.where(kept, rows, ledger.table.shape[1] - 1)
    token_ids = kernels.write(state.token_ids, (row, place), sampled.token_ids)
    output = StepOutput(
        sampled_token_ids=torch.where(kept, sampled.token_ids, -1)[:, None],
        num_computed_tokens=computed,
        active=stays,
        has_nan=has_nan,
        logprobs_tensors=sampled.logprobs_tensors,
    )
    return replace(state, ledger=Ledger(table), token_ids=token_ids), output
