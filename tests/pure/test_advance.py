"""`advance`: which tokens are kept, which rows go on, and what is left alone."""

from typing import Any

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from purestep.pure.advance import advance
from purestep.pure.inputs import prepare_inputs
from purestep.pure.record import replace
from purestep.pure.records.layout import Layout, LayoutBounds
from purestep.pure.records.outputs import SampledTokens, StepOutput
from purestep.pure.records.state import NUM_HOST_COLUMNS, Ledger, StepState
from tests.laws import assert_pure, equal
from tests.leaves import initial
from tests.schedules import LIMITS

NULL = LIMITS.null_row


@attrs.frozen
class Row:
    """A row of the ledger, and what the step samples for it."""

    computed: int
    known: int
    limit: int
    active: bool
    token: int
    stops: bool
    has_nan: bool
    count: int  # tokens that it runs
    room: int = 99

    @property
    def runs(self) -> bool:
        """Whether it is active and has blocks for them."""
        return self.active and self.computed + self.count <= self.room


@st.composite
def ledger_rows(draw: Any) -> Row:
    known = draw(st.integers(1, LIMITS.max_model_len - 1))
    computed = draw(st.integers(0, known - 1))
    count = draw(st.sampled_from([known - computed, draw(st.integers(1, known - computed))]))
    return Row(
        computed=computed,
        known=known,
        limit=draw(st.integers(known + 1, LIMITS.max_model_len)),
        active=draw(st.booleans()),
        token=draw(st.integers(0, 15)),
        stops=draw(st.booleans()),
        has_nan=draw(st.booleans()),
        count=count,
        room=draw(st.sampled_from([99, computed + count, computed + count - 1])),
    )


def laid_out(rows: list[Row], order: list[int]) -> StepState:
    """A state whose row `order[i]` is `rows[i]`; the other rows hold numbers of their own."""
    state = initial()
    table = torch.arange(state.ledger.table.numel(), dtype=torch.int32).view_as(state.ledger.table).clone()
    room = torch.zeros(table.shape[1], dtype=torch.int32)
    table[:, NULL], table[NUM_HOST_COLUMNS] = 0, 7
    starts = [0]
    for row, place in zip(rows, order, strict=True):
        values = [row.computed, row.known, 1, row.limit, row.active, 0]
        table[:NUM_HOST_COLUMNS, place] = torch.tensor(values, dtype=torch.int32)
        room[place] = row.room
        starts.append(starts[-1] + row.count)
    bounds = LayoutBounds(len(rows), starts[-1], max(row.count for row in rows), 64)
    layout = Layout(torch.tensor(order, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32), bounds)
    tokens = torch.randint(
        0, 16, state.token_ids.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    return replace(state, ledger=Ledger(table), room=room, layout=layout, token_ids=tokens)


def advanced(state: StepState, rows: list[Row]) -> tuple[StepState, StepOutput]:
    sampled = SampledTokens(
        token_ids=torch.tensor([row.token for row in rows]),
        stops=torch.tensor([row.stops for row in rows]),
        has_nan=torch.tensor([row.has_nan for row in rows]),
        logprobs_tensors=None,
    )
    return assert_pure(advance, state, prepare_inputs(state, kernels=reference), sampled, kernels=reference)


@given(st.lists(ledger_rows(), min_size=1, max_size=4), st.permutations(range(4)))
def test_it_does_what_is_written_for_each_row(rows: list[Row], places: list[int]) -> None:
    """An active row with room computes its tokens. It keeps a token if its history is complete and its logits are
    numbers, and goes on unless that token stops it, fills it, or the logits were NaN. Other rows stay as they are."""
    order = places[: len(rows)]
    before = laid_out(rows, order)
    after, output = advanced(before, rows)
    for index, (row, place) in enumerate(zip(rows, order, strict=True)):
        complete = row.computed + row.count == row.known
        kept = row.runs and complete and not row.has_nan
        has_nan = row.runs and row.has_nan
        goes_on = row.active and not has_nan and not (kept and (row.stops or row.known + 1 == row.limit))
        computed = row.computed + row.count * row.runs
        values = [computed, row.known + kept, 1 + kept, row.limit, goes_on, has_nan]
        assert after.ledger.table[:NUM_HOST_COLUMNS, place].tolist() == values
        expected = before.token_ids[place].tolist()
        if kept:
            expected[row.known] = row.token
        assert after.token_ids[place].tolist() == expected
        assert output.sampled_token_ids[index].tolist() == [row.token if kept else -1]
        assert output.num_computed_tokens[index] == computed
        assert bool(output.active[index]) == goes_on
        assert bool(output.has_nan[index]) == has_nan


@given(st.lists(ledger_rows(), min_size=1, max_size=3), st.permutations(range(4)))
def test_other_rows_are_left_alone(rows: list[Row], places: list[int]) -> None:
    """Rows that do not run keep ledger and tokens; the counter of steps goes up for all; the null row never acts."""
    before = laid_out(rows, places[: len(rows)])
    after, _ = advanced(before, rows)
    others = places[len(rows) :]
    assert equal(
        after.ledger.table[:NUM_HOST_COLUMNS, others], before.ledger.table[:NUM_HOST_COLUMNS, others]
    )
    assert equal(after.token_ids[others], before.token_ids[others])
    assert after.ledger.step.tolist() == [8] * (LIMITS.max_num_reqs + 1)
    assert not after.ledger.active[NULL]
    for name in ("kv", "block_tables", "sampling", "layout", "inbox"):
        assert getattr(after, name) is getattr(before, name)


@given(st.lists(ledger_rows(), min_size=1, max_size=3), st.permutations(range(4)), st.integers(1, 3))
def test_padded_requests_keep_nothing(rows: list[Row], places: list[int], num_padding: int) -> None:
    """Padding with the null row changes no real row, and the null row stays as it was."""
    order = places[: len(rows)]
    before = laid_out(rows, order)
    plain, output = advanced(before, rows)
    layout = before.layout
    wider = Layout(
        torch.cat([layout.row_of_index, torch.full((num_padding,), NULL, dtype=torch.int32)]),
        torch.cat([layout.query_start_loc, layout.query_start_loc[-1:].expand(num_padding)]),
        replace(layout.bounds, num_reqs=len(rows) + num_padding),
    )
    garbage = Row(0, 0, 0, False, 3, True, True, 0)
    after, padded = advanced(replace(before, layout=wider), rows + [garbage] * num_padding)
    assert equal(after.ledger, plain.ledger)
    assert equal(after.token_ids[:NULL], plain.token_ids[:NULL])
    assert equal(padded.sampled_token_ids[: len(rows)], output.sampled_token_ids)
    assert padded.sampled_token_ids[len(rows) :].tolist() == [[-1]] * num_padding


def test_nan_stays_on_record() -> None:
    """A row that had NaN logits once is told apart for ever after."""
    row = Row(computed=2, known=3, limit=9, active=True, token=1, stops=False, has_nan=True, count=1)
    state, output = advanced(laid_out([row], [1]), [row])
    assert output.has_nan.tolist() == [True]
    state, output = advanced(state, [attrs.evolve(row, has_nan=False)])
    assert output.has_nan.tolist() == [False]  # this step's logits
    assert state.ledger.has_nan.tolist()[1]
    assert output.sampled_token_ids.tolist() == [[-1]]
