"""vLLM's records, turned into ours: dicts and lists become columns, once, at the door.

Objects with vLLM's attribute names and mappings with the same keys are taken alike. A parameter that asks for what
no stage does is refused by name rather than dropped.
Source: vllm/v1/core/sched/output.py, vllm/sampling_params.py.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import numpy as np

from purestep.pure.arrays import frozen
from purestep.pure.errors import InvalidParameterError, SchedulerOutputError
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import (
    NOTHING,
    BlockIds,
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)

SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words_token_ids",
    "detokenize",
    "skip_special_tokens",
)
NOT_SUPPORTED = (
    "logits_processors",
    "thinking_token_budget",
    "repetition_detection",
)
BY_MASKS = (
    "structured_outputs"  # obeyed by the masks that come with each step, not by the sampling parameters
)


def scheduler_output_from_vllm(output: Any, *, known: Container[str] = ()) -> SchedulerOutput:
    """One step's work as columns; the order of `num_scheduled_tokens` becomes the order of the batch.

    A request without a seed draws from a stream of its own, named by its id; requests with equal seeds draw alike.
    A new request whose id is `known` and has not finished goes on with a longer prompt: its outputs are counted from 0
    again, so it goes on in another stream, or it would draw once more what it drew before.
    The grammar of a request with structured outputs is the caller's: see `grammar_output_from_vllm`.

    Raises:
        SchedulerOutputError: a total that is not the sum of the counts.
        InvalidParameterError: sampling parameters that no stage obeys.
    """
    counts: Mapping[str, int] = _get(output, "num_scheduled_tokens", {})
    total = _get(output, "total_num_scheduled_tokens", None)
    column = _column(counts.values(), len(counts))
    if total is not None and total != column.sum():
        raise SchedulerOutputError(
            f"total_num_scheduled_tokens is {total}, but the counts of {len(counts)} requests add up to "
            f"{column.sum()}: send their sum"
        )
    num_groups = len(_get(output, "num_common_prefix_blocks", ()))
    to_zero = tuple(_get(output, "new_block_ids_to_zero", ()))
    finished = frozenset(_get(output, "finished_req_ids", ()))
    new = _get(output, "scheduled_new_reqs", ())
    return SchedulerOutput(
        scheduled_new_reqs=tuple([_new_request(data, known, finished) for data in new]),
        scheduled_cached_reqs=_cached_requests(_get(output, "scheduled_cached_reqs", {})),
        req_ids=tuple(counts),
        num_scheduled_tokens=column,
        finished_req_ids=finished,
        preempted_req_ids=frozenset(_get(output, "preempted_req_ids", ())),
        scheduled_spec_decode_tokens=_tuples(_get(output, "scheduled_spec_decode_tokens", {})),
        num_common_prefix_blocks=tuple(_get(output, "num_common_prefix_blocks", ())),
        # Upstream's groups share one pool of ids: to zero another group's block harms nobody who holds one.
        new_block_ids_to_zero=(to_zero,) * max(num_groups, 1) if to_zero else (),
        scheduled_encoder_inputs=_tuples(_get(output, "scheduled_encoder_inputs", {})),
        free_encoder_mm_hashes=tuple(_get(output, "free_encoder_mm_hashes", ())),
        has_structured_output_requests=bool(_get(output, "has_structured_output_requests", False)),
        pending_structured_output_tokens=bool(_get(output, "pending_structured_output_tokens", False)),
        num_spec_tokens_to_schedule=_get(output, "num_spec_tokens_to_schedule", 0),
        kv_connector_metadata=_get(output, "kv_connector_metadata", None),
        ec_connector_metadata=_get(output, "ec_connector_metadata", None),
    )


def grammar_output_from_vllm(output: Any) -> GrammarOutput | None:
    """The masks of one step's structured outputs; None where there are none.

    Raises:
        SchedulerOutputError: masks that are no matrix of int32 words.
    """
    if output is None:
        return None
    bitmask = np.asarray(_get(output, "grammar_bitmask", None))
    if bitmask.dtype != np.int32 or bitmask.ndim != 2:
        raise SchedulerOutputError(
            f"grammar_bitmask is {bitmask.dtype} of shape {bitmask.shape}: send int32 words, a row a mask"
        )
    return GrammarOutput(tuple(_get(output, "structured_output_request_ids", ())), bitmask)


def sampling_params_from_vllm(params: Any, *, has_masks: bool = False) -> SamplingParams:
    """The same request of the sampler. What upstream derives (stop ids with the model's own) we derive ourselves.

    `has_masks` says that whoever runs the steps is given a mask of each grammar with each of them.

    Raises:
        InvalidParameterError: a parameter that no stage obeys, or bad words that are not token ids yet.
    """
    for name in NOT_SUPPORTED if has_masks else (BY_MASKS, *NOT_SUPPORTED):
        if _get(params, name, None):
            raise InvalidParameterError(
                f"{name} is {_get(params, name, None)!r}, and no stage obeys it: leave it out"
            )
    if _get(params, "bad_words", None) and not _get(params, "bad_words_token_ids", None):
        raise InvalidParameterError(
            f"bad_words are {_get(params, 'bad_words', None)!r} and bad_words_token_ids are not set: "
            "turn the words into token ids first (upstream: update_from_tokenizer)"
        )
    given = {name: _get(params, name, None) for name in SAME_NAMES}
    if isinstance(given["logit_bias"], Mapping):
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}  # JSON's keys
    # None is upstream's default for some, and means something ("no limit") for max_tokens alone.
    return SamplingParams(**{k: v for k, v in given.items() if v is not None or k == "max_tokens"})


def stream_of(req_id: str) -> int:
    """A random stream of its own for a request that is known by its id alone: 63 bits of a hash of it."""
    return int.from_bytes(blake2b(req_id.encode(), digest_size=8).digest(), "little") >> 1


def _get(source: Any, name: str, default: Any) -> Any:
    """An item of a mapping or an attribute of an object; `default` where it is missing or None."""
    value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    return default if value is None else value


def _new_request(new: Any, known: Container[str], finished: Container[str]) -> NewRequestData:
    req_id, params = _get(new, "req_id", None), _get(new, "sampling_params", None)
    prompt, mask = tuple(_get(new, "prompt_token_ids", ())), _get(new, "prompt_is_token_ids", None)
    name = "" if params is not None and _get(params, "seed", None) is not None else req_id
    if req_id in known and req_id not in finished:
        name = f"{name} after {len(prompt)} tokens"
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        sampling_params=None if params is None else sampling_params_from_vllm(params, has_masks=True),
        block_ids=_block_ids(_get(new, "block_ids", ())),
        num_computed_tokens=_get(new, "num_computed_tokens", 0),
        stream=stream_of(name) if name else 0,
        pooling_params=_get(new, "pooling_params", None),
        lora_request=_get(new, "lora_request", None),
        prompt_embeds=_get(new, "prompt_embeds", None),
        prompt_is_token_ids=None if mask is None else tuple(mask),
        mm_features=tuple(_get(new, "mm_features", ())),
    )


def _cached_requests(cached: Any) -> CachedRequestData:
    req_ids = tuple(_get(cached, "req_ids", ()))
    blocks = _get(cached, "new_block_ids", ())
    new_tokens = _get(cached, "new_token_ids", ())
    return CachedRequestData(
        req_ids=req_ids,
        num_computed_tokens=_column(_get(cached, "num_computed_tokens", ()), len(req_ids)),
        num_output_tokens=_column(_get(cached, "num_output_tokens", ()), len(req_ids)),
        new_block_ids=_present(req_ids, blocks, _block_ids),
        resumed_req_ids=frozenset(_get(cached, "resumed_req_ids", ())),
        all_token_ids=_tuples(_get(cached, "all_token_ids", {})),
        new_token_ids=_present(req_ids, new_tokens, tuple) if new_tokens else NOTHING,
    )


def _present(req_ids: Sequence[str], values: Sequence[Any], convert: Any) -> Mapping[str, Any]:
    """A list with None entries, in parallel with ids, as a mapping of those that are there."""
    if not any(values):
        return NOTHING
    pairs = zip(req_ids, values, strict=True)
    return MappingProxyType({req_id: convert(value) for req_id, value in pairs if value is not None})


def _block_ids(groups: Iterable[Iterable[int]]) -> BlockIds:
    return tuple(tuple(ids) for ids in groups)


def _tuples(mapping: Mapping[str, Iterable[int]]) -> Mapping[str, tuple[int, ...]]:
    return MappingProxyType({key: tuple(items) for key, items in mapping.items()}) if mapping else NOTHING


def _column(values: Iterable[int], count: int) -> Any:
    return frozen(np.fromiter(values, np.int32, count))
