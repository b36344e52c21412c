"""The ends of a step that verifies drafts, against loops over requests."""

from random import Random

import torch
from hypothesis import given
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.kernels.reference.ends import ACTIVE, COMPUTED, HAS_NAN, KNOWN, LIMIT, OUTPUTS, STEP
from tests.laws import assert_pure, equal
from tests.profiles import examples
from tests.schedules import seeds

LONGEST, BLOCK, NUM_ROWS = 24, 4, 5


def ledger_of(rng: Random) -> Tensor:
    """Rows with some computed and known tokens; the last is nobody's."""
    table = torch.zeros(7, NUM_ROWS + 1, dtype=torch.int32)
    for row in range(NUM_ROWS):
        known = rng.randrange(1, LONGEST - 4)
        table[COMPUTED, row] = known - 1 if rng.random() < 0.7 else rng.randrange(known)
        table[KNOWN, row], table[LIMIT, row] = known, rng.randrange(known + 1, LONGEST + 1)
        table[OUTPUTS, row], table[ACTIVE, row] = rng.randrange(known), rng.random() < 0.85
    table[STEP] = 3
    return table


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def some_drafts(rng: Random, num_drafts: int) -> Tensor:
    """Of every row, nobody's too, whatever order none and ids are in."""
    rows = [[rng.choice([-1, *range(50, 90)]) for _ in range(num_drafts)] for _ in range(NUM_ROWS + 1)]
    return torch.tensor(rows, dtype=torch.int32).view(NUM_ROWS + 1, num_drafts)


NO_DRAFTS = torch.zeros(NUM_ROWS + 1, 0, dtype=torch.int32)


@given(seeds)
def test_lay_out_with_drafts(rng: Random) -> None:
    """Known tokens, then as many drafts as there are, are asked for and have room; then the next request."""
    table, num_drafts = ledger_of(rng), rng.randrange(1, 4)
    drafts = torch.tensor(
        [[rng.choice([-1, *range(50, 90)]) for _ in range(num_drafts)] for _ in range(NUM_ROWS)]
        + [[-1] * num_drafts],
        dtype=torch.int32,
    )
    tapes = torch.arange((NUM_ROWS + 1) * LONGEST, dtype=torch.int32).view(-1, LONGEST) + 100
    blocks = torch.randperm((NUM_ROWS + 1) * LONGEST // BLOCK).to(torch.int32).view(NUM_ROWS + 1, -1) + 1
    room = integers([rng.randrange(LONGEST + 1) for _ in range(NUM_ROWS)] + [LONGEST])
    rows = [*rng.sample(range(NUM_ROWS), rng.randrange(1, NUM_ROWS + 1)), *[NUM_ROWS] * rng.randrange(2)]
    lens = [0 if row == NUM_ROWS else rng.randrange(1, 6) for row in rows]
    starts = integers([sum(lens[:i]) for i in range(len(lens) + 1)])
    num_tokens, longest = sum(lens) + rng.randrange(3), rng.randrange(8, LONGEST + 1)

    given_ = (reference, integers(rows), starts, table, drafts, tapes, (blocks,), room)
    ids, positions, slots, begins, seq_lens, wanted, discard, verified = reference.lay_out_drafts(
        *given_, block_sizes=(BLOCK,), num_tokens=num_tokens, max_seq_len=longest
    )

    expected, ends, told = list[tuple[int, int, int]](), [0], []
    for row, count in zip(rows, lens, strict=True):
        computed, known = int(table[COMPUTED, row]), int(table[KNOWN, row])
        asked, most = computed + count, min(int(room[row]), longest)
        own = drafts[row].tolist()
        own = own[: own.index(-1)] if -1 in own else own
        own = own[: max(min(asked, most) - known, 0)]
        end = min(asked, known + len(own))
        runs = bool(table[ACTIVE, row]) and asked <= known + num_drafts and end <= most
        for position in range(computed, end if runs else asked):
            token = int(tapes[row, position]) if position < known else own[position - known] if runs else None
            block = int(blocks[row, position // BLOCK]) if runs else 0
            expected.append((token, position, block * BLOCK + position % BLOCK))  # type: ignore[arg-type]
        ends.append(len(expected))
        own = own if runs else []
        told.append((end if runs else 0, not runs or end < known, own + [-1] * (num_drafts - len(own))))
    assert begins.tolist() == ends
    for index, (token, position, slot) in enumerate(expected):
        assert token is None or int(ids[index]) == token
        assert slot < BLOCK or int(positions[index]) == position
        assert int(slots[0, index]) == slot or slot < BLOCK > int(slots[0, index])
    assert (slots[0, len(expected) :] < BLOCK).all() and (ids >= 0).all()
    assert [
        (int(a), bool(b), c) for a, b, c in zip(seq_lens, discard, verified.tolist(), strict=True)
    ] == told
    for index, (_, _, own) in enumerate(told):
        count = sum(token >= 0 for token in own)
        last = max(ends[index + 1] - 1, 0)
        rows_wanted = [max(last - max(count - place, 0), 0) for place in range(num_drafts + 1)]
        assert wanted.unflatten(0, (len(rows), -1))[index].tolist() == rows_wanted


@given(seeds)
def test_advance_by_several_tokens(rng: Random) -> None:
    """Tokens are kept up to the first that stops the row or brings it to its limit; NaN counts if it is reached."""
    table, width = ledger_of(rng), rng.randrange(1, 5)
    tapes = torch.zeros(NUM_ROWS + 1, LONGEST + 4, dtype=torch.int32)
    rows = rng.sample(range(NUM_ROWS), rng.randrange(1, NUM_ROWS + 1))
    num_reqs = len(rows)
    lens = [rng.choice([0, int(table[KNOWN, row]) + width - 1]) for row in rows]
    discard = torch.tensor([rng.random() < 0.2 for _ in rows])
    has_nan = torch.tensor([rng.random() < 0.2 for _ in rows])
    counts = [rng.randrange(0 if has_nan[i] else 1, width + (not has_nan[i])) for i in range(num_reqs)]
    tokens = [[rng.randrange(90) for _ in range(n)] + [-1] * (width - n) for n in counts]
    stops = torch.tensor([[rng.random() < 0.2 for _ in range(width)] for _ in rows])
    sampled, drafts = torch.tensor(tokens, dtype=torch.int32), some_drafts(rng, width - 1)
    batch = (integers(rows), integers(lens), discard, sampled, stops, has_nan)
    after, left, taped, kept, computed, stays, is_nan = assert_pure(
        reference.advance_drafts, reference, table, drafts, tapes, *batch
    )

    expected, tapes = table.clone(), tapes.clone()
    expected[STEP] += 1
    for index, row in enumerate(rows):
        active = runs = bool(table[ACTIVE, row])
        runs = runs and lens[index] > 0
        own, ended = list[int](), False
        if runs and not discard[index]:
            for place, token in enumerate(tokens[index][: counts[index]]):
                own.append(token)
                tapes[row, table[KNOWN, row] + place] = token
                ended = bool(stops[index, place]) or int(table[KNOWN, row]) + place + 1 >= int(
                    table[LIMIT, row]
                )
                if ended:
                    break
        nan = runs and bool(has_nan[index]) and not ended
        expected[KNOWN, row] += len(own)
        expected[OUTPUTS, row] += len(own)
        if runs:
            last = lens[index] if discard[index] else int(expected[KNOWN, row]) - (not nan)
            expected[COMPUTED, row] = last
        expected[ACTIVE, row] = active and not ended and not nan
        expected[HAS_NAN, row] |= nan
        assert kept[index].tolist() == own + [-1] * (width - len(own))
        assert int(computed[index]) == int(expected[COMPUTED, row])
        assert (bool(stays[index]), bool(is_nan[index])) == (bool(expected[ACTIVE, row]), nan)
        drafts[row] = torch.where(kept[index, :1] >= 0, -1, drafts[row])
    assert torch.equal(after, expected) and torch.equal(left, drafts)
    assert torch.equal(taped[:-1], tapes[:-1]) and (taped >= 0).all()


@examples(0.3)
@given(seeds)
def test_one_token_each_is_advance(rng: Random) -> None:
    """What is defined twice is the same."""
    table, rows = ledger_of(rng), list(range(NUM_ROWS))
    tapes = torch.zeros(NUM_ROWS + 1, LONGEST + 4, dtype=torch.int32)
    lens = integers([rng.choice([0, int(table[KNOWN, row])]) for row in rows])
    flags = [torch.tensor([rng.random() < 0.3 for _ in rows]) for _ in range(3)]
    tokens = integers([rng.randrange(90) for _ in rows])
    discard, stops, has_nan = flags
    single = reference.advance(reference, table, tapes, integers(rows), lens, discard, tokens, stops, has_nan)
    told = torch.where(has_nan, -1, tokens)[:, None]
    after, _, *rest = reference.advance_drafts(
        reference, table, NO_DRAFTS, tapes, integers(rows), lens, discard, told, stops[:, None], has_nan
    )
    ours = after, *rest
    assert torch.equal(ours[0], single[0]) and torch.equal(ours[1][:-1], single[1][:-1])
    assert equal(ours[2][:, 0], single[2]) and all(map(equal, ours[3:], single[3:]))


@given(seeds)
def test_drafts_are_put_where_they_may_follow(rng: Random) -> None:
    """Up to the first that is none or that leaves no place for the token behind it; idle rows keep what they have."""
    table, num_drafts = ledger_of(rng), rng.randrange(1, 5)
    before, longest = some_drafts(rng, num_drafts), rng.randrange(8, LONGEST + 4)
    rows = [*rng.sample(range(NUM_ROWS), rng.randrange(1, NUM_ROWS + 1)), *[NUM_ROWS] * rng.randrange(2)]
    lens = [0 if row == NUM_ROWS else rng.randrange(3) for row in rows]
    sampled = integers([rng.choice([-1, 4, 5]) for _ in rows])[:, None].repeat(1, rng.randrange(1, 3))
    proposed = some_drafts(rng, num_drafts)[: len(rows)].to(rng.choice([torch.int32, torch.int64]))
    batch = (table, before, integers(rows), integers(lens), sampled, proposed)
    drafts, told = assert_pure(reference.put_drafts, reference, *batch, longest=longest)

    expected = before.clone()
    for index, row in enumerate(rows):
        budget = min(int(table[LIMIT, row]), longest) - int(table[KNOWN, row]) - 1
        own = list[int]()
        for draft in proposed[index].tolist() if sampled[index, 0] >= 0 else []:
            if draft < 0 or len(own) >= budget:
                break
            own.append(draft)
        assert told[index].tolist() == own + [-1] * (num_drafts - len(own))
        if lens[index]:
            expected[row] = told[index]
    assert told.dtype == torch.int32 and torch.equal(drafts, expected)
