"""A step's output in the form that upstream's scheduler takes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from purestep.pure.records.outputs import (
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

    Token lists are the caller's to cut, as upstream's scheduler does where a request stops. Log-probabilities have a
    row for every request, kept or not. A request without a distribution (NaN or +inf among its logits, or no token
    allowed) kept nothing and never will: `num_nans_in_logits` counts it as 1, and the scheduler has to abort it.
    """
    num_reqs = len(req_ids)
    tokens, _, has_nan = host_columns(output, num_reqs)
    logprobs = output.logprobs_tensors
    return ModelRunnerOutput(
        req_ids=tuple(req_ids),
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[[token] if token >= 0 else [] for token in tokens.tolist()],
        logprobs=None
        if logprobs is None
        else LogprobsLists(
            logprobs.logprob_token_ids[:num_reqs],
            logprobs.logprobs[:num_reqs],
            logprobs.selected_token_ranks[:num_reqs],
        ),
        prompt_logprobs_dict=prompt_logprobs,
        kv_connector_output=kv_connector_output,
        num_nans_in_logits={req_ids[index]: 1 for index in np.flatnonzero(has_nan).tolist()},
        routed_experts=routed_experts,
    )
