"""What the scheduler says about one step: upstream's field names, columns instead of dicts.

Building these costs nothing per request in a steady batch: the id tuples are handed on unchanged (the same object)
and the numbers are read-only numpy columns in parallel with them. Source: vllm/v1/core/sched/output.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Int32

from purestep.kernels.record import record
from purestep.pure.records.sampling_params import SamplingParams

BlockIds = tuple[tuple[int, ...], ...]  # per KV group

NOTHING: Mapping[str, Any] = MappingProxyType({})


@record
class NewRequestData:
    """A request that the batch has not seen before. `num_computed_tokens` > 0 on a prefix hit."""

    req_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams | None
    block_ids: BlockIds
    num_computed_tokens: int = 0
    stream: int = 0  # the request's random stream
    pooling_params: Any = None
    lora_request: Any = None
    prompt_embeds: Any = None
    prompt_is_token_ids: tuple[bool, ...] | None = None
    mm_features: tuple[Any, ...] = ()


@record
class CachedRequestData:
    """Requests that the batch knows, as columns. Running requests come first, then those resumed."""

    req_ids: tuple[str, ...]
    num_computed_tokens: Int32[np.ndarray, " cached"]
    num_output_tokens: Int32[np.ndarray, " cached"]  # the scheduler's count
    new_block_ids: Mapping[str, BlockIds] = (
        NOTHING  # only requests that got any; complete lists for resumed ones
    )
    resumed_req_ids: frozenset[str] = frozenset()
    all_token_ids: Mapping[str, tuple[int, ...]] = NOTHING  # of requests that sat out the step before
    new_token_ids: Mapping[str, tuple[int, ...]] = NOTHING  # sent back to early pipeline stages

    @property
    def num_reqs(self) -> int:
        """How many known requests this step schedules."""
        return len(self.req_ids)

    def is_context_phase(self, req_id: str) -> bool:
        """Whether a scheduled, known request has no output yet."""
        return req_id in self.req_ids and int(self.num_output_tokens[self.req_ids.index(req_id)]) == 0

    @staticmethod
    def make_empty() -> "CachedRequestData":
        """No known request is scheduled."""
        nothing = np.zeros(0, np.int32)
        return CachedRequestData((), nothing, nothing)


@record
class SchedulerOutput:
    """One step's work. `num_scheduled_tokens` is in parallel with `req_ids`, which fixes the order of the batch."""

    scheduled_new_reqs: tuple[NewRequestData, ...]
    scheduled_cached_reqs: CachedRequestData
    req_ids: tuple[str, ...]  # every scheduled request, in the order in which the batch is laid out
    num_scheduled_tokens: Int32[np.ndarray, " reqs"]  # drafts included, and all steps if there are several
    finished_req_ids: frozenset[str] = frozenset()
    preempted_req_ids: frozenset[str] = frozenset()
    scheduled_spec_decode_tokens: Mapping[str, tuple[int, ...]] = (
        NOTHING  # drafts; -1 where the device has one, or none
    )
    num_device_drafts: Int32[np.ndarray, " reqs"] | None = (
        None  # tokens that are drafts which the device has, if no others are
    )
    num_common_prefix_blocks: tuple[int, ...] = ()
    block_copies: tuple[
        tuple[tuple[int, int], ...], ...
    ] = ()  # per KV group: (source, target), before the step
    new_block_ids_to_zero: tuple[tuple[int, ...], ...] = ()  # per KV group
    scheduled_encoder_inputs: Mapping[str, tuple[int, ...]] = NOTHING
    free_encoder_mm_hashes: tuple[str, ...] = ()
    has_structured_output_requests: bool = False
    pending_structured_output_tokens: bool = False
    num_spec_tokens_to_schedule: int = 0
    kv_connector_metadata: Any = None
    ec_connector_metadata: Any = None
    num_steps: int = 1  # several: each request computes a token in each, until it has its scheduled ones

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Query tokens of the whole step."""
        return int(self.num_scheduled_tokens.sum())

    @property
    def num_scheduled_tokens_by_id(self) -> dict[str, int]:
        """Upstream's dict view."""
        return dict(zip(self.req_ids, self.num_scheduled_tokens.tolist(), strict=True))

    @staticmethod
    def make_empty(finished_req_ids: frozenset[str] = frozenset()) -> "SchedulerOutput":
        """A step that runs nothing but may drop finished requests."""
        return SchedulerOutput(
            scheduled_new_reqs=(),
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            req_ids=(),
            num_scheduled_tokens=np.zeros(0, np.int32),
            finished_req_ids=finished_req_ids,
        )


@record
class GrammarOutput:
    """The tokens that grammars allow in one step; it comes between `execute_model` and `sample_tokens`.

    Each request has 1 + its drafts consecutive masks, in the order of the ids. Token v is allowed where bit v % 32 of
    word v // 32 is set.
    """

    structured_output_request_ids: tuple[str, ...]
    grammar_bitmask: Int32[np.ndarray, "masks words"]
