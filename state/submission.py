"""`Submission`: a prompt on its way through the engine, with its n samples."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from purestep.pure.errors import InvalidParameterError, InvalidRequestError, short
from purestep.pure.prompt_logprobs import PromptScores, prompt_table
from purestep.pure.record import record, replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.queue import Request
from purestep.pure.records.sampling_params import SamplingParams, normalize, validate
from purestep.state.grammars import Grammars
from purestep.state.loading.tokenizer import Tokenizer
from purestep.state.results import CompletionOutput, PromptLogprobs, RequestOutput

Prompt = str | Sequence[int]


@record
class Submission:
    """A prompt's id, tokens and parameters. Its samples are requests of the scheduler, named after it."""

    req_id: str
    number: int  # how many samples were submitted before it: that of its first sample
    params: SamplingParams
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    prompt_scores: tuple[PromptScores, ...] = ()  # as far as they are there, from the front
    prompt_logprobs: PromptLogprobs | None = None  # once they are complete

    @property
    def awaits_scores(self) -> bool:
        """Whether log-probabilities of the prompt are wanted, and not all there."""
        return self.params.prompt_logprobs is not None and self.prompt_logprobs is None

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """The ids of its samples' requests."""
        if self.params.n == 1:
            return (self.req_id,)
        return tuple([f"{self.req_id}#{i}" for i in range(self.params.n)])

    @property
    def sample_numbers(self) -> range:
        """The numbers of its samples, which no other sample ever has."""
        return range(self.number, self.number + self.params.n)

    def requests(self, *, stream: int, priority: int, eos: tuple[int, ...]) -> list[Request]:
        """The samples as the scheduler's requests; all but the first share the first one's prompt blocks."""
        first = self.sample_ids[0]
        return [
            Request(
                req_id=sample_id,
                prompt_token_ids=self.prompt_token_ids,
                sampling_params=self.params,
                priority=priority,
                arrival=self.number + i,
                stream=stream + i,
                eos_token_ids=eos,
                fork_of=None if i == 0 else first,
            )
            for i, sample_id in enumerate(self.sample_ids)
        ]

    def output(self, outputs: Iterable[CompletionOutput]) -> RequestOutput:
        """The prompt and its samples so far."""
        return RequestOutput(
            req_id=self.req_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(outputs),
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
        )


def new_submission(
    req_id: str,
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    *,
    number: int,
    add_special_tokens: bool = True,
) -> Submission:
    """A prompt as it is submitted.

    Raises:
        InvalidParameterError: stop strings, and no text to look for them.
        InvalidRequestError: a prompt that is neither token ids nor text that can be had as such.
    """
    if params.stop and (tokenizer is None or not params.detokenize):
        raise InvalidParameterError(
            f"stop={params.stop}: stop strings are looked for in text, and this request has none: "
            "give stop_token_ids, or a tokenizer and detokenize=True"
        )
    text = prompt if isinstance(prompt, str) else None
    ids = _token_ids(prompt, tokenizer, add_special_tokens)
    nothing_to_score = params.prompt_logprobs is not None and len(ids) == 1
    return Submission(
        req_id, number, params, text, ids, prompt_logprobs=PromptLogprobs(None) if nothing_to_score else None
    )


def with_scores(submission: Submission, scores: PromptScores) -> Submission:
    """With the rows of one more part of the prompt, which take the place of what was there from the first of them on.

    A request that is computed anew, after a preemption say, begins at the front again. Once all rows are there they
    stay, whatever is computed again.
    """
    if not submission.awaits_scores:
        return submission
    kept = [part for part in submission.prompt_scores if part.first_row < scores.first_row]
    parts, num_rows = (*kept, scores), len(submission.prompt_token_ids) - 1
    if scores.first_row + len(scores.rows.selected_token_ranks) < num_rows:
        return replace(submission, prompt_scores=parts)
    width = scores.rows.logprobs.shape[1]
    table = prompt_table(parts, num_rows=num_rows, num_logprobs=width - 1)
    return replace(submission, prompt_scores=(), prompt_logprobs=PromptLogprobs(table))


def _token_ids(prompt: Prompt, tokenizer: Tokenizer | None, add_special_tokens: bool) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        try:
            if isinstance(prompt, list | tuple) and set(map(type, prompt)) == {int}:
                return tuple(prompt)  # the same, in a third of the time
            return tuple(map(operator.index, prompt))
        except (TypeError, ValueError):
            raise InvalidRequestError(
                f"a prompt is text or token ids (whole numbers), got {short(prompt)}"
            ) from None
    if tokenizer is None:
        raise InvalidRequestError(
            "a prompt is text, and this model has no tokenizer: give token ids, or a tokenizer"
        )
    try:
        return tuple(tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
    except TypeError:  # what tokenizers says of it
        raise InvalidRequestError(
            f"prompt {short(prompt)}: half of a character is in it (a lone surrogate), which no text can hold: "
            "decode it as UTF-8"
        ) from None


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: text, or a sequence of ids, is one."""
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        return [prompts]  # type: ignore[list-item]
    try:
        operator.index(prompts[0])  # type: ignore[arg-type]
    except (TypeError, IndexError, KeyError, ValueError):
        return list(prompts)  # type: ignore[arg-type]
    return [prompts]  # type: ignore[list-item]


def one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence):
        raise InvalidParameterError(
            f"sampling parameters are SamplingParams, or a list of them, not {short(params)}"
        )
    if len(params) != num_prompts:
        raise InvalidParameterError(
            f"{num_prompts} prompts with {len(params)} sampling parameters: give one for all, or one for each"
        )
    return list(params)


def refused_output(name: str, prompt: Prompt, error: InvalidRequestError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    ids: tuple[Any, ...] = tuple(prompt) if isinstance(prompt, Sequence) and text is None else ()
    return RequestOutput(req_id=name, prompt=text, prompt_token_ids=ids, outputs=(), error=error)


def ids_of(req_ids: object) -> list[str]:
    """These ids, each once: a single one, or many.

    Raises:
        InvalidRequestError: what is no id.
    """
    many = req_ids if isinstance(req_ids, Iterable) and not isinstance(req_ids, str) else [req_ids]
    ids = list(many)
    if wrong := [req_id for req_id in ids if not isinstance(req_id, str)]:
        raise InvalidRequestError(f"req_id={short(wrong[0])}: an id is text; give one, or a list of them")
    return list(dict.fromkeys(ids))


def judged(params: SamplingParams, limits: BatchLimits, grammars: Grammars) -> SamplingParams:
    """The parameters in the form in which they are kept.

    Raises:
        InvalidParameterError: one outside its domain, or all of them together leave no token.
        GrammarError: structured output that can not be had.
    """
    validate(params, limits.vocab_size, limits.max_model_len, eos_token_ids=limits.eos_token_ids)
    if params.structured_outputs is not None:
        grammars.check(params.structured_outputs, min_tokens=params.min_tokens)
    return normalize(params)


def check_request(req_id: object, params: object, priority: object, stream: object) -> None:
    """Refuse what is of the wrong kind before it can meet other requests.

    Raises:
        InvalidRequestError: an id that is no text, a priority or stream that is no whole number, or parameters that
            are no SamplingParams.
    """
    if not isinstance(req_id, str):
        raise InvalidRequestError(f"req_id={short(req_id)}: an id is text; it comes first, then the prompt")
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"request {short(req_id)}: sampling_params={short(params)}: give SamplingParams"
        )
    for name, value in (("priority", priority), ("stream", 0 if stream is None else stream)):
        if type(value) is not int or abs(value) >= 2**62:
            raise InvalidRequestError(
                f"request {short(req_id)}: {name}={short(value)}: it is a whole number below 2**62"
            )
