"""`absorb`: the inbox, taken into the state."""

from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.record import replace
from purestep.pure.records.layout import Layout
from purestep.pure.records.plan import Inbox, InboxShape
from purestep.pure.records.sampling_rows import NUM_COLUMNS, SamplingRows
from purestep.pure.records.state import NUM_HOST_COLUMNS, Ledger, StepState


def absorb(state: StepState, *, kernels: Kernels) -> StepState:
    """The state with its inbox taken in and emptied; with nothing in it, the same object.

    Blocks are zeroed first and copied second, so that a copy may fill a fresh block before the step writes behind
    it. Absorbing the plan of a to b and then that of b to c equals absorbing that of a to c.
    """
    inbox = state.inbox
    if inbox.is_empty:
        return state
    layout, ledger, sampling, tokens, blocks, copies, zeros = _sections(inbox)
    write = kernels.write
    table = state.ledger.table
    if len(ledger):
        columns = torch.arange(NUM_HOST_COLUMNS, device=table.device)
        table = write(table, (columns, ledger[:, :1]), ledger[:, 1:])
    rows = state.sampling.table
    if len(sampling):
        rows = write(rows, (sampling[:, 0],), sampling[:, 1:])
    token_ids = state.token_ids
    if len(tokens):
        token_ids = write(token_ids, (tokens[:, 0], tokens[:, 1]), tokens[:, 2])
    block_tables = state.block_tables
    if blocks:
        pairs = zip(block_tables, blocks, strict=True)
        block_tables = tuple(write(t, (b[:, 0], b[:, 1]), b[:, 2]) for t, b in pairs)
    constraints = inbox.constraints if inbox.has_constraints else state.sampling.constraints
    return replace(
        state,
        ledger=Ledger(table),
        kv=_prepared_blocks(state, zeros, copies, kernels),
        token_ids=token_ids,
        block_tables=block_tables,
        sampling=SamplingRows(rows, constraints),
        layout=_layout(state.layout, inbox, layout),
        inbox=Inbox(inbox.data[:0], InboxShape()),
    )


def _sections(inbox: Inbox) -> tuple[Any, ...]:
    """The packed words as one view per section, in the order of InboxShape's fields."""
    shape = inbox.shape
    layout = [(0 if shape.layout is None else 2 * shape.layout + 1, 1)]
    ledger = [(shape.ledger, 1 + NUM_HOST_COLUMNS)]
    sampling = [(shape.sampling, 1 + NUM_COLUMNS)]
    tokens = [(shape.tokens, 3)]
    blocks, copies = [(n, 3) for n in shape.blocks], [(n, 2) for n in shape.copies]
    zeros = [(n, 1) for n in shape.zeros]
    sizes = layout + ledger + sampling + tokens + blocks + copies + zeros
    words = inbox.data.split([count * width for count, width in sizes])
    views = [part.view(count, width) for part, (count, width) in zip(words, sizes, strict=True)]
    after_blocks = 4 + len(blocks)
    after_copies = after_blocks + len(copies)
    return (
        views[0][:, 0],
        *views[1:4],
        tuple(views[4:after_blocks]),
        tuple(views[after_blocks:after_copies]),
        tuple(view[:, 0] for view in views[after_copies:]),
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
