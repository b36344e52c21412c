"""Replaying a recorded run of upstream's engine: its SchedulerOutputs go in, its numbers must come out.

The order within a batch is not compared: upstream's rows move, ours do not. Everything is compared by request.
"""

import base64
from collections.abc import Mapping, Set
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.forward import compute_logits
from purestep.pure.initial import initial_state
from purestep.pure.interop import scheduler_output_from_vllm
from purestep.pure.plan import plan_step
from purestep.pure.propose import equip
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.drafter import Drafter, Proposal
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.sampling_rows import MAX_STOP_IDS
from purestep.pure.records.state import ExecuteModelState
from purestep.pure.settle import settle
from purestep.pure.step import execute, sample
from purestep.pure.update import update_states
from purestep.state.loading.loaded import LoadedModel

Json = dict[str, Any]

LOGPROB_TOLERANCE = 1e-4


def why_not(trace: Json) -> str | None:
    """What a recorded run needs that the step does not have, or None."""
    meta = trace["meta"]
    reasons = {
        "several KV groups": len(meta["kv_cache_groups"]) > 1,
        "experts": "moe" in meta["model"],
        "an encoder": "whisper" in meta["model"],
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def matrix(entry: Json) -> Tensor:
    """A recorded float32 matrix."""
    return torch.from_numpy(
        np.frombuffer(base64.b64decode(entry["f32_base64"]), "<f4").reshape(entry["shape"]).copy()
    )


def needs_the_runner(trace: Json) -> bool:
    """Whether what was recorded happens between the stages: steps begun ahead of time, masks between two calls."""
    return trace["meta"]["async_scheduling"] or any(step.get("grammar") for step in trace["steps"])


def limits_of(trace: Json, loaded: LoadedModel) -> BatchLimits:
    """What the recorded engine could hold."""
    meta = trace["meta"]
    return BatchLimits(
        max_num_reqs=meta["max_num_seqs"],
        max_model_len=meta["max_model_len"],
        vocab_size=meta["vocab_size"],
        block_sizes=(meta["block_size"],),
        num_blocks=(meta["num_blocks"],),
        eos_token_ids=loaded.eos_token_ids,
        num_drafts=meta["num_spec_tokens"],
    )


def kept_of(step: Json, req_id: str) -> list[int]:
    """What the scheduler kept of a request's recorded tokens: upstream cuts them where it stops, we on the device."""
    (told,) = [out["new_token_ids"] for out in step["engine_outputs"] if out["req_id"] == req_id] or [[]]
    return list(told)


@attrs.frozen
class Drawn:
    """What a step's random requests drew, in the order of our batch; ones where nothing was drawn."""

    exponential: Tensor  # [reqs, vocab], of the token behind all drafts
    uniform: Tensor  # [reqs, drafts], of accepting each draft
    recovered: Tensor  # [reqs, vocab], of the token in a fallen draft's place


class Noise:
    """Noise as it was recorded; where it was not, drawn as it was then, by a generator for each seeded request."""

    def __init__(self) -> None:
        self.generators: dict[str, torch.Generator] = {}

    def of(self, batch: InputBatch, step: Json) -> Drawn | None:
        """That of a step, None if nothing is drawn in it."""
        theirs, output = step["model_runner_output"]["req_ids"], step["scheduler_output"]
        if not batch.layout.bounds.sampler.random:
            return None
        num_reqs, vocab = len(batch.req_ids), batch.limits.vocab_size
        exponential, recovered = torch.ones(num_reqs, vocab), torch.ones(num_reqs, vocab)
        uniform = torch.ones(num_reqs, batch.limits.num_drafts, dtype=torch.float64)
        for index, req_id in enumerate(batch.req_ids):
            params = params_of(batch, req_id)
            kept = step["model_runner_output"]["sampled_token_ids"][theirs.index(req_id)]
            if not params.is_random or params.seed is None or not kept:
                continue
            if req_id not in self.generators:
                self.generators[req_id] = torch.Generator().manual_seed(params.seed)
            generator = self.generators[req_id]
            exponential[index].exponential_(generator=generator)
            num_drafts = len(output["scheduled_spec_decode_tokens"].get(req_id, ()))
            if num_drafts:
                uniform[index, :num_drafts].uniform_(generator=generator)
                recovered[index].exponential_(generator=generator)
        if step.get("sample_noise"):
            (entry,) = step["sample_noise"]
            exponential = matrix(entry)[[theirs.index(req_id) for req_id in batch.req_ids]]
        if step.get("uniform_probs"):
            rest = iter(step["uniform_probs"])
            own = {r: [next(rest) for _ in output["scheduled_spec_decode_tokens"].get(r, ())] for r in theirs}
            for index, req_id in enumerate(batch.req_ids):
                uniform[index, : len(own[req_id])] = torch.tensor(own[req_id], dtype=torch.float64)
        return Drawn(exponential, uniform, recovered)


def drawing(kernels: Kernels, drawn: Drawn | None) -> Kernels:
    """Kernels that verify drafts with this noise."""
    if drawn is None:
        return kernels

    def count_accepted(
        logits: Tensor, drafts: Tensor, num_drafts: Tensor, probs: Tensor | None, uniform: Tensor
    ) -> Any:
        assert drawn.uniform.shape == uniform.shape
        return kernels.count_accepted(logits.double(), drafts, num_drafts, probs, drawn.uniform)

    def draw_last(
        logits: Tensor,
        drafts: Tensor,
        num_drafts: Tensor,
        accepted: Tensor,
        probs: Tensor | None,
        exponential: Tensor,
    ) -> Any:
        fell = (accepted < num_drafts)[:, None]
        noise = torch.where(fell, drawn.recovered, drawn.exponential)
        assert noise.shape == exponential.shape
        return kernels.draw_last(logits, drafts, num_drafts, accepted, probs, noise.to(exponential.dtype))

    return replace(kernels, count_accepted=count_accepted, draw_last=draw_last)


def stating(num_drafts: int) -> Drafter | None:
    """A drafter that states probabilities, so that drafts, which are certain, are judged by chance, as upstream does
    it, and not by what would have been picked."""
    return Drafter(num_drafts, _never, draws=True) if num_drafts else None


def _never(*given: Any, **kernels: Any) -> Proposal:
    raise AssertionError("drafts come with the plans")


def params_of(batch: InputBatch, req_id: str) -> Any:
    """A request's sampling parameters."""
    return batch.rows.requests[batch.row_of[req_id]].sampling_params  # type: ignore[union-attr]


class Replay:
    """One run: the records of our loop, and what has to be remembered between steps to compare."""

    def __init__(self, trace: Json, loaded: LoadedModel, kernels: Kernels) -> None:
        self.steps, self.loaded, self.kernels = trace["steps"], loaded, kernels
        self.limits = limits_of(trace, loaded)
        self.batch = self.absorbed = InputBatch.make_empty(self.limits)
        self.state = initial_state(loaded.model, self.limits)
        if drafter := stating(self.limits.num_drafts):
            self.state = equip(self.state, drafter, vocab_size=self.limits.vocab_size)
        self.noise = Noise()
        self.prompt_logprobs: dict[str, list[Tensor]] = {}

    def run(self) -> None:
        """Replay every step and compare what is recorded of it."""
        for step in self.steps:
            output = scheduler_output_from_vllm(step["scheduler_output"])
            self.batch = update_states(self.batch, output)
            compare_batch(self.batch, step)
            if output.total_num_scheduled_tokens:
                self._device_step(step)

    def _device_step(self, step: Json) -> None:
        batch, kernels = self.batch, self.kernels
        inbox = plan_step(batch, self.absorbed).inbox.to("cpu")
        with torch.no_grad():
            executed = execute(
                self.loaded.model, self.loaded.params, replace(self.state, inbox=inbox), kernels=kernels
            )
            compare_inputs(batch, executed, step)
            self._compare_prompt_logprobs(executed, step)
            drawn = self.noise.of(batch, step)
            plain = drawn.exponential if drawn is not None and executed.inputs.drafts is None else None
            self.state, output = sample(executed, kernels=drawing(kernels, drawn), exponential=plain)
        compare_output(batch, output, step)
        self.absorbed = batch
        self.batch = settle(batch, batch, output)
        compare_bookkeeping(self.batch, output, step)

    def _compare_prompt_logprobs(self, executed: ExecuteModelState, step: Json) -> None:
        """Each prompt token's log-probability comes from the hidden state before it, over all chunks."""
        batch, starts = self.batch, executed.inputs.query_start_loc.tolist()
        recorded = step["model_runner_output"]["prompt_logprobs"]
        for index, req_id in enumerate(batch.req_ids):
            row, wanted = batch.row_of[req_id], params_of(batch, req_id).prompt_logprobs
            first = int(executed.inputs.positions[starts[index]])
            prompt = batch.rows.tokens[row].array[: batch.columns.num_prompt_tokens[row]]  # type: ignore[union-attr]
            count = min(starts[index + 1] - starts[index], len(prompt) - 1 - first)
            if wanted is None or count < 1:
                continue
            logits = compute_logits(
                self.loaded.model,
                self.loaded.params,
                executed.hidden_states,
                torch.arange(starts[index], starts[index] + count),
                kernels=self.kernels,
            )
            targets = torch.tensor(prompt[first + 1 : first + 1 + count])
            ids, values, ranks = self.kernels.gather_logprobs(logits.log_softmax(-1), targets, wanted)
            chunks = self.prompt_logprobs.setdefault(req_id, [])
            chunks.append(torch.cat([ids.double(), values.double(), ranks[:, None].double()], 1))
            if first + count == len(prompt) - 1:
                ours = torch.cat(chunks)
                theirs = recorded.pop(req_id)
                compare_logprobs(ours[:, : wanted + 1], ours[:, wanted + 1 : -1], ours[:, -1], theirs)
        assert not recorded


def compare_batch(batch: InputBatch, step: Json) -> None:
    """Every request, in a row or parked, has the recorded tokens, blocks and counts."""
    recorded = step["batch_after_update"]
    assert set(batch.req_ids) == set(recorded["req_ids"])
    for index, req_id in enumerate(recorded["req_ids"]):
        row = batch.row_of[req_id]
        drafts = [token for at, _, token in batch.drafts.tolist() if at == row]
        assert drafts == recorded["spec_token_ids"][index]
        assert [*batch.rows.tokens[row].tolist(), *drafts] == recorded["token_ids"][index]  # type: ignore[union-attr, misc]
        assert batch.rows.block_ids[0][row].tolist() == recorded["block_table"][0][index]  # type: ignore[union-attr]
        assert batch.columns.num_prompt_tokens[row] == recorded["num_prompt_tokens"][index]
        assert batch.columns.num_tokens[row] == recorded["num_tokens_no_spec"][index]
        assert batch.columns.num_computed_tokens_settled[row] == recorded["num_computed_tokens"][index]
    cached = step["requests_after_update"]
    assert batch.row_of.keys() | batch.parked.keys() == cached.keys()
    for req_id, entry in batch.parked.items():
        assert len(entry.tokens) == cached[req_id]["num_tokens"]
        assert entry.tokens.tolist()[entry.request.num_prompt_tokens :] == cached[req_id]["output_token_ids"]


def compare_inputs(
    batch: InputBatch, executed: ExecuteModelState, step: Json, *, stopped: Set[str] = frozenset()
) -> None:
    """The forward pass read, wrote and asked for what is recorded, request by request; those that stopped run idle."""
    recorded, theirs = step["prepare_inputs"], step["batch_after_update"]["req_ids"]
    inputs = executed.inputs
    starts, their_starts = inputs.query_start_loc.tolist(), recorded["query_start_loc"]
    scheduled = step["scheduler_output"]["num_scheduled_tokens"]
    logits = matrix(step["logits"]) if step.get("logits") else None
    speculation = recorded.get("spec_decode_metadata") or {"num_draft_tokens": [0] * len(theirs)}
    num_drafts = speculation["num_draft_tokens"]
    first_rows = np.cumsum([0, *(n + 1 for n in num_drafts)]).tolist()
    places = len(inputs.logits_indices) // len(theirs)
    assert len(batch.req_ids) == len(theirs) == len(inputs.seq_lens)
    assert (places > 1) == any(num_drafts)
    for index, req_id in enumerate(batch.req_ids):
        if req_id in stopped:
            assert inputs.seq_lens[index] == 0
            continue
        other = theirs.index(req_id)
        ours = slice(starts[index], starts[index + 1])
        recorded_part = slice(their_starts[other], their_starts[other + 1])
        assert ours.stop - ours.start == scheduled[req_id]
        assert inputs.input_ids[ours].tolist() == recorded["input_ids"][recorded_part]
        assert inputs.positions[ours].tolist() == recorded["positions"][recorded_part]
        assert inputs.slot_mapping[0, ours].tolist() == recorded["slot_mapping"][0][recorded_part]
        assert inputs.seq_lens[index] == recorded["seq_lens"][other]
        assert bool(inputs.discard[index]) == recorded["discard_request_mask"][other]
        for place, row in enumerate(range(first_rows[other], first_rows[other + 1])):
            own = index * places + place
            from_end = recorded["logits_indices"][row] - recorded_part.stop
            assert int(inputs.logits_indices[own]) - ours.stop == from_end
            if logits is not None:
                tolerance = 2e-5 * float(logits[row].abs().max())
                torch.testing.assert_close(executed.logits[own], logits[row], rtol=0, atol=tolerance)  # type: ignore[index]


def compare_output(batch: InputBatch, output: StepOutput, step: Json) -> None:
    """Kept tokens, log-probabilities, and the device's word on who is done."""
    recorded = step["model_runner_output"]
    assert len(recorded["req_ids"]) == len(batch.req_ids)
    finished = {out["req_id"] for out in step["engine_outputs"] if out["finish_reason"] in ("stop", "length")}
    for index, req_id in enumerate(batch.req_ids):
        other = recorded["req_ids"].index(req_id)
        kept = [token for token in output.sampled_token_ids[index].tolist() if token >= 0]
        goes_on, params = bool(output.active[index]), params_of(batch, req_id)
        assert kept == (recorded["sampled_token_ids"][other] if goes_on else kept_of(step, req_id))
        is_host_stop = len(params.stop_token_ids) >= MAX_STOP_IDS  # the device does not know all of them
        assert goes_on == (req_id not in finished) or (is_host_stop and goes_on)
        assert not output.has_nan[index]
        if recorded["logprobs"] is not None:
            tensors = output.logprobs_tensors
            assert tensors is not None
            width = output.sampled_token_ids.shape[1]
            row = slice(index * width, index * width + (len(kept) if width > 1 else 1))
            theirs = logprobs_of(recorded["logprobs"], other, row.stop - row.start)
            ours = tensors.logprob_token_ids[row], tensors.logprobs[row], tensors.selected_token_ranks[row]
            compare_logprobs(*ours, theirs)
    if recorded["logprobs"] is None:
        assert output.logprobs_tensors is None


def logprobs_of(recorded: Json, index: int, num_tokens: int) -> Json:
    """The recorded rows of a request's first so many tokens."""
    starts = recorded.get("cu_num_generated_tokens")
    first = starts[index] if starts else index
    return {
        key: recorded[key][first : first + num_tokens]
        for key in ("token_ids", "logprobs", "ranks")
        if recorded[key]
    }


def compare_logprobs(ids: Tensor, values: Tensor, ranks: Tensor, recorded: Mapping[str, Any]) -> None:
    """Ids and ranks exactly, values up to rounding; the recorded logits have no ties."""
    assert ids.tolist() == recorded["token_ids"]
    assert ranks.tolist() == recorded["ranks"]
    expected = torch.tensor(recorded["logprobs"], dtype=values.dtype)
    torch.testing.assert_close(values, expected, rtol=0, atol=LOGPROB_TOLERANCE)


def compare_bookkeeping(batch: InputBatch, output: StepOutput, step: Json) -> None:
    """After the step the host knows the recorded outputs, without what upstream keeps behind the end of a request."""
    recorded: Json = step["after_bookkeeping"]["output_token_ids"]
    sampled = step["model_runner_output"]
    assert batch.row_of.keys() == recorded.keys()
    for index, req_id in enumerate(batch.req_ids):
        row, expected = batch.row_of[req_id], recorded[req_id]
        if not output.active[index]:
            theirs = sampled["sampled_token_ids"][sampled["req_ids"].index(req_id)]
            expected = expected[: len(expected) - len(theirs) + len(kept_of(step, req_id))]
        tokens, prompt = batch.rows.tokens[row], int(batch.columns.num_prompt_tokens[row])
        assert tokens.tolist()[prompt:] == expected  # type: ignore[union-attr]
        assert batch.columns.num_tokens[row] == prompt + len(expected)
