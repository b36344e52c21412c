"""`Engine`: the only loop. Text or token ids in, results out.

What it knows between two turns, which `Turns` runs, is one immutable record, replaced as a whole: so a turn that fails
leaves the old one, and going back is taking an old one.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch

from purestep.kernels.types import Kernels
from purestep.pure.errors import (
    DuplicateRequestError,
    InvalidParameterError,
    InvalidRequestError,
    StaleStateError,
    short,
)
from purestep.pure.records.drafter import HostDrafter
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.scheduler import make_queue, num_free
from purestep.state.book import Book, add, fork, known
from purestep.state.calls import Call, submitted
from purestep.state.captures import capture
from purestep.state.engine_moment import EngineMoment
from purestep.state.grammars import Grammars
from purestep.state.graph_api import GraphApi
from purestep.state.loading.chat import Conversation, conversations_of, render_chat
from purestep.state.loading.tokenizer import Tokenizer
from purestep.state.progress import progress as progress_bar
from purestep.state.results import RequestOutput
from purestep.state.setup import (
    AnyDrafter,
    Source,
    as_dtype,
    bind,
    dispatch_keys_of,
    graphs_for,
    kv_cache_of,
    limits_of,
    resolve,
    scheduler_config,
    unroll_of,
    usable_device,
    with_drafter_of,
)
from purestep.state.sizes import sizes_of
from purestep.state.submission import (
    Prompt,
    check_request,
    ids_of,
    judged,
    listed,
    new_submission,
    one_each,
)
from purestep.state.transcript import new_transcript
from purestep.state.turns import Turns
from purestep.state.weights import check_alike

ANY_PARAMS = SamplingParams()


class Engine:
    """Generates text with a model; a context manager that gives its memory back.

    `model` is a folder, a GGUF file, a hub id, a LoadedModel, (Model, Params), or None for SmolLM2. Weights in memory
    are moved to `device` and cast to `dtype`; those that are so already are shared with whoever has them. Further
    keywords are the fields of `Sizes`. `seed` is that of requests that bring none. With a `drafter` a step verifies
    several guesses at once: the tokens come sooner, and are the same or distributed alike. `draft_params` are its
    weights if it has any. One on the host guesses between steps, so none is begun ahead of time then. A step in which
    requests have grammars samples once the host knows all tokens and drafts before it: they are masked one by one.
    """

    def __init__(
        self,
        model: Source = None,
        *,
        tokenizer: Any = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        kernels: Kernels | None = None,
        graph_api: GraphApi | None = None,
        drafter: AnyDrafter = None,
        draft_params: Params | None = None,
        **sizes: Any,
    ) -> None:
        wanted, dtype, place = sizes_of(sizes), as_dtype(dtype), usable_device(device)
        graph_api = graphs_for(wanted, place, graph_api)
        loaded = resolve(model, dtype=dtype, device=place, tokenizer=tokenizer)
        self._loaded = with_drafter_of(loaded, drafter, draft_params, dtype=dtype, device=place)
        how: Any = {"device": place, "kernels": kernels, "drafter": drafter}
        captures = graph_api is not None
        self._kv_config = kv_config = kv_cache_of(self._loaded, wanted, dtype=dtype, captures=captures, **how)
        self.limits = limits_of(self._loaded, kv_config, wanted, seed=seed, drafter=drafter)
        keys = dispatch_keys_of(self._loaded.model, self.limits, wanted)
        host_drafter = drafter if isinstance(drafter, HostDrafter) else None
        default_steps_ahead = 1 if place.type == "cuda" and host_drafter is None else 0
        steps_ahead = default_steps_ahead if wanted.steps_ahead is None else wanted.steps_ahead
        bound = bind(self._loaded, self.limits, kv_config, wanted, graph_api=graph_api, **how)
        config = scheduler_config(self.limits, wanted, steps_ahead=steps_ahead, drafter=drafter)
        queue = make_queue(config)  # behind the buffers, which refuse what does not fit
        unroll = unroll_of(wanted, graph_api, place, drafter)
        self.capture_report = capture(bound, keys, wanted, unroll=unroll)
        grammars = Grammars(self._loaded, vocab_size=self.limits.vocab_size)
        self._turns = Turns(bound, self.limits, queue, keys, grammars, steps_ahead, host_drafter, unroll)
        self._num_calls = 0

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
            ReentrantCallError: the call comes from inside a step, from a logits processor say.
        """
        self._turns.ready()
        params = self.default_params() if sampling_params is None else sampling_params
        check_request(req_id, params, priority, stream)
        limits = self.limits
        params = judged(params, limits, self._turns.grammars)
        book, tokenizer = self._book, self._loaded.tokenizer
        if req_id in book.numbers:
            raise DuplicateRequestError(
                f"request id {short(req_id)} is in use: wait for it, abort it, or use another id"
            )
        number = book.num_submitted
        new = new_submission(
            req_id, prompt, params, tokenizer, number=number, add_special_tokens=add_special_tokens
        )
        own = params.stream if stream is None or params.stream is not None else stream
        if own is None and params.seed is not None:
            own = number
        num_streams, own = (params.n, book.next_stream) if own is None else (0, own)
        book = add(book, new, [new_transcript(i, params, tokenizer) for i in range(params.n)], num_streams)
        requests = new.requests(stream=own, priority=priority, eos=limits.eos_token_ids)
        self._turns.add(requests, book, vocab_size=limits.vocab_size)

    def has_unfinished(self) -> bool:
        """Whether any request runs or waits, or has a result that `step` has yet to give."""
        return len(self._book.numbers) > 0 or len(self._book.news) > 0

    def step(self) -> list[RequestOutput]:
        """Run one turn; the requests that there is news of, each with all that it has so far."""
        self._turns.turn()
        known = self._turns.now
        try:
            return list(self._turns.tell(known.book.news).values())
        except BaseException:  # an interrupt: the caller gets nothing, so the next step has to tell it
            self._turns.now = known
            raise

    def abort(self, req_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Stop requests; what they have so far, each once, and what ended untold. Ids that are not in use are ignored.

        Raises:
            InvalidRequestError: what is no id.
        """
        return self._turns.abort(ids_of(req_ids))

    # Going back and branching

    def remember(self) -> EngineMoment:
        """A moment to go back to: all requests with their tokens, text and draws to come; parameters are no part of it.

        It holds the blocks of running requests, without copying them, until it is closed, its `with` block is left, or
        nobody refers to it any more.

        Raises:
            StaleStateError: the engine is closed.
        """
        return self._turns.remember()

    def rewind(self, moment: EngineMoment) -> None:
        """Go back to a moment, from whatever has been run since, as often as you like: the same results follow.

        Calls (`generate`, `stream`) that began after it are void. If `update_weights` came in between, requests go on
        under the new parameters, their keys and values computed anew unless they were to be kept.

        Raises:
            StaleStateError: a moment that is closed or of another engine, or the engine is closed.
            InvalidRequestError: what is no moment.
        """
        if not isinstance(moment, EngineMoment):
            raise InvalidRequestError(f"rewind({short(moment)}): give a moment, which remember() returned")
        self._turns.rewind(moment)

    def fork(
        self,
        req_id: str,
        new_req_id: str,
        *,
        sample: int = 0,
        stream: int | None = None,
        keep_stream: bool = False,
    ) -> None:
        """A request that runs or waits goes on under a second id too, from the same tokens, with the same parameters.

        It draws from a random stream that nobody has had, from the one given, or with `keep_stream` from its parent's,
        whose tokens it then repeats. Of several samples, `sample` says which one. Full blocks are shared.

        Raises:
            InvalidRequestError: no such request or sample runs or waits, or an id or stream of the wrong kind.
            DuplicateRequestError: the new id is in use.
            OutOfRowsError, OutOfBlocksError: no room for it beside its parent. Nothing has changed then.
        """
        check_request(req_id, ANY_PARAMS, 0, None)
        check_request(new_req_id, ANY_PARAMS, 0, stream)
        if keep_stream and stream is not None:
            raise InvalidRequestError(
                f"fork as {short(new_req_id)}: stream={stream} and keep_stream: give one of them"
            )
        before, num_streams = self._turns.settled().book, int(stream is None and not keep_stream)
        book, parent, twin = fork(before, req_id, new_req_id, sample, num_streams)
        stream = before.next_stream if num_streams else stream
        self._turns.fork(parent, twin, stream=stream, book=book)

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
        with self._submitted(prompts, sampling_params, on_error, add_special_tokens) as call:
            results, num_before = dict(call.refused), self._turns.num_tokens
            with progress_bar(len(call.names), shown=progress) as report:
                while call.left:
                    results |= call.take(call.turn(), only_over=True)
                    report(finished=len(results), tokens=self._turns.num_tokens - num_before)
        if gone := [name for name in call.names if name not in results]:
            raise StaleStateError(
                f"{len(gone)} of {len(call.names)} requests of this call, {gone[0]!r} first, were aborted or told by "
                "`step` while it ran: let it end, or use add_request and step for what is to be stopped"
            )
        return [results[name] for name in call.names]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Iterator[RequestOutput]:
        """Results as they grow, each with everything so far. Leaving the loop early aborts what still runs.

        Where steps are unrolled they grow by several tokens at a time.
        """
        with self._submitted(prompts, sampling_params, "raise", add_special_tokens) as call:
            while call.left:
                yield from call.take(call.turn()).values()

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answers to one or many conversations, by the model's chat template; `variables` go to the template.

        Raises:
            InvalidRequestError: the model has no chat template, or it can not take these messages.
        """
        prompts = [self.chat_prompt(one, **variables) for one in conversations_of(messages)]
        return self.generate(prompts, sampling_params, progress=progress, add_special_tokens=False)

    def chat_prompt(self, messages: Conversation, **variables: Any) -> str:
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

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or the one that was given: `encode` and `decode`; None if it has none."""
        return self._loaded.tokenizer

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
        self._turns.refuse_reentry()
        bound = self._turns.bound
        if bound.captured is not None:
            bound.captured.clear()
        bound.buffers.close()
        self._turns.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        queue, cache, num_blocks = self._turns.now.queue, self._kv_config, self.limits.num_blocks[0] - 1
        return (
            f"Engine({self._loaded.name}, {len(queue.running)} running, {len(queue.waiting)} waiting, "
            f"{self.num_free_blocks} of {num_blocks} blocks free; {num_blocks * cache.block_sizes[0]:,} tokens in "
            f"{cache.num_bytes:,} bytes of {str(cache.specs[0].dtype).removeprefix('torch.')})"
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the first KV group that no request holds; cached prefixes count as free."""
        return num_free(self._turns.swept().queue)

    @property
    def turns(self) -> Turns:
        """Its steps, one by one, and what is known between them; `purestep.state.bare` runs them without the engine."""
        return self._turns

    @property
    def _book(self) -> Book:
        return self._turns.now.book

    def _submitted(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        on_error: str,
        add_special_tokens: bool,
    ) -> AbstractContextManager[Call]:
        """These prompts, submitted. Whatever ends the block, none of them runs on."""
        all_prompts = listed(prompts)
        params = one_each(sampling_params, len(all_prompts))
        if on_error not in ("raise", "return"):
            raise InvalidParameterError(f"on_error={short(on_error)}: it is 'raise' or 'return'")
        names = self._call_names(len(all_prompts))
        add = partial(self.add_request, add_special_tokens=add_special_tokens)
        return submitted(self._turns, names, all_prompts, params, add, raises=on_error == "raise")

    def _call_names(self, count: int) -> tuple[str, ...]:
        """Ids for the prompts of a call that nobody uses, and whose results nobody has still to be told."""
        untold = {known(self._book.submissions, number).req_id for number in self._book.over}
        while True:
            names = tuple([f"call{self._num_calls}-{i}" for i in range(count)])
            self._num_calls += 1
            if not any(name in self._book.numbers or name in untold for name in names):
                return names
