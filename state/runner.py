"""`GPUModelRunner`: a step in two calls, with upstream's names. It holds one record, and delegates.

A call replaces the record once, when its work is done: bad input leaves the old one. If a step fails while the buffers
are written, it is as if it had not been begun: below a request's computed length it has written nothing, and the rest
the next plan brings from what the host knows. Send the same step again.
Source: vllm/v1/worker/gpu_model_runner.py.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import attrs

from purestep.pure.errors import InvalidParameterError, PurestepError, SchedulerOutputError, StaleStateError
from purestep.pure.grammar import GrammarMask, grammar_mask
from purestep.pure.interop import grammar_output_from_vllm, scheduler_output_from_vllm
from purestep.pure.models.stages import handed_over
from purestep.pure.plan import plan_step
from purestep.pure.prompt_logprobs import PromptChunk, prompt_chunks
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.dispatch import DispatchKeys
from purestep.pure.records.drafter import HostDrafter
from purestep.pure.records.inputs import IntermediateTensors
from purestep.pure.records.outputs import (
    DraftTokenIds,
    KVConnectorOutput,
    ModelRunnerOutput,
    with_kv_conn_output_only,
)
from purestep.pure.records.scheduler_output import GrammarOutput, SchedulerOutput
from purestep.pure.records.state import ExecuteModelState
from purestep.pure.rows import occupied
from purestep.pure.update import update_states
from purestep.state.async_output import AsyncModelRunnerOutput, ScoredChunk
from purestep.state.drafting import proposed
from purestep.state.guarded import guarded
from purestep.state.lease import Leased
from purestep.state.pending import to_host
from purestep.state.run import BoundStep
from purestep.state.seams import KVConnector, RoutedExperts
from purestep.state.stages import checked, hear, told_tokens
from purestep.state.two_phase import Executed, dispatched, execute, prompt_logprobs, sample, take_in

NO_PROMPTS: Mapping[str, tuple[ScoredChunk, ...]] = MappingProxyType({})


@attrs.frozen
class Begun:
    """A step that was executed and is to be sampled."""

    scheduled: SchedulerOutput
    before: InputBatch  # without the step
    executed: Executed
    chunks: tuple[PromptChunk, ...]  # what it can tell of prompts
    report: KVConnectorOutput | None


@attrs.frozen
class Now:
    """What is known between two calls."""

    batch: InputBatch
    leased: Leased
    begun: Begun | None = None
    unsettled: tuple[
        AsyncModelRunnerOutput, ...
    ] = ()  # of steps whose outcome the batch does not hold, oldest first
    prompts: Mapping[str, tuple[ScoredChunk, ...]] = (
        NO_PROMPTS  # of requests that wait for prompt log-probabilities
    )
    drafts: DraftTokenIds | None = None
    kept: Any = None  # what a drafter on the host keeps


class GPUModelRunner:
    """Runs a scheduler's steps on a bound step's buffers: `execute_model`, then `sample_tokens`, for each.

    With `async_scheduling`, `sample_tokens` gives an object whose `get_output` waits for the step, and the next step
    may be run before that is called (more than one only while every request runs in each of them). What `get_output`
    has told is what the next step is taken to know.
    Prompt log-probabilities of tokens that were found in the prefix cache are absent: see `prompt_table`.

    Drafts come with the scheduler's output, up to `num_drafts` of the buffers' limits for a request; -1 stands for one
    that a drafter of the bound step has left on the device. `drafter` is one on the host.

    A model that is `split` has a runner for each of its stages. All are given the same steps: the first one tokens, the
    others what `execute_model` of the one before gave; and all but the last one what `sample_tokens` of that gave.

    Raises:
        InvalidParameterError: a drafter on the host together with `async_scheduling` (it drafts from tokens that are
            known) or with one on the device; a pipeline stage with graphs or a drafter, but for one on the host and the
            last stage.
    """

    def __init__(
        self,
        bound: BoundStep,
        *,
        dispatch_keys: DispatchKeys | None = None,
        async_scheduling: bool = False,
        kv_connector: KVConnector | None = None,
        routed_experts: RoutedExperts | None = None,
        drafter: HostDrafter | None = None,
        is_first_stage: bool = True,
        is_last_stage: bool = True,
    ) -> None:
        if drafter is not None and (async_scheduling or bound.drafter is not None):
            raise InvalidParameterError(
                "a drafter on the host with async_scheduling or one on the device: it would draft from tokens that are "
                "still on their way, or in vain; leave one out"
            )
        is_whole, early = is_first_stage and is_last_stage, drafter if not is_last_stage else None
        if not is_whole and (dispatch_keys or bound.drafter or early):
            raise InvalidParameterError(
                "a pipeline stage with dispatch_keys, a drafter on the device, or one on the host before the last "
                "stage: it runs eagerly, and drafts come to all stages with the scheduler's output; leave them out"
            )
        self._bound = bound
        self._is_first, self._is_last = is_first_stage, is_last_stage
        self._dispatch_keys = dispatch_keys
        self._is_async = async_scheduling
        self._connector = kv_connector
        self._experts = routed_experts
        self._drafter = drafter
        kept = None if drafter is None else drafter.init()
        self._now = Now(InputBatch.make_empty(bound.buffers.limits), bound.buffers.lease(), kept=kept)

    @property
    def input_batch(self) -> InputBatch:
        """Every request that is known, as of the last call."""
        return self._now.batch

    @property
    def execute_model_state(self) -> ExecuteModelState | None:
        """What lies between the two calls, None if no step does. It is good until the next call."""
        begun = self._now.begun
        return None if begun is None else begun.executed.value

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: IntermediateTensors | None = None
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """Run a step up to its logits. `scheduler_output` is ours, or upstream's, or anything with its attributes.

        Returns None if `sample_tokens` is to be called, and an output if there is nothing to sample: requests that
        finished are dropped and blocks are zeroed then too. A stage before the last gives what the next one takes in.

        Raises:
            StaleStateError: the last step was not sampled; nothing has changed.
            SchedulerOutputError, InvalidParameterError: as `update_states`; nothing has changed, send a right one.
        Source: vllm/v1/worker/gpu_model_runner.py execute_model.
        """
        now = _told(self._now)
        if now.begun is not None:
            raise StaleStateError(
                "State error: sample_tokens() must be called after execute_model() returns None. The step of "
                f"{len(now.begun.scheduled.req_ids)} requests is executed and not sampled: {now.begun.executed!r}"
            )
        output = _as_record(scheduler_output, now.batch)
        num_tokens = output.total_num_scheduled_tokens
        taken = None
        if num_tokens:
            taken = checked(intermediate_tensors, is_first=self._is_first, num_tokens=num_tokens)
        if self._experts is not None:
            self._experts.clear()
        if self._connector is not None:
            self._connector.handle_preemptions(output)
        batch = update_states(now.batch, output)
        if not output.req_ids:
            return self._execute_nothing(now, batch, output)
        prompts = _waiting(now, output) if self._is_last else NO_PROMPTS
        padded, key = dispatched(self._bound, self._dispatch_keys, batch, now.leased.absorbed)
        plan = plan_step(padded, now.leased.absorbed)
        chunks = prompt_chunks(batch, prompts) if prompts else ()
        with self._undone_if_it_fails(now, now.batch):
            executed, report = self._connected(
                output, lambda: execute(self._bound, now.leased, plan, key=key, intermediate=taken)
            )
            begun = Begun(output, now.batch, executed, chunks, report)
            self._now = Now(batch, now.leased, begun, now.unsettled, prompts, now.drafts, now.kept)
        return None if self._is_last else handed_over(executed.value.hidden_states, num_tokens)

    def sample_tokens(
        self, grammar_output: Any = None, *, sampled: ModelRunnerOutput | None = None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample the step that was executed. `grammar_output` has the masks of requests with structured output.

        A stage before the last is given, as `sampled`, what the last one's call has told, and gives that.

        Raises:
            StaleStateError: no step was executed since the last one was sampled; nothing has changed.
            SchedulerOutputError: masks or an output that do not fit the step; nothing has changed, send right ones.
            ProcessorError: a request's logits processor raised; the step was not begun: send it without the request.
        Source: vllm/v1/worker/gpu_model_runner.py sample_tokens.
        """
        now = self._now
        if now.begun is None:
            raise StaleStateError(
                "State error: execute_model() must return None before sample_tokens() is called. Every step that was "
                "executed is sampled, or failed: execute the next one, or the one that failed again"
            )
        begun, bound = now.begun, self._bound
        if (sampled is None) != self._is_last:
            raise SchedulerOutputError(
                f"sampled={sampled!r}: the last stage samples by itself, and every other one is told what that gave"
            )
        if sampled is not None:
            return self._heard(now, begun, sampled)
        mask = _mask(grammar_output, begun)
        inputs = begun.executed.value.inputs
        scores = map(to_host, prompt_logprobs(bound, begun.executed, begun.chunks))
        chunks = tuple(map(ScoredChunk, begun.chunks, scores))
        with self._undone_if_it_fails(now, begun.before):
            failed = dict[int, PurestepError]()
            extras = guarded(begun.executed.batch, failed)
            leased, pending = sample(bound, begun.executed, grammar=mask, extras=extras)
            if failed:
                raise next(iter(failed.values()))
            prompts, complete = _with_chunks(now.prompts, chunks)
            experts = None
            if self._experts is not None:
                experts = self._experts.take(inputs, begun.scheduled.total_num_scheduled_tokens)
            answer = AsyncModelRunnerOutput(pending, complete, begun.report, experts)
            after = Now(now.batch, leased, None, (*now.unsettled, answer), prompts, kept=now.kept)
            if not self._is_async:
                answer.get_output()
                after = self._drafted(_told(after), begun.scheduled, answer)
            if self._connector is not None and self._drafts:
                self._connector.wait_for_save()
                self._connector.end()
            self._now = after
        return answer if self._is_async else answer.get_output()

    def _heard(self, now: Now, begun: Begun, sampled: ModelRunnerOutput) -> ModelRunnerOutput:
        """The step of a stage that does not sample, with the last one's tokens."""
        told = told_tokens(begun.executed.batch, sampled)
        with self._undone_if_it_fails(now, begun.before):
            leased, pending = hear(self._bound, begun.executed, told)
            answer = AsyncModelRunnerOutput(pending, (), begun.report, None)
            answer.get_output()
            self._now = _told(Now(now.batch, leased, None, (*now.unsettled, answer)))
        return sampled

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts made after the step that was sampled last; None without a drafter.

        With `async_scheduling` None too: they stay on the device, and the next step has -1 in their places.
        """
        return self._now.drafts

    @property
    def _drafts(self) -> bool:
        """Whether there is a drafter."""
        return self._drafter is not None or self._bound.drafter is not None

    def _drafted(self, now: Now, output: SchedulerOutput, answer: AsyncModelRunnerOutput) -> Now:
        """With drafts for the next step: as many as the scheduler wants, for requests that got a token."""
        if self._drafter is None:
            return attrs.evolve(now, drafts=answer.draft_token_ids())
        result, batch, most = answer.get_output(), now.batch, output.num_spec_tokens_to_schedule
        names = [r for r, own in zip(result.req_ids, result.sampled_token_ids, strict=True) if own]
        kept, found = proposed(self._drafter, now.kept, batch, names, [_limit(batch, r) for r in names])
        own = dict(zip(found.req_ids, found.draft_token_ids, strict=True))
        drafts = DraftTokenIds(result.req_ids, tuple([own.get(r, ())[:most] for r in result.req_ids]))
        return attrs.evolve(now, drafts=drafts, kept=kept)

    def _execute_nothing(self, now: Now, batch: InputBatch, output: SchedulerOutput) -> ModelRunnerOutput:
        """A step without tokens: what it says of requests and blocks holds all the same."""
        leased, report = now.leased, None
        with self._undone_if_it_fails(now, now.batch):
            if self._connector is not None:
                self._connector.begin(output)
            if any(output.new_block_ids_to_zero) or any(output.block_copies):
                leased = take_in(self._bound, leased, plan_step(batch, leased.absorbed))
            if self._connector is not None:
                report = self._connector.collect(output)
                self._connector.end()
            self._now = attrs.evolve(now, batch=batch, leased=leased, prompts=_waiting(now, output))
        return with_kv_conn_output_only(report)

    def _connected(
        self, output: SchedulerOutput, forward: Callable[[], Executed]
    ) -> tuple[Executed, KVConnectorOutput | None]:
        """The forward pass between the connector's calls. A drafter still writes keys and values: it ends later."""
        connector, is_last = self._connector, not self._drafts
        if connector is None:
            return forward(), None
        connector.begin(output)
        executed = forward()
        if is_last:
            connector.wait_for_save()
        report = connector.collect(output)
        if is_last:
            connector.end()
        return executed, report

    @contextmanager
    def _undone_if_it_fails(self, now: Now, before: InputBatch) -> Iterator[None]:
        """Whatever interrupts a step while buffers are written: it is as if it had not been begun.

        `before` is the batch without it; the outcome of steps begun earlier is waited for. A lease that is no longer
        ours is not taken back: whoever has the buffers now may have written anything.
        """
        try:
            yield
        except StaleStateError:
            raise
        except BaseException:
            if self._connector is not None:
                self._connector.end()
            for answer in now.unsettled:
                before = answer.settled(before)
            lease = self._bound.buffers.lease()
            self._now = Now(before, lease, prompts=now.prompts, drafts=now.drafts, kept=now.kept)
            raise


def _limit(batch: InputBatch, req_id: str) -> int:
    """Tokens at which a request stops, as far as its length goes."""
    request, longest = occupied(batch.rows.requests[batch.row_of[req_id]]), batch.limits.max_model_len
    most = request.sampling_params.max_tokens
    return longest if most is None else min(request.num_prompt_tokens + most, longest)


def _told(now: Now) -> Now:
    """With the outcome of every step that the caller knows of, up to the first one that it does not."""
    batch, unsettled = now.batch, now.unsettled
    while unsettled and unsettled[0].is_told:
        batch, unsettled = unsettled[0].settled(batch), unsettled[1:]
    return now if unsettled is now.unsettled else attrs.evolve(now, batch=batch, unsettled=unsettled)


def _as_record(scheduler_output: Any, batch: InputBatch) -> SchedulerOutput:
    if isinstance(scheduler_output, SchedulerOutput):
        return scheduler_output
    return scheduler_output_from_vllm(scheduler_output, known=batch.row_of.keys() | batch.parked.keys())


def _mask(grammar_output: Any, begun: Begun) -> GrammarMask | None:
    """The masks by row of logits, None where there are none."""
    is_record = isinstance(grammar_output, GrammarOutput)
    grammar = grammar_output if is_record else grammar_output_from_vllm(grammar_output)
    if grammar is None:
        return None
    batch = begun.executed.batch
    return grammar_mask(
        grammar,
        batch.req_ids,
        begun.scheduled.scheduled_spec_decode_tokens,
        num_rows=batch.layout.bounds.num_reqs * (1 + batch.layout.bounds.num_drafts),
        vocab_size=batch.limits.vocab_size,
        num_drafts=batch.layout.bounds.num_drafts,
    )


def _waiting(now: Now, output: SchedulerOutput) -> Mapping[str, tuple[ScoredChunk, ...]]:
    """Who waits for prompt log-probabilities: also those who come now, and none who finished.

    A known request that goes on with a longer prompt has had them, or still waits: it is not asked again.
    """
    finished, batch = output.finished_req_ids, now.batch
    left = {req_id: chunks for req_id, chunks in now.prompts.items() if req_id not in finished}
    for new in output.scheduled_new_reqs:
        wants = new.sampling_params is not None and new.sampling_params.prompt_logprobs is not None
        goes_on = new.req_id not in finished and (new.req_id in batch.row_of or new.req_id in batch.parked)
        if wants and not goes_on:
            left[new.req_id] = ()
    return MappingProxyType(left)


def _with_chunks(
    prompts: Mapping[str, tuple[ScoredChunk, ...]], chunks: tuple[ScoredChunk, ...]
) -> tuple[Mapping[str, tuple[ScoredChunk, ...]], tuple[tuple[ScoredChunk, ...], ...]]:
    """Who still waits, with the chunks that there are by now, and the chunks of each who has them all."""
    grown = {scored.chunk.req_id: (*prompts[scored.chunk.req_id], scored) for scored in chunks}
    complete = tuple([parts for parts in grown.values() if parts[-1].chunk.is_last])
    done = {parts[-1].chunk.req_id for parts in complete}
    waiting = {**prompts, **grown}
    return MappingProxyType({r: parts for r, parts in waiting.items() if r not in done}), complete
