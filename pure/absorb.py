"""`absorb`: the inbox, taken into the state."""

from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.record import replace
from purestep.pure.records.layout import Layout
from purestep.pure.records.plan import Inbox, InboxShape
from purestep.pure.records.sampling_rows import NUM_FLOATS, NUM_WORDS, SamplingRows
from purestep.pure.records.state import NUM_HOST_COLUMNS, Ledger, StepState


def absorb(state: StepState, *, kernels: Kernels) -> StepState:
    """The state with its inbox taken in and emptied; with nothing in it, the same object.

    Rows are forked before anything is written. Blocks are zeroed first and copied second, so that a copy may fill a
    fresh block before the step writes behind it. A row that is written anew or forked has no drafts but those that the
    inbox brings. Absorbing the plan of a to b and then that of b to c equals
    absorbing that of a to c.
    """
    inbox = state.inbox
    if inbox.is_empty:
        return state
    layout, ledger, sampling, tokens, rooms, blocks, copies, zeros, forks, drafts = _sections(inbox)
    write = kernels.write
    table, token_ids = state.ledger.table, state.token_ids
    if len(forks):
        columns = torch.arange(NUM_HOST_COLUMNS, device=table.device)[:, None]
        table = write(table, (columns, forks[None, :, 1]), table[:NUM_HOST_COLUMNS, forks[:, 0]])
        token_ids = write(token_ids, (forks[:, 1],), token_ids[forks[:, 0]])
    if len(ledger):
        columns = torch.arange(NUM_HOST_COLUMNS, device=table.device)
        table = write(table, (columns, ledger[:, :1]), ledger[:, 1:])
    if len(tokens):
        token_ids = write(token_ids, (tokens[:, 0], tokens[:, 1]), tokens[:, 2])
    room = state.room
    if len(rooms):
        room = write(room, (rooms[:, 0],), rooms[:, 1])
    block_tables = state.block_tables
    if blocks:
        pairs = zip(block_tables, blocks, strict=True)
        block_tables = tuple(write(t, (b[:, 0], b[:, 1]), b[:, 2]) for t, b in pairs)
    renewed = (ledger[:, 0], forks[:, 1], drafts[:, 0])
    return replace(
        state,
        ledger=Ledger(table, _drafts(state.ledger.drafts, renewed, drafts, kernels)),
        kv=_prepared_blocks(state, zeros, copies, kernels),
        token_ids=token_ids,
        block_tables=block_tables,
        room=room,
        sampling=_sampling(state.sampling, inbox, sampling, kernels),
        layout=_layout(state.layout, inbox, layout),
        inbox=Inbox(inbox.data[:0], InboxShape()),
        draft_probs=_certain(state.draft_probs, drafts, kernels),
    )


def _views(words: Tensor, shape: InboxShape) -> list[Tensor]:
    """The packed words as one view [entries, words of an entry] per section, in the order of InboxShape's fields."""
    layout = [(0 if shape.layout is None else 2 * shape.layout + 1, 1)]
    ledger = [(shape.ledger, 1 + NUM_HOST_COLUMNS)]
    sampling = [(shape.sampling, 1 + NUM_WORDS)]
    tokens, rooms = [(shape.tokens, 3)], [(shape.rooms, 2)]
    blocks, copies = [(n, 3) for n in shape.blocks], [(n, 2) for n in shape.copies]
    zeros, forks, drafts = [(n, 1) for n in shape.zeros], [(shape.forks, 2)], [(shape.drafts, 3)]
    sizes = layout + ledger + sampling + tokens + rooms + blocks + copies + zeros + forks + drafts
    parts = torch.split(words, [count * width for count, width in sizes])
    return [part.view(count, width) for part, (count, width) in zip(parts, sizes, strict=True)]


def _sections(inbox: Inbox) -> tuple[Any, ...]:
    """The views, those of KV groups together."""
    views, shape = _views(inbox.data, inbox.shape), inbox.shape
    after_blocks = 5 + len(shape.blocks)
    after_copies = after_blocks + len(shape.copies)
    return (
        views[0][:, 0],
        *views[1:5],
        tuple(views[5:after_blocks]),
        tuple(views[after_blocks:after_copies]),
        tuple(view[:, 0] for view in views[after_copies:-2]),
        *views[-2:],
    )


def _drafts(
    old: Tensor | None, renewed: tuple[Tensor, ...], entries: Tensor, kernels: Kernels
) -> Tensor | None:
    """The rows' drafts: none where a row is another request's or was forked, and what the plan says of the rest."""
    if old is None:
        assert not len(entries), "drafts for a state that was made without places for them"
        return None
    if not any(map(len, renewed)):
        return old
    old = kernels.write(old, (torch.cat(renewed),), old.new_full((), -1))
    if not len(entries):
        return old
    written: Tensor = kernels.write(old, (entries[:, 0], entries[:, 1]), entries[:, 2])
    return written


def _certain(probs: Tensor | None, entries: Tensor, kernels: Kernels) -> Tensor | None:
    """What drafts were drawn from: those that a plan brings were not, and stand for themselves."""
    if probs is None or not len(entries):
        return probs
    certain = torch.arange(probs.shape[-1], device=probs.device) == entries[:, 2:]
    written: Tensor = kernels.write(probs, (entries[:, 0], entries[:, 1]), certain)
    return written


def _sampling(old: SamplingRows, inbox: Inbox, entries: Tensor, kernels: Kernels) -> SamplingRows:
    """The sampling rows with these entries: (row, bits of floats, integers)."""
    constraints = inbox.constraints if inbox.has_constraints else old.constraints
    if inbox.floats is None:
        return SamplingRows(old.floats, old.table, constraints)
    rows, floats = (entries[:, 0],), _views(inbox.floats, inbox.shape)[2]
    return SamplingRows(
        floats=kernels.write(old.floats, rows, floats[:, 1 : 1 + NUM_FLOATS]),
        table=kernels.write(old.table, rows, entries[:, 1 + NUM_FLOATS :]),
        constraints=constraints,
    )


def _layout(old: Layout, inbox: Inbox, words: Int32[Tensor, " words"]) -> Layout:
    if inbox.bounds is None:
        return old
    count = inbox.shape.layout
    if count is None:
        return Layout(old.row_of_index, old.query_start_loc, inbox.bounds)
    return Layout(words[:count], words[count:], inbox.bounds)


def _prepared_blocks(
    state: StepState, zeros: tuple[Tensor, ...], copies: tuple[Tensor, ...], kernels: Kernels
) -> tuple[Tensor, ...]:
    """Every layer's cache with the blocks of its group zeroed and copied."""
    if not zeros and not copies:
        return state.kv
    cache = []
    for kv, group in zip(state.kv, state.group_of_layer, strict=True):
        if zeros and len(zeros[group]):
            kv = kernels.zero_blocks(kv, zeros[group])
        if copies and len(copies[group]):
            kv = kernels.copy_blocks(kv, copies[group][:, 0], copies[group][:, 1])
        cache.append(kv)
    return tuple(cache)
