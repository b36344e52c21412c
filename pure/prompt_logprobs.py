"""Log-probabilities of prompt tokens: what a step can tell of them, and the table that its chunks make up.

The row of a prompt token's log-probability comes from the step that runs the token before it. So tokens that were
found in the prefix cache tell nothing of those behind them, and their rows are marked as absent.
"""

from collections.abc import Container, Sequence

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.arrays import frozen
from purestep.pure.models.model import Model, head_logits, linear_head
from purestep.pure.record import record, replace
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.outputs import LogprobsTensors
from purestep.pure.records.params import Params
from purestep.pure.rows import occupied

ABSENT_ID, ABSENT_RANK = -1, 0


@record(static=True)
class PromptChunk:
    """The part of a request's prompt that one step can score."""

    req_id: str
    index: int  # of the request in the batch
    first_row: int  # of the prompt's table, which its first token in this step makes
    targets: tuple[int, ...]  # the prompt tokens that are scored
    num_logprobs: int
    num_rows: int  # of the whole table: every prompt token but the first
    is_last: bool  # with this step the whole prompt is computed


@record
class PromptScores:
    """A chunk's rows, on the host."""

    first_row: int
    rows: LogprobsTensors


def prompt_chunks(batch: InputBatch, req_ids: Container[str]) -> tuple[PromptChunk, ...]:
    """What the coming step can score, of the scheduled requests among `req_ids` (those that want it, and lack some).

    Source: vllm/v1/worker/gpu_model_runner.py _get_prompt_logprobs_dict.
    """
    starts, chunks = batch.layout.query_start_loc, []
    for index, req_id in enumerate(batch.req_ids):
        if req_id not in req_ids:
            continue
        row, num_tokens = batch.row_of[req_id], int(starts[index + 1] - starts[index])
        wanted = occupied(batch.rows.requests[row]).sampling_params.prompt_logprobs
        num_prompt, end = (
            int(column[row])
            for column in (batch.columns.num_prompt_tokens, batch.columns.num_computed_tokens_bound)
        )
        first_row = end - num_tokens
        targets = occupied(batch.rows.tokens[row])[first_row + 1 : min(end + 1, num_prompt)].tolist()
        chunks.append(
            PromptChunk(
                req_id=req_id,
                index=index,
                first_row=first_row,
                targets=tuple(targets),
                num_logprobs=batch.limits.vocab_size if wanted in (None, -1) else wanted,
                num_rows=num_prompt - 1,
                is_last=end >= num_prompt,
            )
        )
    return tuple(chunks)


def score_prompt(
    model: Model,
    params: Params,
    hidden: Float[Tensor, "rows hidden"],
    targets: Int[Tensor, " rows"],
    *,
    num_logprobs: int,
    kernels: Kernels,
) -> LogprobsTensors:
    """Raw log-probabilities of `targets` and of the likeliest tokens, from the hidden states before them."""
    head = model.head
    weights = None if head is None else head.weights(params.tree)
    if head is not None and head.function is linear_head:
        return LogprobsTensors(*kernels.score_hidden(kernels, hidden, weights, targets, num_logprobs))

    def of_head(own: Kernels, x: Tensor, weights: object) -> Tensor:
        return head_logits(model, weights, x, kernels=kernels)

    others = replace(kernels, logits=of_head)  # for those of a head that is more than a weight
    return LogprobsTensors(*others.score_hidden(others, hidden, weights, targets, num_logprobs))


def prompt_table(scores: Sequence[PromptScores], *, num_rows: int, num_logprobs: int) -> LogprobsTensors:
    """One row for every prompt token but the first; a row that no step computed is absent.

    Absent rows have token ids -1, log-probabilities NaN and ranks 0: no number that was not computed. Where a row was
    computed twice, after a preemption, the later one counts.
    """
    width = num_logprobs + 1
    ids = np.full((num_rows, width), ABSENT_ID, np.int32)
    logprobs = np.full((num_rows, width), np.nan, np.float32)
    ranks = np.full(num_rows, ABSENT_RANK, np.int32)
    for chunk in scores:
        rows = slice(chunk.first_row, chunk.first_row + len(chunk.rows.selected_token_ranks))
        ids[rows] = chunk.rows.logprob_token_ids
        logprobs[rows] = chunk.rows.logprobs
        ranks[rows] = chunk.rows.selected_token_ranks
    return LogprobsTensors(frozen(ids), frozen(logprobs), frozen(ranks))
