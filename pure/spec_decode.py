"""Upstream's index vectors of a step that verifies drafts, for hosts and comparisons: the device needs none of them.

Here a request has as many rows of logits as the most drafts of a batch ask for, so that shapes are static. Upstream
packs them: one row for each draft and one behind.
"""

import numpy as np
from jaxtyping import Int32

from purestep.pure.arrays import frozen
from purestep.pure.record import record


@record
class SpecDecodeMetadata:
    """Where the packed rows of logits come from, and which of them judge drafts.

    Source: vllm/v1/spec_decode/metadata.py.
    """

    draft_token_ids: Int32[np.ndarray, " drafts"]
    num_draft_tokens: tuple[int, ...]  # of each request
    cu_num_draft_tokens: Int32[np.ndarray, " reqs"]  # up to and with each request
    cu_num_sampled_tokens: Int32[np.ndarray, " reqs"]
    target_logits_indices: Int32[np.ndarray, " drafts"]  # of the packed rows, those that judge a draft
    bonus_logits_indices: Int32[np.ndarray, " reqs"]  # and those behind a request's last draft
    logits_indices: Int32[np.ndarray, " logits"]  # of the step's tokens, those whose logits are packed

    @property
    def max_spec_len(self) -> int:
        """The most drafts of a request."""
        return max(self.num_draft_tokens, default=0)


def spec_decode_metadata(
    num_draft_tokens: Int32[np.ndarray, " reqs"],
    cu_num_scheduled_tokens: Int32[np.ndarray, " reqs"],
    input_ids: Int32[np.ndarray, " tokens"],
) -> SpecDecodeMetadata:
    """The vectors for requests that end with so many drafts each, their tokens laid end to end.

    Source: vllm/v1/worker/gpu_model_runner.py _calc_spec_decode_metadata.
    """
    num_sampled = num_draft_tokens + 1
    last = np.cumsum(num_sampled) - 1  # packed rows behind the last drafts
    # Of every packed row: its request, and how many rows of that are behind it.
    request = np.repeat(np.arange(len(num_sampled)), num_sampled)
    behind = last[request] - np.arange(len(request))
    logits_indices = cu_num_scheduled_tokens[request] - 1 - behind
    target = np.flatnonzero(behind > 0)
    return SpecDecodeMetadata(
        draft_token_ids=_column(input_ids[logits_indices[target] + 1]),
        num_draft_tokens=tuple(num_draft_tokens.tolist()),
        cu_num_draft_tokens=_column(np.cumsum(num_draft_tokens)),
        cu_num_sampled_tokens=_column(last + 1),
        target_logits_indices=_column(target),
        bonus_logits_indices=_column(last),
        logits_indices=_column(logits_indices),
    )


def _column(values: np.ndarray) -> np.ndarray:
    return frozen(values.astype(np.int32))
