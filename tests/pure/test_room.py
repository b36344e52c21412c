"""Steps without a plan: a row goes on while its tokens are known, its blocks last and the layout's bound holds.

A step is repeated, or many are unrolled, and the host says nothing. What comes out is what planned steps give, or -1.
"""

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.state import StepState
from purestep.pure.settle import settle
from purestep.pure.step import step, unroll
from tests.laws import equal
from tests.profiles import examples
from tests.tiny import Loop, decode, new_request, scheduled
from tests.toy_model import VOCAB, next_token, toy_model

MODEL, PARAMS = toy_model((0, 1))
LIMITS = BatchLimits(
    max_num_reqs=3, max_model_len=96, vocab_size=VOCAB, block_sizes=(4, 2), num_blocks=(99, 199)
)


def history(prompt: Sequence[int], length: int) -> list[int]:
    """The prompt and what the model says behind it."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(next_token(tokens))
    return tokens


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    return [tuple((3 * i + 5 * j) % VOCAB for j in range(length)) for i, length in enumerate(lengths)]


def blocks(index: int, group: int, places: range) -> tuple[int, ...]:
    """Blocks of a request, which no other one has."""
    return tuple(1 + index * LIMITS.max_model_len // LIMITS.block_sizes[group] + place for place in places)


def prefilled(lengths: Sequence[int], rooms: Sequence[int]) -> Loop:
    """Requests a, b, ... that are about to decode, with blocks for so many tokens, at least, in every KV group."""
    loop, names = Loop(MODEL, PARAMS, LIMITS), "abc"[: len(lengths)]
    new = [
        new_request(
            name,
            prompt,
            tuple(blocks(i, g, range(-(-room // size))) for g, size in enumerate(LIMITS.block_sizes)),
        )
        for i, (name, prompt, room) in enumerate(zip(names, prompts(*lengths), rooms, strict=True))
    ]
    loop.step(scheduled(*new, counts=dict(zip(names, lengths, strict=True))))
    return loop


def planned(loop: Loop, **changes: object) -> StepState:
    """The state with the plan of the next decode step."""
    batch = decode(loop.batch, *loop.batch.row_of, **changes)
    inbox = plan_step(batch, loop.absorbed).inbox.to("cpu")
    loop.batch = loop.absorbed = batch
    return replace(loop.state, inbox=inbox)


def assert_told_or_idle(outputs: Sequence[StepOutput], lengths: Sequence[int], most: Sequence[int]) -> None:
    """Row by row, the foretold tokens as long as the computed length stays within `most`, then -1 and no change."""
    for row, (prompt, length, limit) in enumerate(zip(prompts(*lengths), lengths, most, strict=True)):
        told = history(prompt, length + 2 + len(outputs))
        for i, output in enumerate(outputs, 1):
            runs = length + i <= limit
            assert output.sampled_token_ids[row].tolist() == [told[length + i] if runs else -1]
            assert output.num_computed_tokens[row] == min(length + i, max(limit, length))
            assert output.active[row]


def room_of(length: int, more: int) -> int:
    """Tokens that blocks for so many hold: those of the KV group with the least."""
    return min(-(-(length + more) // size) * size for size in LIMITS.block_sizes)


sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))  # of a prompt, and of the room behind it


@examples(0.2)
@given(st.lists(sizes, min_size=1, max_size=3), st.integers(1, 12))
def test_unrolled_rows_idle_where_their_blocks_end(requests: list[tuple[int, int]], num_steps: int) -> None:
    """Each for itself: what a row can still say is what planned steps say."""
    lengths = [length for length, _ in requests]
    loop = prefilled(lengths, [length + more for length, more in requests])
    _, outputs = unroll(MODEL, PARAMS, planned(loop), num_steps, kernels=reference)
    assert_told_or_idle(outputs, lengths, [room_of(*request) for request in requests])


@examples(0.2)
@given(sizes, st.integers(1, 12))
def test_a_row_that_idled_goes_on_when_it_gets_blocks(request_: tuple[int, int], num_steps: int) -> None:
    """The host learns what was done and plans on, as if there had been no more steps than that."""
    (length, more), name = request_, "a"
    loop = prefilled([length], [length + more])
    loop.state, outputs = unroll(MODEL, PARAMS, planned(loop), num_steps, kernels=reference)
    num_told = min(num_steps, room_of(length, more) - length)
    loop.batch = settle(loop.batch, loop.batch, outputs[0])
    for output in outputs[1:num_told]:
        stepped = decode(loop.batch, name)
        assert not plan_step(stepped, loop.absorbed).inbox.brings_data
        loop.batch = settle(stepped, stepped, output)
    new = tuple(
        blocks(0, group, range(-(-(length + more) // size), 96 // size)) for group, size in enumerate((4, 2))
    )
    _, output = step(MODEL, PARAMS, planned(loop, new_block_ids={name: new}), kernels=reference)
    told = history(prompts(length)[0], length + num_told + 2)
    assert loop.tokens(name) == told[:-1]
    assert output.sampled_token_ids.tolist() == [told[-1:]]


@examples(0.15)
@given(st.lists(st.integers(57, 64), min_size=1, max_size=3))
def test_a_step_that_is_repeated_keeps_to_the_layouts_bound(lengths: list[int]) -> None:
    """Past it a kernel sees only part of a row's blocks: the row idles, and a plan with a higher bound wakes it."""
    loop = prefilled(lengths, [96] * len(lengths))
    state = planned(loop)
    bound = (state.inbox.bounds or state.layout.bounds).max_seq_len
    outputs = []
    for _ in range(10):
        state, output = step(MODEL, PARAMS, state, kernels=reference)
        outputs.append(output)
    assert bound < max(lengths) + 10
    assert_told_or_idle(outputs, lengths, [bound] * len(lengths))
    last = int(state.ledger.num_computed_tokens[0])
    wider = replace(state.layout, bounds=replace(state.layout.bounds, max_seq_len=128))
    _, output = step(MODEL, PARAMS, replace(state, layout=wider), kernels=reference)
    assert output.sampled_token_ids[0].tolist() == [history(prompts(*lengths)[0], last + 2)[-1]]


@examples(0.3)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=3), st.integers(1, 3))
def test_a_prefill_that_is_repeated_computes_no_token_that_nobody_knows(
    lengths: list[int], num_steps: int
) -> None:
    """Its layout runs as many tokens again, and only one of them has been sampled: the rows idle."""
    loop = prefilled(lengths, [96] * len(lengths))
    before = state = loop.state
    for _ in range(num_steps):
        state, output = step(MODEL, PARAMS, state, kernels=reference)
        assert output.sampled_token_ids.tolist() == [[-1]] * len(lengths)
        assert output.num_computed_tokens.tolist() == lengths
    assert equal(state.ledger.table[:-1, :-1], before.ledger.table[:-1, :-1])
    assert equal(state.token_ids[:-1], before.token_ids[:-1])
    assert all(equal(kv[1:], old[1:]) for kv, old in zip(state.kv, before.kv, strict=True))


def test_an_idle_row_writes_nothing_while_its_neighbour_runs() -> None:
    """Bit for bit, in every block but the null one."""
    before, _ = step(MODEL, PARAMS, planned(prefilled([4, 3], [5, 12])), kernels=reference)
    before = replace(before, room=before.room.minimum(torch.tensor([5, 12, 0, 96])).int())
    after, output = step(MODEL, PARAMS, before, kernels=reference)
    assert output.sampled_token_ids[0] == -1 and output.sampled_token_ids[1] >= 0
    assert equal(after.token_ids[0], before.token_ids[0])
    for group, (kv, old) in enumerate(zip(after.kv, before.kv, strict=True)):
        changed = (kv != old).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) - {0} == {blocks(1, group, range(3))[4 // LIMITS.block_sizes[group]]}
