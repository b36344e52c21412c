"""`AsyncModelRunnerOutput`: a sampled step's results for the scheduler, on their way."""

from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from purestep.pure.model_runner_output import model_runner_output
from purestep.pure.prompt_logprobs import PromptChunk, PromptScores, prompt_table
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.outputs import DraftTokenIds, KVConnectorOutput, LogprobsTensors, ModelRunnerOutput
from purestep.pure.settle import settle
from purestep.state.drafting import of_output
from purestep.state.pending import Pending, ToHost


@attrs.frozen
class ScoredChunk:
    """A part of a prompt, and its rows on their way."""

    chunk: PromptChunk
    rows: ToHost[LogprobsTensors]


class AsyncModelRunnerOutput:
    """`get_output` waits for the step, and may be called from any thread; called again it gives the same."""

    __slots__ = ("_experts", "_output", "_pending", "_prompts", "_report")

    def __init__(
        self,
        pending: Pending,
        prompts: tuple[tuple[ScoredChunk, ...], ...],  # of each request whose prompt is complete
        report: KVConnectorOutput | None,
        experts: Any,
    ) -> None:
        self._pending = pending
        self._prompts = prompts
        self._report = report
        self._experts = experts
        self._output: ModelRunnerOutput | None = None

    @property
    def is_told(self) -> bool:
        """Whether somebody has the output."""
        return self._output is not None

    def get_output(self) -> ModelRunnerOutput:
        """The step's results by request."""
        if self._output is None:
            self._output = model_runner_output(
                self._pending.batch.req_ids,
                self._pending.result(),
                prompt_logprobs=MappingProxyType({p[-1].chunk.req_id: _table(p) for p in self._prompts}),
                kv_connector_output=self._report,
                routed_experts=self._experts,
            )
        return self._output

    def draft_token_ids(self) -> DraftTokenIds | None:
        """What the device has proposed for the next step, None without a drafter there; it waits for the step."""
        drafts = self._pending.result().draft_token_ids
        return None if drafts is None else of_output(self._pending.batch.req_ids, np.asarray(drafts))

    def settled(self, batch: InputBatch) -> InputBatch:
        """The batch, knowing what the step did; it waits for that."""
        return settle(batch, self._pending.batch, self._pending.result())


def _table(parts: tuple[ScoredChunk, ...]) -> LogprobsTensors:
    scores = [PromptScores(part.chunk.first_row, part.rows.result()) for part in parts]
    last = parts[-1].chunk
    return prompt_table(scores, num_rows=last.num_rows, num_logprobs=last.num_logprobs)
