"""A scheduler as upstream's seen from the runner: its objects, its order of events, tokens that are on their way.

The objects are look-alikes: attributes, lists and dicts as upstream has them, nothing of ours.
"""

from collections import deque
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import attrs

from purestep.pure.records.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.runner import GPUModelRunner


@attrs.define(eq=False)
class Client:
    """A request, as the scheduler knows it."""

    req_id: str
    prompt: list[int]
    params: SamplingParams
    outputs: list[int] = attrs.field(factory=list)
    blocks: list[int] = attrs.field(factory=list)
    computed: int = 0  # scheduled, whether known or not
    on_the_way: int = 0  # outputs
    status: str = "new"  # new, running, preempted, finished
    drafts: list[int] = attrs.field(factory=list)  # for its next step

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs) + self.on_the_way


class Upstream:
    """First come, first served, in chunks; requests are preempted as `rng` has it.

    With `num_device_drafts` every request that says its next token is given so many places for drafts of the device.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_model_len: int,
        rng: Random | None = None,
        num_device_drafts: int = 0,
        num_drafts: int = 0,
    ) -> None:
        self.free = list(range(num_blocks - 1, 0, -1))
        self.block_size, self.budget, self.max_model_len = block_size, budget, max_model_len
        self.rng, self.num_device_drafts, self.num_drafts = rng, num_device_drafts, num_drafts
        self.clients: dict[str, Client] = {}
        self.finished: set[str] = set()
        self.last_scheduled: set[str] = set()

    def add(self, req_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.clients[req_id] = Client(req_id, list(prompt), params)

    def go_on(self, req_id: str, more: Sequence[int]) -> None:
        """A streaming request gets more input: its outputs become a part of its prompt."""
        client = self.clients[req_id]
        assert client.status == "finished" and req_id in self.finished
        self.finished.remove(req_id)
        client.prompt += [*client.outputs, *more]
        client.outputs, client.status = [], "new"

    def end(self, client: Client) -> None:
        client.status = "finished"
        self.finished.add(client.req_id)

    @property
    def has_work(self) -> bool:
        return bool(self.finished) or any(c.status != "finished" for c in self.clients.values())

    def schedule(self) -> Any:
        """The next step; upstream's `SchedulerOutput`."""
        counts: dict[str, int] = {}
        new, running, resumed, blocks_of = [], [], [], {}
        drafts: dict[str, list[int]] = {}
        preempted = set[str]()
        gone, self.finished = self.finished, set()
        for req_id in gone:
            self._free(self.clients[req_id])
        budget = self.budget
        for client in self.clients.values():
            if client.status == "running" and self.rng is not None and self.rng.random() < 0.1:
                self._free(client)
                client.status, client.computed, client.drafts = "preempted", 0, []
                preempted.add(client.req_id)
                continue
            count = min(client.num_tokens - client.computed, budget)
            is_unknown = client.status == "preempted" and client.on_the_way > 0
            is_full = client.num_tokens >= self._limit(client)
            if client.status == "finished" or is_unknown or is_full or count < 1:
                continue
            own = self._drafts_for(client, count, budget)
            drafts |= {client.req_id: own} if own else {}
            count += len(own)
            budget -= count
            first, blocks_of[client.req_id] = client.status != "running", self._grow(client, count)
            if first:
                blocks_of[client.req_id] = (list(client.blocks),)
            {"new": new, "running": running, "preempted": resumed}[client.status].append(client)
            counts[client.req_id] = count
        output = self._output(new, running, resumed, counts, blocks_of, gone)
        output.scheduled_spec_decode_tokens, output.preempted_req_ids = drafts, preempted
        output.num_spec_tokens_to_schedule = self.num_drafts
        for client in (*new, *running, *resumed):
            client.status = "running"
            client.computed += counts[client.req_id]
            samples = client.computed == client.num_tokens + len(drafts.get(client.req_id, ()))
            client.on_the_way += samples * (1 + len(drafts.get(client.req_id, ())))
        self.last_scheduled = set(counts)
        return output

    def update(self, output: Any, result: ModelRunnerOutput) -> None:
        """What a step brought. Tokens of requests that have ended are dropped."""
        for req_id in output.num_scheduled_tokens:
            client = self.clients[req_id]
            tokens = result.sampled_token_ids[result.req_id_to_index[req_id]]
            assert isinstance(tokens, list), "upstream cuts these lists"
            if tokens and client.status != "finished":
                rejected = 1 + len(output.scheduled_spec_decode_tokens.get(req_id, ())) - len(tokens)
                client.on_the_way -= rejected
                client.computed -= rejected if client.status == "running" else 0
            for token in tokens:
                if client.status == "finished":
                    break
                client.on_the_way -= 1
                client.outputs.append(token)
                at_limit = len(client.prompt) + len(client.outputs) >= self._limit(client)
                if at_limit or token in client.params.stop_token_ids:
                    self.end(client)

    def take(self, drafts: DraftTokenIds | None) -> None:
        """Drafts for the next steps."""
        for req_id, own in zip(drafts.req_ids, drafts.draft_token_ids, strict=True) if drafts else ():
            self.clients[req_id].drafts = list(own)

    def _drafts_for(self, client: Client, count: int, budget: int) -> list[int]:
        """Those that follow the tokens of this step, within budget and length; -1 stands for one of the device."""
        own, client.drafts = client.drafts, []
        if self.num_device_drafts and client.outputs + [0] * client.on_the_way:
            own = [-1] * self.num_device_drafts
        gets_there = client.computed + count == client.num_tokens
        most = min(budget - count, self._limit(client) - client.num_tokens - 1) if gets_there else 0
        return own[: max(most, 0)]

    def _limit(self, client: Client) -> int:
        most = client.params.max_tokens
        return self.max_model_len if most is None else min(len(client.prompt) + most, self.max_model_len)

    def _grow(self, client: Client, count: int) -> tuple[list[int]] | None:
        wanted = -(-(client.computed + count) // self.block_size) - len(client.blocks)
        more = [self.free.pop() for _ in range(wanted)]
        client.blocks += more
        return (more,) if more else None

    def _free(self, client: Client) -> None:
        self.free += client.blocks
        client.blocks = []

    def _output(
        self,
        new: list[Client],
        running: list[Client],
        resumed: list[Client],
        counts: dict[str, int],
        blocks_of: dict[str, Any],
        gone: set[str],
    ) -> Any:
        cached = running + resumed
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=c.req_id,
                    prompt_token_ids=list(c.prompt),
                    mm_features=[],
                    sampling_params=as_upstream(c.params),
                    pooling_params=None,
                    block_ids=blocks_of[c.req_id],
                    num_computed_tokens=c.computed,
                    lora_request=None,
                )
                for c in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[c.req_id for c in cached],
                resumed_req_ids={c.req_id for c in resumed},
                new_token_ids=[],
                all_token_ids={
                    c.req_id: c.prompt + c.outputs for c in cached if c.req_id not in self.last_scheduled
                },
                new_block_ids=[blocks_of[c.req_id] for c in cached],
                num_computed_tokens=[c.computed for c in cached],
                num_output_tokens=[len(c.outputs) + c.on_the_way for c in cached],
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            finished_req_ids=gone,
            free_encoder_mm_hashes=[],
            preempted_req_ids=None,
            kv_connector_metadata=None,
        )


def as_upstream(params: SamplingParams) -> Any:
    """Sampling parameters as an object of upstream's, with what it derives."""
    names = [f.name for f in attrs.fields(SamplingParams) if f.name not in ("stream", "logprobs_mode")]
    given = {name: getattr(params, name) for name in names} | {"logit_bias": dict(params.logit_bias) or None}
    return SimpleNamespace(**given, all_stop_token_ids=set(params.stop_token_ids))


def serve(runner: GPUModelRunner, upstream: Upstream, *, steps_ahead: int = 0) -> list[ModelRunnerOutput]:
    """Run everything to its end, at most so many steps before the outcome of the oldest is asked for."""
    begun: deque[tuple[Any, Any]] = deque()
    results = []
    while upstream.has_work or begun:
        output = upstream.schedule()
        answer: Any = runner.execute_model(output)
        if output.total_num_scheduled_tokens:
            assert answer is None
            begun.append((output, runner.sample_tokens()))
        else:
            assert answer is EMPTY_MODEL_RUNNER_OUTPUT
        if begun and (len(begun) > steps_ahead or not output.total_num_scheduled_tokens):
            output, answer = begun.popleft()
            results.append(answer if isinstance(answer, ModelRunnerOutput) else answer.get_output())
            upstream.update(output, results[-1])
            if upstream.num_drafts and not upstream.num_device_drafts:
                upstream.take(runner.take_draft_token_ids())
    return results
