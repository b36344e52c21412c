"""Logits processors whose failure ends their own requests, and nobody else's."""

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from purestep.pure.errors import ProcessorError, PurestepError
from purestep.pure.record import replace
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.logits_processor import Apply, History
from purestep.pure.records.sampling_extras import ProcessorRows, SamplingExtras
from purestep.pure.sampling_extras import sampling_extras


def guarded(batch: InputBatch, failed: MutableMapping[int, PurestepError]) -> SamplingExtras | None:
    """What sampling of this batch takes beside the state, if anything.

    Its processors note in `failed` whom they fail for, by place in the batch, and go on without them. A call that fails
    for several requests is made again for each: those that it does not fail for go on.
    """
    if not batch.layout.bounds.sampler.extras:
        return None
    extras = sampling_extras(batch)
    processors = [replace(rows, apply=_guard(rows, batch.req_ids, failed)) for rows in extras.processors]
    return replace(extras, processors=tuple(processors))


def _guard(rows: ProcessorRows, req_ids: Sequence[str], failed: MutableMapping[int, PurestepError]) -> Apply:
    places, function = rows.index.tolist(), rows.apply

    def apply(logits: Tensor, history: History, params: Mapping[str, Tensor]) -> Tensor:
        try:
            return _called(function, logits, history, params)
        except Exception:
            parts = list(torch.split(logits, 1))
        every = len(parts) // len(places)  # rows of a request: more than one where drafts are verified
        for i in range(len(parts)):
            place, is_first = places[i // every], i % every == 0
            one = slice(i, i + 1)
            own = History(history.token_ids[one], history.prompt_lengths[one], history.lengths[one])
            try:
                parts[i] = _called(
                    function, parts[i], own, {name: value[one] for name, value in params.items()}
                )
            except Exception as error:
                if (
                    not is_first
                ):  # it counts if the drafts before stand: a row without a distribution ends it then
                    parts[i] = torch.full_like(parts[i], torch.nan)
                    continue
                num_outputs = int(own.lengths[0] - own.prompt_lengths[0])
                failed.setdefault(place, _failure(function, req_ids[place], num_outputs, error))
        return torch.cat(parts)

    return apply


def _called(function: Apply, logits: Tensor, history: History, params: Mapping[str, Tensor]) -> Tensor:
    changed = function(logits, history, params)
    if changed.shape != logits.shape or not changed.is_floating_point():
        raise TypeError(
            f"{changed.dtype} of shape {tuple(changed.shape)} came back for {logits.dtype} of shape "
            f"{tuple(logits.shape)}"
        )
    return changed


def _failure(function: Apply, req_id: str, num_outputs: int, error: Exception) -> ProcessorError:
    failure = ProcessorError(
        f"request {req_id!r} can not go on after {num_outputs} outputs: its logits processor {function!r} raised "
        f"{error!r}: submit it again with one that does not"
    )
    failure.__cause__ = without_frames(error)
    return failure


def without_frames(error: BaseException) -> BaseException:
    """The error, and what it came from, without the frames that they passed: those keep alive whatever was there."""
    inner: BaseException | None = error
    while inner is not None:
        inner.__traceback__ = None
        inner = inner.__cause__ or inner.__context__
    return error
