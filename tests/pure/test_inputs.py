"""`prepare_inputs` and `build_attention_metadata` against lists, worked examples, and themselves with padding."""

from random import Random

import pytest
import torch
from hypothesis import given

from purestep.kernels.reference import reference
from purestep.pure.initial import initial_state
from purestep.pure.inputs import build_attention_metadata, prepare_inputs
from purestep.pure.padding import pad_batch
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.inputs import BatchDescriptor, StepInputs
from purestep.pure.records.state import LEDGER_COLUMNS, Ledger, StepState
from purestep.pure.update import update_states
from tests.laws import assert_pure, equal
from tests.leaves import EMPTY, absorbed, initial, reflecting
from tests.profiles import examples
from tests.schedules import LIMITS, Schedule, drive, seeds
from tests.tiny import Loop, decode, new_request, scheduled, settled, tiny_llama


def prepared(state: StepState) -> StepInputs:
    return prepare_inputs(state, kernels=reference)


@examples(0.4)
@given(seeds)
def test_inputs_are_what_plain_lists_say(rng: Random) -> None:
    """Ids, positions, slots, lengths, logits indices and discards, request by request; slots never collide."""
    schedule = Schedule(rng)
    for moment in drive(schedule, 8):
        batch, counts = moment.after, moment.output.num_scheduled_tokens_by_id
        if not batch.req_ids:
            continue
        inputs = prepared(reflecting(batch))
        starts = inputs.query_start_loc.tolist()
        for index, (req_id, count) in enumerate(counts.items()):
            life, row = schedule.lives[req_id], batch.row_of[req_id]
            first = int(batch.columns.num_computed_tokens_settled[row])
            own, places = slice(starts[index], starts[index + 1]), range(first, first + count)
            assert inputs.positions[own].tolist() == list(places)
            assert inputs.input_ids[own].tolist() == life.tokens[first : first + count]
            for group, size in enumerate(LIMITS.block_sizes):
                slots = [life.blocks[group][p // size] * size + p % size for p in places]
                assert inputs.slot_mapping[group, own].tolist() == slots
            assert inputs.seq_lens[index] == first + count
            assert inputs.logits_indices[index] == own.stop - 1
            assert bool(inputs.discard[index]) == (first + count < len(life.tokens))
        assert starts[-1] == inputs.input_ids.numel() == sum(counts.values())
        for slots_of_group in inputs.slot_mapping.tolist():
            assert len(set(slots_of_group)) == len(slots_of_group)


@examples(0.5)
@given(seeds)
def test_padding_changes_nothing_of_the_real_part(rng: Random) -> None:
    """Padded tokens write into the null block, padded requests attend to nothing and keep nothing."""
    *_, moment = drive(Schedule(rng), rng.randint(1, 6))
    batch = moment.after
    if not batch.req_ids:
        return
    bounds = batch.layout.bounds
    more_reqs = rng.randrange(LIMITS.max_num_reqs - bounds.num_reqs + 1)
    shape = BatchDescriptor(bounds.num_tokens + rng.randrange(4), bounds.num_reqs + more_reqs)
    plain, padded = reflecting(batch), reflecting(pad_batch(batch, shape))
    inputs, wider = prepared(plain), prepared(padded)
    tokens, reqs = slice(bounds.num_tokens), slice(bounds.num_reqs)
    for name, kept in (
        ("input_ids", tokens),
        ("positions", tokens),
        ("seq_lens", reqs),
        ("logits_indices", reqs),
        ("discard", reqs),
        ("query_start_loc", slice(bounds.num_reqs + 1)),
    ):
        assert equal(getattr(wider, name)[kept], getattr(inputs, name))
    assert equal(wider.slot_mapping[:, tokens], inputs.slot_mapping)
    assert len(wider.input_ids) == shape.num_tokens
    for size, slots in zip(LIMITS.block_sizes, wider.slot_mapping[:, bounds.num_tokens :], strict=True):
        assert ((slots >= 0) & (slots < size)).all()
    assert not wider.seq_lens[bounds.num_reqs :].any()
    assert wider.discard[bounds.num_reqs :].all()
    assert ((wider.input_ids >= 0) & (wider.input_ids < LIMITS.vocab_size)).all()
    metadata = build_attention_metadata(padded, wider, kernels=reference)
    for group, real in zip(
        metadata.groups, build_attention_metadata(plain, inputs, kernels=reference).groups, strict=True
    ):
        assert equal(group.block_table[reqs], real.block_table)


@examples(0.2)
@given(seeds)
def test_they_are_pure(rng: Random) -> None:
    """No leaf changes."""
    *_, moment = drive(Schedule(rng), 4)
    if moment.after.req_ids:
        state = reflecting(moment.after)
        assert_pure(
            build_attention_metadata,
            state,
            assert_pure(prepare_inputs, state, kernels=reference),
            kernels=reference,
        )


def limits(**changes: object) -> BatchLimits:
    fields = {
        "max_num_reqs": 4,
        "max_model_len": 100,
        "vocab_size": 16,
        "block_sizes": (4,),
        "num_blocks": (99,),
    }
    return BatchLimits(**(fields | changes))  # type: ignore[arg-type]


def laid_out(batch: InputBatch) -> StepInputs:
    """Inputs of a batch that is reached from nothing."""
    model, _ = tiny_llama(groups=tuple(range(len(batch.limits.block_sizes))))
    empty = InputBatch.make_empty(batch.limits)
    return prepared(absorbed(initial_state(model, batch.limits), batch, empty))


def test_three_requests_end_to_end() -> None:
    """The worked example of the specification: n = [2, 5, 3] after c = [4, 0, 7] computed tokens."""
    lengths, computed, counts = (6, 5, 10), (4, 0, 7), {"a": 2, "b": 5, "c": 3}
    new = [
        new_request(
            name, tuple(range(length)), (tuple(range(1 + 3 * i, 4 + 3 * i)),), num_computed_tokens=done
        )
        for i, (name, length, done) in enumerate(zip(counts, lengths, computed, strict=True))
    ]
    inputs = laid_out(update_states(InputBatch.make_empty(limits()), scheduled(*new, counts=counts)))
    assert inputs.positions.tolist() == [4, 5, 0, 1, 2, 3, 4, 7, 8, 9]
    assert inputs.input_ids.tolist() == [4, 5, 0, 1, 2, 3, 4, 7, 8, 9]
    assert inputs.query_start_loc.tolist() == [0, 2, 7, 10]
    assert inputs.seq_lens.tolist() == [6, 5, 10]
    assert inputs.logits_indices.tolist() == [1, 6, 9]
    assert inputs.discard.tolist() == [False] * 3


def test_slots_follow_the_block_table() -> None:
    """Block size 4, table [7, 2]: positions 3 and 4 go to slots 31 and 8; slots are int64."""
    new = new_request("a", (1, 2, 3, 4, 5), ((7, 2),), num_computed_tokens=3)
    inputs = laid_out(update_states(InputBatch.make_empty(limits()), scheduled(new, counts={"a": 2})))
    assert inputs.slot_mapping.tolist() == [[31, 8]]
    assert inputs.slot_mapping.dtype == torch.int64


def test_a_step_of_two_prefills() -> None:
    """The specification's trace, step 1: a is not finished, b is."""
    new = [new_request("a", (1, 2, 3, 4, 5), ((3, 5),)), new_request("b", (1, 2, 3, 4, 5, 6), ((1, 2),))]
    batch = update_states(InputBatch.make_empty(limits()), scheduled(*new, counts={"a": 4, "b": 6}))
    inputs = laid_out(batch)
    assert inputs.query_start_loc.tolist() == [0, 4, 10]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert inputs.slot_mapping.tolist() == [[12, 13, 14, 15, 4, 5, 6, 7, 8, 9]]
    assert inputs.seq_lens.tolist() == [4, 6]
    assert inputs.discard.tolist() == [True, False]
    assert inputs.logits_indices.tolist() == [3, 9]


@pytest.mark.parametrize(
    ("prompt", "computed", "count", "discarded"),
    [
        (10, 0, 4, True),
        (10, 4, 6, False),
        (10, 0, 10, False),
        (10, 0, 9, True),
        (15, 0, 15, False),
        (15, 0, 8, True),
    ],
)
def test_only_a_whole_history_is_sampled_from(
    prompt: int, computed: int, count: int, discarded: bool
) -> None:
    """A row is discarded while tokens are left that are known and not computed."""
    new = new_request("a", (1,) * prompt, (tuple(range(1, 6)),), num_computed_tokens=computed)
    inputs = laid_out(update_states(InputBatch.make_empty(limits()), scheduled(new, counts={"a": count})))
    assert inputs.discard.tolist() == [discarded]


def test_the_token_is_the_devices_own() -> None:
    """A decode step reads what the device sampled, which the host does not know yet."""
    batch = update_states(EMPTY, scheduled(new_request("a", (1, 2, 3), ((1, 2), (1, 2, 3))), counts={"a": 3}))
    known = reflecting(batch)
    next_batch = decode(settled(batch, token=9), "a")
    state = absorbed(known, next_batch, batch)
    table, tokens = state.ledger.table.clone(), state.token_ids.clone()
    table[:3, 0], tokens[0, 3] = (
        torch.tensor([3, 4, 1], dtype=torch.int32),
        6,
    )  # what the device did by itself
    inputs = prepared(replace(state, ledger=Ledger(table), token_ids=tokens))
    assert inputs.input_ids.tolist() == [6]
    assert inputs.positions.tolist() == [3]


def test_a_frozen_row_attends_to_nothing_and_writes_nothing() -> None:
    """It stays in the layout: length 0, slots in the null block, discarded."""
    batch = update_states(
        EMPTY,
        scheduled(
            new_request("a", (1, 2, 3), ((1, 2), (1, 2, 3))),
            new_request("b", (1, 2), ((3,), (4,))),
            counts={"a": 3, "b": 2},
        ),
    )
    state = reflecting(batch)
    table = state.ledger.table.clone()
    table[LEDGER_COLUMNS.index("active"), batch.row_of["a"]] = 0
    inputs = prepared(replace(state, ledger=Ledger(table)))
    assert inputs.seq_lens.tolist() == [0, 2]
    assert inputs.discard.tolist() == [True, False]
    for size, slots in zip(LIMITS.block_sizes, inputs.slot_mapping[:, :3], strict=True):
        assert (slots < size).all()


def test_metadata_is_cut_to_the_bound() -> None:
    """Block tables in the order of the batch, no wider than the longest sequence can need."""
    wide = limits(max_model_len=400, num_blocks=(400,))
    new = [new_request(name, (1,) * 3, ((i,),)) for i, name in enumerate("ab", 1)]
    batch = update_states(InputBatch.make_empty(wide), scheduled(*new, counts={"b": 3, "a": 3}))
    model, _ = tiny_llama(groups=(0,))
    state = absorbed(initial_state(model, wide), batch, InputBatch.make_empty(wide))
    metadata = build_attention_metadata(state, prepared(state), kernels=reference)
    assert batch.layout.bounds.max_seq_len == metadata.max_seq_len == 64
    assert metadata.max_query_len == 3
    (group,) = metadata.groups
    assert group.block_table.shape == (2, 64 // 4)
    assert group.block_table[:, 0].tolist() == [2, 1]


def test_a_row_at_the_end_of_the_model_stays_inside_its_tables() -> None:
    """A request that fills max_model_len runs idle after it, and no index leaves its array."""
    model, params = tiny_llama(groups=(0, 1))
    loop = Loop(model, params, replace(LIMITS, max_model_len=6))
    output = loop.step(scheduled(new_request("a", (1, 2, 3), ((1, 2), (1, 2, 3))), counts={"a": 3}))
    while output.active[0]:
        output = loop.decode("a")
    assert len(loop.tokens("a")) == 6
    output = loop.decode("a")
    assert output.sampled_token_ids.tolist() == [[-1]]
    assert initial().token_ids.shape[1] == LIMITS.max_model_len
