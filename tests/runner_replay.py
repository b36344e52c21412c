"""Replaying a recorded run through `GPUModelRunner`, as upstream's engine calls it: see tests/trace_replay.py."""

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.kernels.donating import donating
from purestep.pure.drafters.ngram import ngram_on_host
from purestep.pure.record import replace
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.drafter import HostDrafter
from purestep.pure.records.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsTensors, ModelRunnerOutput
from purestep.state.buffers import PersistentBuffers
from purestep.state.loading.loaded import LoadedModel
from purestep.state.run import BoundStep
from purestep.state.runner import GPUModelRunner
from tests.trace_replay import (
    Drawn,
    Json,
    Noise,
    compare_batch,
    compare_inputs,
    compare_logprobs,
    drawing,
    kept_of,
    limits_of,
    logprobs_of,
    params_of,
    stating,
)


class RunnerReplay:
    """One run. In an asynchronous one a step's output is asked for when the next step is on its way."""

    def __init__(self, trace: Json, loaded: LoadedModel) -> None:
        self.steps, self.is_async = trace["steps"], trace["meta"]["async_scheduling"]
        self.noise = Noise()
        self.drawn: Drawn | None = None
        kernels = replace(
            donating,
            draw=self._draw,
            count_accepted=lambda *a: drawing(donating, self.drawn).count_accepted(*a),
            draw_last=lambda *a: drawing(donating, self.drawn).draw_last(*a),
        )
        limits = limits_of(trace, loaded)
        buffers = PersistentBuffers(loaded.model, limits, drafter=stating(limits.num_drafts))
        bound = BoundStep(buffers, loaded.model, loaded.params, kernels)
        self.drafter = drafter_of(trace)
        self.runner = GPUModelRunner(bound, async_scheduling=self.is_async, drafter=self.drafter)
        self.stopped: set[str] = set()

    def run(self) -> None:
        """Replay every step and compare what is recorded of it."""
        last: tuple[Any, Json] | None = None
        for step in self.steps:
            if self.is_async:
                self._hear(step)
            output = as_objects(step["scheduler_output"])
            answer: Any = self.runner.execute_model(output)
            if output.total_num_scheduled_tokens:
                assert answer is None
                answer = self._sample(step)
            else:
                assert answer is EMPTY_MODEL_RUNNER_OUTPUT
            if not self.is_async:
                compare_results(answer, step)
                if self.drafter is not None and output.total_num_scheduled_tokens:
                    self._compare_drafts(step)
                continue
            if last is not None:
                compare_results(last[0].get_output(), last[1], self.stopped_before)
            last = (answer, step) if output.total_num_scheduled_tokens else None

    def _hear(self, step: Json) -> None:
        """What the client is told in this step is of the one before: those that ended with it run idle in this one."""
        ended = {
            out["req_id"] for out in step["engine_outputs"] if out["finish_reason"] in ("stop", "length")
        }
        self.stopped_before, self.stopped = set(self.stopped), self.stopped | ended

    def _sample(self, step: Json) -> Any:
        executed, batch = self.runner.execute_model_state, self.runner.input_batch
        assert executed is not None
        (compare_batch_ahead if self.is_async else compare_batch)(batch, step)
        compare_inputs(batch, executed, step, stopped=self.stopped)
        self.drawn = self.noise.of(batch, step)
        return self.runner.sample_tokens(as_grammar(step.get("grammar")))

    def _draw(self, logits: Tensor, noise: Tensor) -> Tensor:
        """The draw, with the noise that was recorded."""
        assert self.drawn is not None and self.drawn.exponential.shape == noise.shape
        return donating.draw(logits, self.drawn.exponential.to(noise.dtype))  # type: ignore[no-any-return]

    def _compare_drafts(self, step: Json) -> None:
        """What is proposed for the next step is what was, but no more than a request may still say.

        Near the longest length upstream has zeros for everybody instead; so may n-grams, but hardly for all at once.
        """
        if all(theirs and not any(theirs) for theirs in step["draft_token_ids"]):
            return
        drafts, batch = self.runner.take_draft_token_ids(), self.runner.input_batch
        assert drafts is not None
        own = dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True))
        ended = {out["req_id"] for out in step["engine_outputs"] if out["finish_reason"]}
        req_ids = step["batch_after_update"]["req_ids"]
        assert own.keys() == set(req_ids)
        for req_id, theirs in zip(req_ids, step["draft_token_ids"], strict=True):
            if req_id not in ended:
                row = batch.row_of[req_id]
                most = params_of(batch, req_id).max_tokens
                end = int(batch.columns.num_prompt_tokens[row]) + (
                    batch.limits.max_model_len if most is None else most
                )
                left = min(end, batch.limits.max_model_len) - int(batch.columns.num_tokens[row])
                assert list(own[req_id]) == theirs[: max(left - 1, 0)]


def drafter_of(trace: Json) -> HostDrafter | None:
    """The drafter that the recorded engine had, if it looked for n-grams on the host."""
    config = trace["meta"]["engine_args"].get("speculative_config") or {}
    if config.get("method") != "ngram":
        return None
    sizes = {"min_n": config["prompt_lookup_min"], "max_n": config["prompt_lookup_max"]}
    return ngram_on_host(num_drafts=config["num_speculative_tokens"], **sizes)


def as_objects(output: Json) -> Any:
    """A recorded SchedulerOutput with attributes and sets, as upstream hands it over."""
    new = [
        SimpleNamespace(**data | {"sampling_params": SimpleNamespace(**data["sampling_params"])})
        for data in output["scheduled_new_reqs"]
    ]
    cached = output["scheduled_cached_reqs"]
    resumed = {"resumed_req_ids": set(cached["resumed_req_ids"])}
    return SimpleNamespace(
        **output
        | {
            "scheduled_new_reqs": new,
            "scheduled_cached_reqs": SimpleNamespace(**cached | resumed),
            "finished_req_ids": set(output["finished_req_ids"]),
        }
    )


def as_grammar(entry: Json | None) -> Any:
    """A recorded grammar output."""
    if not entry:
        return None
    words = np.frombuffer(base64.b64decode(entry["bitmask_i32_base64"]), "<i4").reshape(
        entry["bitmask_shape"]
    )
    ids = entry["structured_output_request_ids"]
    return SimpleNamespace(structured_output_request_ids=ids, grammar_bitmask=words)


def compare_batch_ahead(batch: InputBatch, step: Json) -> None:
    """As `compare_batch`, where upstream has placeholders for tokens on their way, and we may know some or none."""
    recorded = step["batch_after_update"]
    assert set(batch.req_ids) == set(recorded["req_ids"])
    assert batch.row_of.keys() | batch.parked.keys() == step["requests_after_update"].keys()
    counts = step["scheduler_output"]["num_scheduled_tokens"]
    for index, req_id in enumerate(recorded["req_ids"]):
        row = batch.row_of[req_id]
        ours, theirs = batch.rows.tokens[row].tolist(), recorded["token_ids"][index]  # type: ignore[union-attr]
        num_prompt = recorded["num_prompt_tokens"][index]
        assert batch.columns.num_prompt_tokens[row] == num_prompt <= len(ours) <= len(theirs)
        assert ours[:num_prompt] == theirs[:num_prompt]
        assert batch.rows.block_ids[0][row].tolist() == recorded["block_table"][0][index]  # type: ignore[union-attr]
        end = recorded["num_computed_tokens"][index] + counts[req_id]
        assert batch.columns.num_computed_tokens_bound[row] == end


def compare_results(
    result: ModelRunnerOutput, step: Json, stopped: set[str] | frozenset[str] = frozenset()
) -> None:
    """Kept tokens and log-probabilities, of samples and prompts; upstream samples for those that stopped, we do not."""
    recorded = step.get("model_runner_output") or {"req_ids": [], "logprobs": None, "prompt_logprobs": {}}
    assert set(result.req_ids) == set(recorded["req_ids"])
    assert not result.num_nans_in_logits
    assert (result.logprobs is None) == (recorded["logprobs"] is None)
    for req_id, index in result.req_id_to_index.items():
        other = recorded["req_id_to_index"][req_id]
        kept, theirs = result.sampled_token_ids[index], recorded["sampled_token_ids"][other]
        if len(theirs) > 1 and kept != theirs:
            assert kept == kept_of(step, req_id)
        else:
            assert kept == ([] if req_id in stopped else theirs)
        if result.logprobs is not None:
            count = len(kept) if result.logprobs.cu_num_generated_tokens else 1
            rows, theirs = (
                result.logprobs.slice_request(index, count),
                logprobs_of(recorded["logprobs"], other, count),
            )
            compare_logprobs(
                *map(
                    torch.from_numpy,
                    (rows.logprob_token_ids, rows.logprobs, rows.sampled_token_ranks),
                ),
                theirs,
            )
    assert result.prompt_logprobs_dict.keys() == recorded["prompt_logprobs"].keys()
    for req_id, table in result.prompt_logprobs_dict.items():
        assert isinstance(table, LogprobsTensors)
        ours = (table.logprob_token_ids, table.logprobs, table.selected_token_ranks)
        compare_logprobs(*(torch.tensor(part) for part in ours), recorded["prompt_logprobs"][req_id])
