"""Logits processors: how a batch's requests share them, and how they are tried and written."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.utils._pytree as pytree
from jaxtyping import Bool, Int
from torch import Tensor

from purestep.pure.arrays import frozen
from purestep.pure.errors import InvalidParameterError
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.logits_processor import History, LogitsProcessor
from purestep.pure.records.sampling_extras import ProcessorRows, SamplingExtras
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.rows import occupied

S = TypeVar("S")


def sampling_extras(batch: InputBatch) -> SamplingExtras:
    """What sampling of this batch takes beside the state, on the host; padding behind its requests has none.

    Requests share a call of a function where it stands at the same place of their lists.
    """
    rows = [batch.row_of[req_id] for req_id in batch.req_ids]
    params = [occupied(batch.rows.requests[row]).sampling_params for row in rows]
    return SamplingExtras(
        processors=grouped([own.logits_processors for own in params], [own.greedy for own in params]),
        token_ids=_wanted_ids(params, batch.layout.bounds.num_reqs),
    )


def grouped(chosen: Sequence[Sequence[LogitsProcessor]], greedy: Sequence[bool]) -> tuple[ProcessorRows, ...]:
    """The processors that requests chose, in the order of a batch: one call each, with whoever shares it."""
    stages = range(max(map(len, chosen), default=0))
    calls = [
        ((place, own[place].apply, _names(own[place]), own[place].argmax_invariant), index, own[place])
        for place in stages
        for index, own in enumerate(chosen)
        if place < len(own) and not (own[place].argmax_invariant and greedy[index])
    ]
    return tuple(
        _rows([(index, processor) for key, index, processor in calls if key == shared])
        for shared in dict.fromkeys(key for key, _, _ in calls)
    )


def _names(processor: LogitsProcessor) -> tuple[str, ...]:
    return tuple(sorted(name for name, _ in processor.params))


def _rows(members: Sequence[tuple[int, LogitsProcessor]]) -> ProcessorRows:
    indices, processors = zip(*members, strict=True)
    values = [dict(processor.params) for processor in processors]
    return ProcessorRows(
        index=frozen(np.array(indices, np.int64)),
        params={name: _column([own[name] for own in values]) for name in values[0]},
        apply=processors[0].apply,
        argmax_invariant=processors[0].argmax_invariant,
    )


def _column(values: Sequence[float]) -> np.ndarray:
    is_whole = all(isinstance(value, int) for value in values)
    return frozen(np.array(values, np.int64 if is_whole else np.float32))


def _wanted_ids(params: Sequence[SamplingParams], num_reqs: int) -> np.ndarray | None:
    wanted = [own.logprob_token_ids or () for own in params]
    width = max(map(len, wanted), default=0)
    if not width:
        return None
    ids = np.full((num_reqs, width), -1, np.int32)
    for row, own in zip(ids, wanted, strict=False):
        row[: len(own)] = own
    return frozen(ids)


def try_processors(
    params: SamplingParams,
    prompt: Sequence[int],
    *,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Call a request's processors once, on its prompt and even logits, so that a bad one fails before it runs.

    `dtype` is the model's.

    Raises:
        InvalidParameterError: one that raises, or whose result is not of the kind of what it was given.
    """
    history = History(
        token_ids=torch.tensor([list(prompt)], dtype=torch.int32, device=device),
        prompt_lengths=torch.tensor([len(prompt)], dtype=torch.int32, device=device),
        lengths=torch.tensor([len(prompt)], dtype=torch.int32, device=device),
    )
    dtype = torch.promote_types(dtype, torch.float32)
    logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
    for rows in SamplingExtras(grouped([params.logits_processors], [False])).to(device).processors:
        try:
            changed = rows.apply(logits, history, rows.params)
            found = f"{changed.dtype} of shape {tuple(changed.shape)}"
        except Exception as error:
            raise InvalidParameterError(
                f"logits processor {rows.apply!r} raised {error!r} on the prompt of {len(prompt)} tokens: it takes "
                "(logits, history, params) and returns logits"
            ) from error
        if (changed.shape, changed.dtype) != (logits.shape, dtype):
            raise InvalidParameterError(
                f"logits processor {rows.apply!r} returned {found} for {dtype} of shape {tuple(logits.shape)}: return "
                "the same kind of logits, one row for each that was given"
            )


def fold(
    update: Callable[[S, Int[Tensor, " rows"]], S],
    state: S,
    history: History,
    *,
    over: Bool[Tensor, "rows width"],
) -> S:
    """State of a processor after the tokens that `over` marks (`history.is_output`, say), from the left, by row.

    `state` is a tensor, or a tree of them, with a row for each request; `update(state, token_ids [rows])` gives the
    next one, and counts where the row's entry is marked. It takes a call for every entry of the width: where a sum or a
    comparison along the width says the same, that is faster.
    """
    for place in range(history.token_ids.shape[1]):
        counts, following = over[:, place], update(state, history.token_ids[:, place])
        state = pytree.tree_map(lambda new, old, c=counts: _where(c, new, old), following, state)
    return state


def _where(counts: Bool[Tensor, " rows"], new: Tensor, old: Tensor) -> Tensor:
    return torch.where(counts.reshape(-1, *[1] * (new.dim() - 1)), new, old)
