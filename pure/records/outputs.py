"""What a step gives back. Source: vllm/v1/outputs.py (names and fields)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from purestep.kernels.record import record, replace
from purestep.pure.arrays import Array
from purestep.pure.errors import SchedulerOutputError


@record
class LogprobsTensors:
    """Log-probabilities on the device. Column 0 is the sampled token, then the largest ones in descending order."""

    logprob_token_ids: Int[Array, "logits width"]
    logprobs: Float[Array, "logits width"]
    selected_token_ranks: Int[Array, " logits"]  # 1 is the largest; ties count against the token


@record
class KeptMass:
    """How likely sampled tokens were as they were drawn, and how much of the distribution was left to draw from.

    A token's log-probability before the cuts, all else done, is `drawn_logprobs + log_mass`: what a trainer that does
    not cut compares with. Greedy tokens are told of as if drawn at temperature 1, without cuts.
    """

    drawn_logprobs: Float[Array, " tokens"]  # of the token, in the distribution that it was drawn from
    log_mass: Float[Array, " tokens"]  # log of what top-k, top-p and min-p kept; 0 without a cut


@record
class SampledTokens:
    """What sampling makes of a batch's logits, before anything is kept or thrown away."""

    token_ids: Int[Tensor, " reqs *width"]  # width 1 + drafts where drafts are verified, -1 behind the last
    stops: Bool[Tensor, " reqs *width"]  # the token is one of the row's stop ids, and min_tokens is reached
    has_nan: Bool[Tensor, " reqs"]  # some logit that the row goes by is NaN or +inf
    logprobs_tensors: LogprobsTensors | None
    id_logprobs: Float[Tensor, "logits ids"] | None = None  # of the ids that were asked for, -inf behind them
    kept_mass: KeptMass | None = None


@record
class StepOutput:
    """What the device learnt in one step, one entry per index of the batch.

    Where drafts are verified, log-probabilities and kept mass have `width` entries a request, one after the other.
    """

    sampled_token_ids: Int[
        Array, "reqs width"
    ]  # -1: not kept (unfinished prefill, idle row, NaN logits, no draft)
    num_computed_tokens: Int[Array, " reqs"]  # after the step
    active: Bool[Array, " reqs"]  # False once the row hit a stop id, its length limit or NaN logits
    has_nan: Bool[Array, " reqs"]
    logprobs_tensors: LogprobsTensors | None = None
    id_logprobs: Float[Array, "logits ids"] | None = None  # as in SampledTokens
    kept_mass: KeptMass | None = None
    draft_token_ids: Int[Array, "reqs drafts"] | None = None  # proposed for the next step, -1 behind the last


def host_columns(output: StepOutput, num_reqs: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """What an output on the host says of its first requests: kept tokens [reqs, width], computed tokens, NaN or not.

    Behind a request's last token are -1. Entries behind those of the requests are padding.

    Raises:
        SchedulerOutputError: columns that are not of one length or too short, or no matrix of tokens.
    """
    tokens, has_nan = np.asarray(output.sampled_token_ids), np.asarray(output.has_nan)
    computed, num_active = np.asarray(output.num_computed_tokens), len(output.active)
    if (
        tokens.ndim != 2
        or not tokens.shape[1]
        or not num_reqs <= len(tokens) == len(computed) == len(has_nan) == num_active
    ):
        raise SchedulerOutputError(
            f"an output of {num_reqs} requests has sampled_token_ids of shape {tokens.shape} and {len(computed)}, "
            f"{num_active} and {len(has_nan)} entries of num_computed_tokens, active and has_nan: give a row "
            f"of tokens for each, and at least {num_reqs} entries everywhere, as many of each"
        )
    return tokens[:num_reqs], computed[:num_reqs], has_nan[:num_reqs]


@record
class LogprobsLists:
    """The same on the host, as arrays. `cu_num_generated_tokens` is set where requests own several rows."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: tuple[int, ...] | None = None

    def slice_request(self, index: int, num_positions: int) -> "LogprobsLists":
        """The rows of the request at `index`."""
        start = self.cu_num_generated_tokens[index] if self.cu_num_generated_tokens else index
        rows = slice(start, start + num_positions)
        return LogprobsLists(
            self.logprob_token_ids[rows], self.logprobs[rows], self.sampled_token_ranks[rows]
        )


@record
class SamplerOutput:
    """What sampling alone returns: ids int32 [reqs, width], -1 where there is none."""

    sampled_token_ids: Int[Tensor, "reqs width"]
    logprobs_tensors: LogprobsTensors | None = None


@record
class DraftTokenIds:
    """Draft tokens proposed for the next step, per request."""

    req_ids: tuple[str, ...]
    draft_token_ids: tuple[tuple[int, ...], ...]


@record
class KVConnectorOutput:
    """What a KV connector has to report after a step."""

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    expected_finished_count: int = 0

    def is_empty(self) -> bool:
        """Nothing to report; the expected count alone is no report."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.invalid_block_ids
            or self.kv_connector_stats
            or self.kv_cache_events
            or self.kv_connector_worker_meta
        )


@record
class ModelRunnerOutput:
    """One step's results by request; `sampled_token_ids[i]` is empty where nothing was kept."""

    req_ids: tuple[str, ...]
    req_id_to_index: Mapping[str, int]
    sampled_token_ids: Sequence[Sequence[int]] = ()
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: Mapping[str, LogprobsTensors | None] = MappingProxyType({})
    pooler_output: tuple[Tensor | None, ...] | None = None
    kv_connector_output: KVConnectorOutput | None = None
    ec_connector_output: Any = None
    num_nans_in_logits: Mapping[str, int] = MappingProxyType({})
    cudagraph_stats: Any = None
    routed_experts: Any = None
    id_logprobs: Float[np.ndarray, "logits ids"] | None = (
        None  # of logprob_token_ids; in the rows of `logprobs`
    )
    kept_mass: KeptMass | None = None  # likewise


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=(), req_id_to_index=MappingProxyType({}))


def with_kv_conn_output_only(output: KVConnectorOutput | None) -> ModelRunnerOutput:
    """The empty output, carrying a connector's report where there is one."""
    if output is None or output.is_empty():
        return EMPTY_MODEL_RUNNER_OUTPUT
    return replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=output)


def make_empty_encoder_model_runner_output(num_scheduled_tokens: Mapping[str, int]) -> ModelRunnerOutput:
    """The stub of a rank that only produces encoder outputs: a literal 0 per scheduled request, as upstream sends."""
    if not num_scheduled_tokens:
        return EMPTY_MODEL_RUNNER_OUTPUT
    req_ids = tuple(num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index=MappingProxyType({r: i for i, r in enumerate(req_ids)}),
        sampled_token_ids=((0,),) * len(req_ids),
        pooler_output=(None,) * len(req_ids),
    )
