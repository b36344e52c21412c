"""A step's output in the form that upstream's scheduler takes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from purestep.pure.records.outputs import (
    KeptMass,
    KVConnectorOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    StepOutput,
    host_columns,
)


def model_runner_output(
    req_ids: Sequence[str],
    output: StepOutput,
    *,
    prompt_logprobs: Mapping[str, LogprobsTensors | None] = MappingProxyType({}),
    kv_connector_output: KVConnectorOutput | None = None,
    routed_experts: Any = None,
) -> ModelRunnerOutput:
    """What a step of these requests gave, by request. `output` is on the host; what lies behind them is padding.

    Token lists are the caller's to cut, as upstream's scheduler does where a request stops. Log-probabilities, those of
    chosen ids and kept mass have a row for every request, kept or not; where drafts were verified, one for every kept
    token, request by request.
    A request without a distribution (NaN or +inf among its logits, or no token allowed) kept nothing and never will:
    `num_nans_in_logits` counts it as 1, and the scheduler has to abort it.
    """
    num_reqs = len(req_ids)
    tokens, _, has_nan = host_columns(output, num_reqs)
    is_kept, mass = tokens >= 0, output.kept_mass
    return ModelRunnerOutput(
        req_ids=tuple(req_ids),
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[[token for token in row if token >= 0] for row in tokens.tolist()],
        logprobs=_lists(output.logprobs_tensors, is_kept),
        prompt_logprobs_dict=prompt_logprobs,
        kv_connector_output=kv_connector_output,
        num_nans_in_logits={req_ids[index]: 1 for index in np.flatnonzero(has_nan).tolist()},
        routed_experts=routed_experts,
        id_logprobs=None if output.id_logprobs is None else _rows(output.id_logprobs, is_kept),
        kept_mass=None
        if mass is None
        else KeptMass(*(_rows(c, is_kept) for c in (mass.drawn_logprobs, mass.log_mass))),
    )


def _lists(tensors: LogprobsTensors | None, is_kept: NDArray[np.bool_]) -> LogprobsLists | None:
    if tensors is None:
        return None
    ends = None if is_kept.shape[1] == 1 else (0, *np.cumsum(is_kept.sum(axis=1)).tolist())
    return LogprobsLists(
        logprob_token_ids=_rows(tensors.logprob_token_ids, is_kept),
        logprobs=_rows(tensors.logprobs, is_kept),
        sampled_token_ranks=_rows(tensors.selected_token_ranks, is_kept),
        cu_num_generated_tokens=ends,
    )


def _rows(column: Any, is_kept: NDArray[np.bool_]) -> Any:
    """Those of every request, where each has one; else those of kept tokens."""
    num_reqs, width = is_kept.shape
    return column[:num_reqs] if width == 1 else column[: num_reqs * width][is_kept.ravel()]
