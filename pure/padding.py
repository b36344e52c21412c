"""Padding a batch to the shape of a captured graph, and the shapes of batches that are made up.

Padding tokens lie behind the real ones and padded requests name the null row, which is never active: they write
into the null block, which nothing reads, and keep nothing. Real rows are computed as without padding.
"""

from collections.abc import Sequence

import numpy as np

from purestep.pure.arrays import filled, frozen, start_loc
from purestep.pure.errors import DispatchError
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.dispatch import DispatchKeys
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import Layout, LayoutBounds, SamplerShape, bucket


def pad_batch(batch: InputBatch, descriptor: BatchDescriptor, *, before: Layout | None = None) -> InputBatch:
    """The batch as the device is to see it: its layout padded to the descriptor; the same object if that is its own.

    Make the plan of this one, and go on to the next step from the batch without padding. `before` is the layout that
    the device has (`absorbed.layout`): if its arrays are what is wanted, the padded layout shares them, and the plan
    of a steady step stays empty.

    Raises:
        DispatchError: a descriptor that does not hold the batch, or of more requests than a batch can have.
    """
    layout = pad_layout(batch.layout, descriptor, null_row=batch.limits.null_row, before=before)
    return batch if layout is batch.layout else replace(batch, layout=layout)


def fill_batch(batch: InputBatch, keys: DispatchKeys) -> InputBatch:
    """The batch with the bounds of a uniform one, if graphs of such hold it: as if each request had all its drafts.

    They hold every batch whose requests run no more tokens than the requests of a uniform one, since the device lays
    tokens out by what each request has: what some run less than others becomes padding behind all. Rows, counts and
    drafts stay as they are. Other batches, and without such graphs all, are returned as they are.
    """
    layout, every = batch.layout, keys.uniform_query_len
    bounds = layout.bounds
    if every == 1 or not keys.mode.separate_routine or not 0 < bounds.max_query_len <= every:
        return batch
    filled = LayoutBounds(
        num_reqs=bounds.num_reqs,
        num_tokens=bounds.num_reqs * every,
        max_query_len=every,
        max_seq_len=bounds.max_seq_len,
        sampler=bounds.sampler,
        num_drafts=every - 1,
    )
    if filled == bounds:
        return batch
    return replace(batch, layout=Layout(layout.row_of_index, layout.query_start_loc, filled))


def pad_layout(
    layout: Layout, descriptor: BatchDescriptor, *, null_row: int, before: Layout | None = None
) -> Layout:
    """The layout with as many tokens and requests as the descriptor has (requests: only if it says how many).

    Padded requests are the null row with no tokens: query_start_loc stays flat at the number of real tokens. The
    bounds on lengths stay as they are. Arrays equal to those of `before` are shared with it.

    Raises:
        DispatchError: a descriptor that does not hold the batch, or of more requests than the rows before the null row.
    Source: vllm/v1/worker/gpu_model_runner.py _prepare_inputs and _build_attention_metadata.
    """
    bounds = layout.bounds
    num_tokens = descriptor.num_tokens
    num_reqs = bounds.num_reqs if descriptor.num_reqs is None else descriptor.num_reqs
    if num_tokens < bounds.num_tokens or num_reqs < bounds.num_reqs:
        raise DispatchError(
            f"a batch of {bounds.num_reqs} requests with {bounds.num_tokens} tokens does not fit a descriptor of "
            f"{num_reqs} requests with {num_tokens} tokens: dispatch this batch's own counts"
        )
    if num_reqs > null_row:
        raise DispatchError(
            f"a descriptor of {num_reqs} requests, and there are {null_row} rows for requests (max_num_reqs): capture "
            "and dispatch shapes of no more"
        )
    added = num_reqs - bounds.num_reqs
    if added or num_tokens != bounds.num_tokens:
        bounds = LayoutBounds(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=bounds.max_query_len,
            max_seq_len=bounds.max_seq_len,
            sampler=bounds.sampler,
            num_drafts=bounds.num_drafts,
            num_steps=bounds.num_steps,
        )
    if before is not None and _has_arrays(before, layout, num_reqs, null_row):
        if bounds == before.bounds:
            return before
        return Layout(before.row_of_index, before.query_start_loc, bounds)
    rows, starts = layout.row_of_index, layout.query_start_loc
    if added:
        rows = frozen(np.concatenate([rows, np.full(added, null_row, np.int32)]))
        starts = frozen(np.concatenate([starts, np.full(added, starts[-1], np.int32)]))
    return layout if bounds is layout.bounds else Layout(rows, starts, bounds)


def _has_arrays(before: Layout, layout: Layout, num_reqs: int, null_row: int) -> bool:
    """Whether `before` is `layout` with null rows up to `num_reqs`; bytes are compared, which is fastest here."""
    rows, starts, real = before.row_of_index, before.query_start_loc, len(layout.row_of_index)
    return (
        len(rows) == num_reqs
        and rows[:real].tobytes() == layout.row_of_index.tobytes()
        and starts[: real + 1].tobytes() == layout.query_start_loc.tobytes()
        and bool((rows[real:] == null_row).all() and starts[-1] == starts[real])
    )


def capture_layout(
    descriptor: BatchDescriptor,
    limits: BatchLimits,
    *,
    sampler: SamplerShape,
    num_drafts: int = 0,
    num_steps: int = 1,
) -> Layout:
    """The layout that a full graph of this shape is captured with: padding only, and bounds that fit all its batches.

    No request runs in it, so capturing with it changes nothing that is read. A uniform descriptor bounds a query by
    its tokens a request; any other by all of its tokens. A request may have `num_drafts` drafts verified; the layout is
    run `num_steps` times.
    """
    num_reqs = limits.max_num_reqs if descriptor.num_reqs is None else descriptor.num_reqs
    empty = Layout.make_empty()
    padded = pad_layout(empty, replace(descriptor, num_reqs=num_reqs), null_row=limits.null_row)
    per_request = descriptor.num_tokens // num_reqs if descriptor.uniform else descriptor.num_tokens
    bounds = LayoutBounds(
        num_reqs=num_reqs,
        num_tokens=descriptor.num_tokens,
        max_query_len=per_request,
        max_seq_len=bucket(limits.max_model_len),
        sampler=sampler,
        num_drafts=num_drafts,
        num_steps=num_steps,
    )
    return replace(padded, bounds=bounds)


def dummy_layout(
    query_lens: Sequence[int], limits: BatchLimits, *, sampler: SamplerShape, max_seq_len: int
) -> Layout:
    """The layout of a made-up batch: requests with so many tokens each, all of them the null row.

    They write into the null block and keep nothing. `max_seq_len` is the bound that kernels may size memory by. As many
    drafts are verified as there may be, of which there are none.
    """
    bounds = LayoutBounds(
        num_reqs=len(query_lens),
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=bucket(max_seq_len),
        sampler=sampler,
        num_drafts=limits.num_drafts,
    )
    rows = filled(len(query_lens), limits.null_row, np.int32)
    return Layout(rows, start_loc(np.array(query_lens, np.int32)), bounds)


def dummy_query_lens(
    num_tokens: int, max_num_reqs: int, *, uniform_query_len: int | None = None, mixed: bool = False
) -> tuple[int, ...]:
    """Tokens of each request of a made-up batch of `num_tokens`.

    By default as many requests as may be, the last one with what is left over. With `uniform_query_len` each has so
    many, the last perhaps fewer. With `mixed` one prefill follows decodes of one token each, that take at most half.

    Raises:
        DispatchError: no tokens, or more than `max_num_reqs` uniform requests hold.
    Source: vllm/v1/worker/gpu_model_runner.py _dummy_run.
    """
    if num_tokens < 1 or max_num_reqs < 1:
        raise DispatchError(
            f"a made-up batch of {num_tokens} tokens in at most {max_num_reqs} requests: give one of each"
        )
    if mixed:
        num_decodes = min(max_num_reqs - 1, num_tokens // 2)
        return (1,) * num_decodes + (num_tokens - num_decodes,)
    if uniform_query_len is None:
        num_reqs = min(num_tokens, max_num_reqs)
        each, left_over = divmod(num_tokens, num_reqs)
        return (each,) * (num_reqs - 1) + (each + left_over,)
    if num_tokens > uniform_query_len * max_num_reqs:
        raise DispatchError(
            f"a uniform batch of {num_tokens} tokens with {uniform_query_len} a request needs more than "
            f"{max_num_reqs} requests: at most {uniform_query_len * max_num_reqs} tokens"
        )
    whole, rest = divmod(num_tokens, uniform_query_len)
    return (uniform_query_len,) * whole + ((rest,) if rest else ())
