"""`Engine`: the only loop. Text or token ids in, results out.

A turn is schedule -> update_states -> plan_step -> run -> settle -> update; then tokens become text. What the engine
knows between turns is one immutable record, replaced as a whole: a turn that fails leaves the old one, and a turn
that fails while the buffers are written has every running request computed again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import attrs
import torch

from purestep.kernels.donating import donating
from purestep.kernels.types import Kernels
from purestep.pure.errors import (
    DuplicateRequestError,
    InvalidRequestError,
)
from purestep.pure.plan import plan_step
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.queue import Finished, Queue
from purestep.pure.records.sampling_params import SamplingParams, validate
from purestep.pure.records.scheduler_output import SchedulerOutput
from purestep.pure.scheduler import (
    abort,
    add,
    finish,
    make_queue,
    num_free,
    preempt_all,
    schedule,
    set_version,
    update,
)
from purestep.pure.settle import settle
from purestep.pure.update import update_states
from purestep.state.lease import Leased
from purestep.state.loading.chat import render_chat
from purestep.state.progress import progress as progress_bar
from purestep.state.results import RequestOutput
from purestep.state.run import run
from purestep.state.setup import Sizes, Source, bind, limits_of, resolve, scheduler_config
from purestep.state.submission import Prompt, Submission, listed, one_each, refused_output
from purestep.state.weights import check_alike

UNSEEDED = 1 << 32  # streams of requests without a seed lie above those that a caller can name by position


@attrs.frozen
class Now:
    """What is known between two turns."""

    queue: Queue
    batch: InputBatch
    leased: Leased


class Engine:
    """Generates text with a model; a context manager that gives its memory back.

    `model` is a folder, a GGUF file, a hub id, a LoadedModel, (Model, Params), or None for SmolLM2. Further keywords
    are the fields of `Sizes`. `seed` is that of requests that bring none.
    """

    def __init__(
        self,
        model: Source = None,
        *,
        tokenizer: Any = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        kernels: Kernels = donating,
        **sizes: Any,
    ) -> None:
        wanted = Sizes(**sizes)
        self._loaded = resolve(model, dtype=dtype, device=torch.device(device), tokenizer=tokenizer)
        self.limits = limits_of(self._loaded, wanted, dtype=dtype, seed=seed)
        self._bound = bind(
            self._loaded, self.limits, dtype=dtype, device=torch.device(device), kernels=kernels
        )
        self._now = Now(
            queue=make_queue(scheduler_config(self.limits, wanted)),
            batch=InputBatch.make_empty(self.limits),
            leased=self._bound.buffers.lease(),
        )
        self._submissions: dict[str, Submission] = {}
        self._samples: dict[str, tuple[Submission, int]] = {}
        self._undelivered: dict[str, RequestOutput] = {}
        self._num_submitted = 0
        self._num_calls = 0
        self._num_unseeded = 0

    # Online use

    def add_request(
        self,
        req_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: int | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        """Queue a prompt. Smaller priorities run first; `stream` names its randomness (default: how many came before).

        Raises:
            InvalidRequestError: and its kinds, for a request that can not be served; nothing has changed then.
        """
        params = self.default_params() if sampling_params is None else sampling_params
        validate(params, self.limits.vocab_size, self.limits.max_model_len)
        if req_id in self._submissions:
            raise DuplicateRequestError(
                f"request id {req_id!r} is in use: wait for it, abort it, or use another id"
            )
        new = Submission(
            req_id, prompt, params, self._loaded.tokenizer, add_special_tokens=add_special_tokens
        )
        base = self._stream(params, self._num_submitted if stream is None else stream)
        requests = new.requests(
            arrival=self._num_submitted, stream=base, priority=priority, eos=self.limits.eos_token_ids
        )
        queue = self._now.queue
        for request in requests:
            queue = add(queue, request, vocab_size=self.limits.vocab_size)
        self._now = attrs.evolve(self._now, queue=queue)
        self._submissions[req_id] = new
        self._samples |= {sample_id: (new, i) for i, sample_id in enumerate(new.sample_ids)}
        self._num_submitted += params.n

    def has_unfinished(self) -> bool:
        """Whether any request runs or waits, or has a result that `step` has yet to give."""
        return bool(self._submissions or self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Run one turn; the requests that got tokens or ended in it, each with all that it has so far."""
        delivered = list(self._undelivered.values())
        self._undelivered = {}
        return delivered + self._turn()

    def abort(self, req_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Stop requests; what they have so far. Ids that are not in use are ignored: they may just have ended."""
        names = [req_ids] if isinstance(req_ids, str) else list(req_ids)
        found = [self._submissions[name] for name in names if name in self._submissions]
        samples = [sample for new in found for sample in new.sample_ids if sample in self._samples]
        self._now = attrs.evolve(self._now, queue=abort(self._now.queue, samples))
        for sample in samples:
            self._end(sample, "abort", None)
        return [new.output() for new in found]

    # Offline use

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        on_error: Literal["raise", "return"] = "raise",
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Results in the order of `prompts`: text or token ids, one or many, with one or many sampling parameters.

        A prompt that can not be served raises before anything runs, or, with on_error="return", comes back with its
        error while the others are served. Ctrl-C aborts these prompts and leaves the engine usable.
        """
        results: dict[str, RequestOutput] = {}
        with self._submitted(prompts, sampling_params, on_error, add_special_tokens) as (names, refused):
            results |= refused
            with progress_bar(len(names), shown=progress) as report:
                while len(results) < len(names):
                    outputs = self._turn()
                    results |= {o.req_id: o for o in self._own(outputs, names) if o.finished}
                    report(finished=len(results), tokens=len(outputs))
        return [results[name] for name in names]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Iterator[RequestOutput]:
        """Results as they grow, each with everything so far. Leaving the loop early aborts what still runs."""
        with self._submitted(prompts, sampling_params, "raise", add_special_tokens) as (names, _):
            while any(name in self._submissions for name in names):
                yield from self._own(self._turn(), names)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answers to one or many conversations, by the model's chat template; `variables` go to the template.

        Raises:
            InvalidRequestError: the model has no chat template, or it can not take these messages.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.chat_prompt(conversation, **variables) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, progress=progress, add_special_tokens=False)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt that the model's chat template makes of a conversation."""
        template = self._loaded.chat_template
        if template is None:
            raise InvalidRequestError(f"{self._loaded.name} has no chat template: use generate with a prompt")
        return render_chat(template, messages, **(self._loaded.special_tokens | variables))

    @property
    def is_chat_model(self) -> bool:
        """Whether the model has a chat template."""
        return self._loaded.chat_template is not None

    def default_params(self, **changes: Any) -> SamplingParams:
        """The sampling parameters that the model's makers recommend, with changes."""
        return SamplingParams(**(self._loaded.generation_defaults | changes))

    # Weights and memory

    @property
    def params(self) -> Params:
        """The parameters in use."""
        return self._bound.params

    def update_weights(self, params: Params | Any, *, keep_kv: bool = False) -> None:
        """Use other parameters from the next step on; a tree of tensors like the present one, or Params.

        Keys and values of the old ones are computed anew, of running requests too, and never shared with new
        requests. With `keep_kv` they are kept and shared, at the caller's own risk. Call it also after changing
        parameters in place, as a trainer does: the cache can not know.

        Raises:
            InvalidParameterError: another structure, shape or dtype; nothing has changed then.
        """
        tree = params.tree if isinstance(params, Params) else params
        check_alike(self.params.tree, tree)
        version = self.params.version + 1
        queue = set_version(self._now.queue, version, keep_kv=keep_kv)
        self._bound = attrs.evolve(self._bound, params=Params(tree, version))
        self._now = attrs.evolve(self._now, queue=queue)

    def close(self) -> None:
        """Give the memory back. What was submitted is dropped, and every other method fails from here on."""
        self._bound.buffers.close()
        self._submissions, self._samples, self._undelivered = {}, {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        queue = self._now.queue
        return (
            f"Engine({self._loaded.name}, {len(queue.running)} running, {len(queue.waiting)} waiting, "
            f"{self.num_free_blocks} of {self.limits.num_blocks[0] - 1} blocks free)"
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the first KV group that no request holds; cached prefixes count as free."""
        return num_free(self._now.queue)

    # The loop

    def _turn(self) -> list[RequestOutput]:
        """One step of everything that is scheduled."""
        before = self._now
        queue, scheduled = schedule(before.queue)
        batch = update_states(before.batch, scheduled)
        if not scheduled.req_ids:
            self._now = Now(queue, batch, before.leased)
            return []
        plan = plan_step(batch, before.leased.absorbed)
        try:
            leased, pending = run(self._bound, before.leased, plan)
            output = pending.result()
        except BaseException:
            self._recover()
            raise
        queue, finished = update(queue, scheduled.req_ids, output)
        self._now = Now(queue, settle(batch, pending.batch, output), leased)
        return self._publish(scheduled, output, finished)

    def _recover(self) -> None:
        """After a step that failed half-way: the buffers start empty, and every running request is computed again."""
        buffers = self._bound.buffers
        self._now = Now(preempt_all(self._now.queue), self._now.batch, buffers.lease())

    def _publish(
        self, scheduled: SchedulerOutput, output: StepOutput, finished: Sequence[Finished]
    ) -> list[RequestOutput]:
        """The step's tokens, in the transcripts; stop strings end their requests."""
        for new in scheduled.scheduled_new_reqs:
            submission, index = self._samples[new.req_id]
            if index == 0:
                submission.num_cached_tokens = new.num_computed_tokens
        ended = {f.req_id: f for f in finished}
        touched: dict[str, Submission] = {}
        for row, (sample, token) in enumerate(
            zip(scheduled.req_ids, output.sampled_token_ids[:, 0].tolist(), strict=True)
        ):
            if token < 0 and sample not in ended:
                continue
            submission, index = self._samples[sample]
            touched[submission.req_id] = submission
            end = ended.get(sample)
            stop = None
            if token >= 0:
                is_stop = end is not None and end.reason == "stop"
                stop = submission.transcripts[index].push(token, output.logprobs_tensors, row, is_stop)
            if stop is not None:
                self._now = attrs.evolve(self._now, queue=finish(self._now.queue, sample, "stop", stop))
                self._end(sample, "stop", stop)
            elif end is not None:
                self._end(sample, end.reason, end.stop_reason)
        return [submission.output() for submission in touched.values()]

    def _end(self, sample: str, reason: str, stop_reason: int | str | None) -> None:
        submission, index = self._samples.pop(sample)
        submission.transcripts[index].finish(reason, stop_reason)
        if not any(s in self._samples for s in submission.sample_ids):
            del self._submissions[submission.req_id]

    # Calls that own their requests

    @contextmanager
    def _submitted(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        on_error: str,
        add_special_tokens: bool,
    ) -> Iterator[tuple[list[str], dict[str, RequestOutput]]]:
        """The ids of these prompts, and results of those refused. Whatever ends the block, none of them runs on."""
        all_prompts = listed(prompts)
        params = one_each(sampling_params, len(all_prompts))
        names = [f"call{self._num_calls}-{i}" for i in range(len(all_prompts))]
        self._num_calls += 1
        refused: dict[str, RequestOutput] = {}
        stream = 0
        try:
            for i, (name, prompt, own) in enumerate(zip(names, all_prompts, params, strict=True)):
                try:
                    self.add_request(name, prompt, own, stream=stream, add_special_tokens=add_special_tokens)
                except InvalidRequestError as error:
                    if on_error == "raise":
                        error.add_note(f"This is prompt {i} of {len(all_prompts)}; none of them was run.")
                        raise
                    refused[name] = refused_output(name, prompt, error)
                stream += 1 if own is None else own.n
            yield names, refused
        finally:
            self.abort(names)

    def _own(self, outputs: Iterable[RequestOutput], names: Iterable[str]) -> list[RequestOutput]:
        """Those of a call's own requests; others are kept for the next `step`."""
        own = []
        wanted = set(names)
        for output in outputs:
            if output.req_id in wanted:
                own.append(output)
            else:
                self._undelivered[output.req_id] = output
        return own

    def _stream(self, params: SamplingParams, place: int) -> int:
        """A request's random stream: the one it asks for, its place, or, without a seed, one never used before."""
        if params.stream is not None:
            return params.stream
        if params.seed is not None:
            return place
        self._num_unseeded += params.n
        return UNSEEDED + self._num_unseeded - params.n
