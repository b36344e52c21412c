"""`absorb`: an inbox taken in; what plans put into it is tested with `plan_step`."""

from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import given

from purestep.kernels.reference import reference
from purestep.pure.absorb import absorb
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.plan import Inbox, InboxShape
from purestep.pure.records.sampling_rows import NUM_WORDS
from purestep.pure.records.state import NUM_HOST_COLUMNS, StepState
from tests.laws import assert_pure, equal
from tests.leaves import EMPTY, initial
from tests.profiles import examples
from tests.schedules import LIMITS, Schedule, drive, seeds


def filled_state(seed: int = 0) -> StepState:
    """A state with other numbers in every place of every leaf."""
    state, generator = initial(), torch.Generator().manual_seed(seed)
    kv = tuple(torch.rand(kv.shape, generator=generator) for kv in state.kv)
    tables = tuple(
        torch.randint(1, 60, t.shape, generator=generator, dtype=torch.int32) for t in state.block_tables
    )
    tokens = torch.randint(0, 16, state.token_ids.shape, generator=generator, dtype=torch.int32)
    return replace(state, kv=kv, block_tables=tables, token_ids=tokens)


def inbox(*words: Any, **shape: Any) -> Inbox:
    """An inbox with these sections, in order."""
    data = np.concatenate([np.asarray(part, np.int32).reshape(-1) for part in words])
    floats = data.view(np.float32) if "sampling" in shape else None
    return Inbox(data, shape=InboxShape(**shape), floats=floats).to("cpu")


def test_an_empty_inbox_is_the_identity() -> None:
    """The same object comes back."""
    state = initial()
    assert absorb(state, kernels=reference) is state
    emptied = absorb(replace(state, inbox=inbox([1, 0, 3], tokens=1)), kernels=reference)
    assert emptied is not state
    assert absorb(emptied, kernels=reference) is emptied


@examples(0.3)
@given(seeds)
def test_it_is_pure_and_empties_the_inbox(rng: Random) -> None:
    """The plan of any batch, into a state full of other numbers."""
    *_, moment = drive(Schedule(rng), 5)
    plan = plan_step(moment.after, EMPTY)
    state = assert_pure(absorb, replace(filled_state(), inbox=plan.inbox.to("cpu")), kernels=reference)
    assert state.inbox.is_empty
    assert len(state.inbox.data) == 0


def test_what_is_not_named_is_the_same_object() -> None:
    """A grown block table leaves every other leaf alone."""
    state = filled_state()
    after = absorb(replace(state, inbox=inbox([2, 3, 9], blocks=(1, 0))), kernels=reference)
    assert after.block_tables[0][2, 3] == 9
    assert (after.block_tables[0] != state.block_tables[0]).sum() <= 1
    assert equal(after.block_tables[1], state.block_tables[1])
    for name in ("kv", "token_ids", "layout"):
        assert getattr(after, name) is getattr(state, name)
    assert after.ledger.table is state.ledger.table
    assert after.sampling.table is state.sampling.table


def test_blocks_are_zeroed_first_and_copied_second() -> None:
    """Into the layers of their group only; a copied block is read before anything is written."""
    state = filled_state()
    words = [[1, 2], [2, 3], [3, 4]]  # 1 -> 2 -> 3 -> 4 at once
    after = absorb(replace(state, inbox=inbox(words, [3, 7], copies=(3, 0), zeros=(2, 0))), kernels=reference)
    before, now = state.kv[0], after.kv[0]
    assert torch.equal(now[2], before[1])
    assert torch.equal(now[3], before[2])
    assert not now[4].any()  # a copy of block 3, which was zeroed
    assert not now[7].any()
    untouched = [i for i in range(len(before)) if i not in (2, 3, 4, 7)]
    assert torch.equal(now[untouched], before[untouched])
    assert after.kv[1] is state.kv[1]


def test_an_inbox_may_be_padded() -> None:
    """Entries that name the null row, or copy block 0 onto itself, change nothing that is read."""
    state, null = filled_state(), LIMITS.null_row
    ledger, sampling = [null] + [0] * NUM_HOST_COLUMNS, [null] + [0] * NUM_WORDS
    sections = (
        ledger * 2,
        sampling * 2,
        [null, 0, 0] * 3,
        [null, 0],
        [null, 0, 0],
        [null, 0, 0],
        [0, 0] * 2,
        [0, 0],
        [0],
        [0],
    )
    shape = {"ledger": 2, "sampling": 2, "tokens": 3, "rooms": 1}
    shape |= {"blocks": (1, 1), "copies": (2, 1), "zeros": (1, 1)}
    after = absorb(replace(state, inbox=inbox(*sections, **shape)), kernels=reference)
    assert equal(after.ledger, state.ledger)
    assert equal(after.token_ids[:null], state.token_ids[:null])
    assert equal(after.sampling.table[:null], state.sampling.table[:null])
    assert equal(after.sampling.floats[:null], state.sampling.floats[:null])
    assert equal(after.room[:null], state.room[:null])
    for old, new in zip((*state.kv, *state.block_tables), (*after.kv, *after.block_tables), strict=True):
        if old.dtype == torch.int32:
            assert equal(old[:null], new[:null])
        else:
            assert equal(old[1:], new[1:])
    assert after.layout is state.layout


def test_the_step_counter_and_other_rows_stay() -> None:
    """An admission writes its own row of the ledger, and not the counter of steps."""
    state = filled_state()
    table = torch.arange(state.ledger.table.numel(), dtype=torch.int32).view_as(state.ledger.table)
    state = replace(state, ledger=replace(state.ledger, table=table))
    row = [5, 6, 1, 20, 1, 0]
    after = absorb(replace(state, inbox=inbox([2, *row], ledger=1)), kernels=reference).ledger.table
    assert after[:NUM_HOST_COLUMNS, 2].tolist() == row
    assert after[NUM_HOST_COLUMNS:, 2].tolist() == table[NUM_HOST_COLUMNS:, 2].tolist()
    others = [0, 1, 3, 4]
    assert torch.equal(after[:, others], table[:, others])
