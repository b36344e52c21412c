"""`Engine`: the only loop. Text or token ids in, results out.

A turn is schedule -> update_states -> plan_step -> run -> settle -> update; then tokens become text. What the engine
knows between turns is one immutable record, replaced as a whole: a turn that fails leaves the old one, and a turn
that fails while the buffers are written has every running request computed again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import torch

from purestep.kernels.types import Kernels
from purestep.pure.errors import (
    DuplicateRequestError,
    InvalidParameterError,
    InvalidRequestError,
)
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams, normalize, validate
from purestep.pure.scheduler import (
    make_queue,
    num_free,
)
from purestep.state.graph_api import CudaGraphs, GraphApi
from purestep.state.loading.chat import render_chat
from purestep.state.progress import progress as progress_bar
from purestep.state.results import RequestOutput
from purestep.state.setup import (
    Sizes,
    Source,
    bind,
    capture,
    dispatch_keys_of,
    limits_of,
    resolve,
    scheduler_config,
    usable_device,
)
from purestep.state.submission import Prompt, Submission, check_request, listed, one_each, refused_output
from purestep.state.turns import Landed, Turns
from purestep.state.weights import check_alike

UNSEEDED = 1 << 32  # streams of requests without a seed lie above those that a caller can name by position
NOBODY: tuple[None, int] = (None, 0)


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
        kernels: Kernels | None = None,
        graph_api: GraphApi | None = None,
        **sizes: Any,
    ) -> None:
        wanted = Sizes(**sizes)
        place = usable_device(device)
        self._loaded = resolve(model, dtype=dtype, device=place, tokenizer=tokenizer)
        self.limits = limits_of(self._loaded, wanted, dtype=dtype, seed=seed)
        if graph_api is None and place.type == "cuda" and wanted.cudagraph_mode:
            graph_api = CudaGraphs(place)
        keys = dispatch_keys_of(self._loaded.model, self.limits, wanted)
        default_steps_ahead = 1 if place.type == "cuda" else 0
        steps_ahead = default_steps_ahead if wanted.steps_ahead is None else wanted.steps_ahead
        queue = make_queue(scheduler_config(self.limits, wanted, steps_ahead=steps_ahead))
        bound = bind(
            self._loaded, self.limits, dtype=dtype, device=place, kernels=kernels, graph_api=graph_api
        )
        self.capture_report = capture(bound, keys, progress=wanted.capture_progress)
        self._turns = Turns(bound, self.limits, queue, keys, steps_ahead)
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
        self._turns.bound.buffers.check_open()
        params = self.default_params() if sampling_params is None else sampling_params
        check_request(req_id, params, priority, stream)
        limits = self.limits
        validate(params, limits.vocab_size, limits.max_model_len, eos_token_ids=limits.eos_token_ids)
        if params.prompt_logprobs is not None:
            raise InvalidParameterError(
                f"prompt_logprobs={params.prompt_logprobs}: the engine gives log-probabilities of sampled tokens only; "
                "for those of a prompt, call execute and compute_logits on all of its tokens"
            )
        params = normalize(params)
        if req_id in self._submissions:
            raise DuplicateRequestError(
                f"request id {req_id!r} is in use: wait for it, abort it, or use another id"
            )
        new = Submission(
            req_id,
            prompt,
            params,
            self._loaded.tokenizer,
            number=self._num_submitted,
            add_special_tokens=add_special_tokens,
        )
        base = self._stream(params, stream)
        requests = new.requests(
            arrival=self._num_submitted, stream=base, priority=priority, eos=self.limits.eos_token_ids
        )
        self._turns.add(requests, vocab_size=self.limits.vocab_size)
        self._submissions[req_id] = new
        self._samples |= {sample_id: (new, i) for i, sample_id in enumerate(new.sample_ids)}
        self._num_submitted += params.n

    def has_unfinished(self) -> bool:
        """Whether any request runs or waits, or has a result that `step` has yet to give."""
        return bool(self._submissions or self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Run one turn; the requests that got tokens or ended in it, each with all that it has so far."""
        outputs = [submission.output() for submission in self._turn()]
        delivered = list(self._undelivered.values())
        self._undelivered = {}
        return delivered + outputs

    def abort(self, req_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Stop requests; what they have so far. Ids that are not in use are ignored: they may just have ended."""
        names = [req_ids] if isinstance(req_ids, str) else list(req_ids)
        found = [self._submissions[name] for name in names if name in self._submissions]
        samples = [sample for new in found for sample in new.sample_ids if self._is_live(new, sample)]
        for name in names:
            self._undelivered.pop(name, None)
        self._turns.abort(samples)
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
                own = frozenset(names)
                while len(results) < len(names):
                    results |= self._taken(own)  # steps of other calls may have brought some of them
                    grown = self._own(self._turn(), own) if len(results) < len(names) else []
                    results |= {s.req_id: s.output() for s in grown if s.finished}
                    report(finished=len(results), tokens=len(grown))
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
            own, running = frozenset(names), set(names)
            while running:
                results = list(self._taken(own).values())
                if not results:
                    results = [s.output() for s in self._own(self._turn(), own)]
                running -= {result.req_id for result in results if result.finished}
                yield from results

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
        return self._turns.bound.params

    def update_weights(self, params: Params | Any, *, keep_kv: bool = False) -> None:
        """Use other parameters from the next step on; a tree of tensors like the present one, or Params.

        Keys and values of the old ones are computed anew, of running requests too, and never shared with new
        requests. With `keep_kv` they are kept and shared, at the caller's own risk. Call it also after changing
        parameters in place, as a trainer does: the cache can not know.

        Raises:
            InvalidParameterError: another structure, shape or dtype; nothing has changed then.
        """
        self._turns.bound.buffers.check_open()
        tree = params.tree if isinstance(params, Params) else params
        check_alike(self.params.tree, tree)
        version = self.params.version + 1
        self._turns.use(Params(tree, version), keep_kv=keep_kv)

    def close(self) -> None:
        """Give the memory back. What was submitted is dropped, and every other method fails from here on."""
        bound = self._turns.bound
        if bound.captured is not None:
            bound.captured.clear()
        bound.buffers.close()
        self._submissions, self._samples, self._undelivered = {}, {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        queue = self._turns.now.queue
        return (
            f"Engine({self._loaded.name}, {len(queue.running)} running, {len(queue.waiting)} waiting, "
            f"{self.num_free_blocks} of {self.limits.num_blocks[0] - 1} blocks free)"
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the first KV group that no request holds; cached prefixes count as free."""
        return num_free(self._turns.now.queue)

    def _turn(self) -> list[Submission]:
        """Begin a step of everything that is scheduled; the prompts that got tokens by the step that landed, if any."""
        begun, landed = self._turns.turn(self._num_submitted)
        for new in begun.scheduled_new_reqs if begun is not None else ():
            submission, index = self._samples[new.req_id]
            if index == 0:
                submission.num_cached_tokens = new.num_computed_tokens
        return [] if landed is None else self._publish(landed)

    def _publish(self, landed: Landed) -> list[Submission]:
        """The step's tokens, in the transcripts; stop strings end their requests.

        Tokens of requests that ended since the step began are dropped, also where their id is in use again.
        """
        ended = {f.req_id: f for f in landed.finished}
        touched: dict[str, Submission] = {}
        tokens = landed.output.sampled_token_ids[:, 0].tolist()
        for row, (sample, token) in enumerate(zip(landed.scheduled.req_ids, tokens, strict=False)):
            submission, index = self._samples.get(sample, NOBODY)
            if submission is None or submission.number >= landed.age:
                continue
            if token < 0 and sample not in ended:
                continue
            touched[submission.req_id] = submission
            end = ended.get(sample)
            stop = None
            if token >= 0:
                is_stop = end is not None and end.reason == "stop"
                stop = submission.transcripts[index].push(token, landed.output.logprobs_tensors, row, is_stop)
            if stop is not None:
                self._turns.finish(sample, stop)
                self._end(sample, "stop", stop)
            elif end is not None:
                self._end(sample, end.reason, end.stop_reason)
        return list(touched.values())

    def _end(self, sample: str, reason: str, stop_reason: int | str | None) -> None:
        submission, index = self._samples.pop(sample)
        submission.transcripts[index].finish(reason, stop_reason)
        if not any(self._is_live(submission, s) for s in submission.sample_ids):
            del self._submissions[submission.req_id]

    def _is_live(self, submission: Submission, sample: str) -> bool:
        """Whether a sample of this submission still runs or waits; its id alone may be in use by another one."""
        return self._samples.get(sample, NOBODY)[0] is submission

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
        if on_error not in ("raise", "return"):
            raise InvalidParameterError(f"on_error={on_error!r}: it is 'raise' or 'return'")
        names = self._call_names(len(all_prompts))
        refused: dict[str, RequestOutput] = {}
        stream = 0
        try:
            for i, (name, prompt, own) in enumerate(zip(names, all_prompts, params, strict=True)):
                try:
                    place = None if getattr(own, "seed", None) is None else stream
                    self.add_request(name, prompt, own, stream=place, add_special_tokens=add_special_tokens)
                except InvalidRequestError as error:
                    if on_error == "raise":
                        error.add_note(f"This is prompt {i} of {len(all_prompts)}; none of them was run.")
                        raise
                    refused[name] = refused_output(name, prompt, error)
                stream += own.n if isinstance(own, SamplingParams) and type(own.n) is int else 1
            yield names, refused
        finally:
            self.abort(names)

    def _call_names(self, count: int) -> list[str]:
        """Ids for the prompts of a call that nobody uses."""
        while True:
            names = [f"call{self._num_calls}-{i}" for i in range(count)]
            self._num_calls += 1
            if not any(name in self._submissions for name in names):
                return names

    def _taken(self, names: frozenset[str]) -> dict[str, RequestOutput]:
        """Results of these prompts that steps of other calls brought; they are kept no longer."""
        return {name: self._undelivered.pop(name) for name in list(self._undelivered) if name in names}

    def _own(self, grown: Iterable[Submission], names: frozenset[str]) -> list[Submission]:
        """Those of a call's own requests; results of others are kept for the next `step`."""
        for submission in grown:
            if submission.req_id not in names:
                self._undelivered[submission.req_id] = submission.output()
        return [submission for submission in grown if submission.req_id in names]

    def _stream(self, params: SamplingParams, stream: int | None) -> int:
        """A request's random stream: its own, the one given, its place, or, without a seed, one never used before."""
        if params.stream is not None:
            return params.stream
        if stream is not None:
            return stream
        if params.seed is not None:
            return self._num_submitted
        self._num_unseeded += params.n
        return UNSEEDED + self._num_unseeded - params.n
