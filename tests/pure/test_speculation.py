"""Steps that verify drafts: whatever is guessed, the tokens, the ledger and the cache are those of plain steps."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._pytree import tree_flatten

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.pure.absorb import absorb
from purestep.pure.errors import InvalidParameterError
from purestep.pure.inputs import prepare_inputs
from purestep.pure.models.model import Model
from purestep.pure.record import replace
from purestep.pure.records.logits_processor import History, LogitsProcessor
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.plan import Inbox, InboxShape
from purestep.pure.records.sampling_extras import SamplingExtras
from purestep.pure.records.sampling_params import SamplingParams, validate
from purestep.pure.records.state import LEDGER_COLUMNS, StepState
from purestep.pure.sampling_extras import grouped
from purestep.pure.step import execute, sample, step, unroll
from tests.laws import assert_frame, assert_one_writer, assert_prefix_kept, assert_pure, equal, written_slots
from tests.profiles import examples
from tests.pure.test_step import WORLDS
from tests.schedules import seeds
from tests.speculation import (
    MAX_LEN,
    NUM_DRAFTS,
    guessed,
    history,
    kv_below,
    plain,
    prefilled,
    run_plain,
    verified,
)
from tests.tiny import tiny_llama
from tests.toy_model import VOCAB, toy_model

TOY, LLAMA = toy_model((0, 1)), tiny_llama(vocab_size=VOCAB, groups=(0, 1))
STEP = LEDGER_COLUMNS.index("step")
TOLERANCE = 1e-9  # of keys and values, which are float64 and of the order of 1

Requests = Sequence[tuple[Sequence[int], SamplingParams]]


def greedy_requests(rng: Random) -> Requests:
    """Up to four requests, with rules of every kind."""

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(VOCAB), count))

    def params() -> SamplingParams:
        rules: list[dict[str, Any]] = [
            {"min_tokens": rng.randrange(6), "stop_token_ids": some(3)},
            {"stop_token_ids": some(1)},
            {"min_tokens": rng.randrange(6), "stop_token_ids": some(VOCAB - 1)},
            {"repetition_penalty": 1.7, "frequency_penalty": 0.5},
            {"presence_penalty": 2.0},
            {"logit_bias": {rng.randrange(VOCAB): 4.0}},
            {"bad_words_token_ids": (some(1), some(2), some(3))},
            {"allowed_token_ids": some(5)},
        ]
        chosen = [own for own in rules if rng.random() < 0.3]
        named = {name: value for own in chosen for name, value in own.items()}
        drawn = SamplingParams(temperature=0, ignore_eos=True, max_tokens=rng.randrange(6, 14), **named)
        try:
            validate(drawn, vocab_size=VOCAB, max_model_len=MAX_LEN)
        except InvalidParameterError:  # rules that leave no token
            return params()
        return drawn

    return [
        ([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 7))], params())
        for _ in range(rng.randrange(1, 5))
    ]


def some_drafts(rng: Random, truth: Sequence[int]) -> list[int]:
    """Drafts that are right for a while, and then perhaps not."""
    drafts = list(truth[: rng.randrange(NUM_DRAFTS + 1)])
    drafts += [rng.randrange(VOCAB) for _ in range(rng.randrange(NUM_DRAFTS + 1 - len(drafts)))]
    return drafts


def check_plain(model: Model, params: Params, requests: Requests, rng: Random) -> int:
    """Verify drafts until every request has ended; how many tokens were kept beside those that plain steps keep."""
    state = prefilled(model, params, requests)
    rows, end, ledgers = list(range(len(requests))), state, {}
    while True:
        for row in rows:
            ledgers[row, int(end.ledger.num_known_tokens[row])] = end.ledger.table[:STEP, row]
        if not end.ledger.active[rows].any():
            break
        end, _ = step(model, params, plain(end, rows), kernels=reference)
    whole = [history(end, row) for row in rows]
    won = 0
    for _ in range(20):
        chosen = rng.sample(rows, rng.randrange(1, len(rows) + 1))
        known = {row: len(history(state, row)) for row in rows}
        drafts = {row: some_drafts(rng, whole[row][known[row] :]) for row in chosen}
        lens = {row: rng.randrange(1, NUM_DRAFTS + 2) for row in chosen if rng.random() < 0.5}
        before = guessed(state, drafts, lens)
        executed = execute(model, params, before, kernels=reference)
        assert_one_writer(executed.state, executed.inputs)
        assert_frame(before, executed.state, written_slots(executed.state, executed.inputs))
        state, output = sample(executed, kernels=reference)
        assert_prefix_kept(before, state, rows)
        for index, row in enumerate(chosen):
            kept = [token for token in output.sampled_token_ids[index].tolist() if token >= 0]
            assert history(state, row) == whole[row][: known[row] + len(kept)]
            assert kept == whole[row][known[row] : known[row] + len(kept)]
            assert bool(kept) is bool(before.ledger.active[row])
            assert int(output.num_computed_tokens[index]) == int(state.ledger.num_computed_tokens[row])
            won += max(len(kept) - 1, 0)
        for row in rows:
            assert torch.equal(state.ledger.table[:STEP, row], ledgers[row, len(history(state, row))])
            for ours, theirs in zip(kv_below(state, row), kv_below(end, row), strict=True):
                torch.testing.assert_close(ours, theirs[: len(ours)], rtol=0, atol=TOLERANCE)
    return won


@examples(0.4)
@given(seeds)
def test_greedy_speculation_is_greedy(rng: Random) -> None:
    """Right, wrong, too many, too few: tokens, ledger and cache after every step are what plain steps make."""
    check_plain(*TOY, greedy_requests(rng), rng)


def drawn_requests(rng: Random) -> Requests:
    """The same, drawing with seeds of their own."""
    return [
        (
            prompt,
            replace(
                own,
                temperature=rng.choice([0.3, 1.0]),
                top_k=rng.choice([0, 5]),
                top_p=rng.choice([0.8, 1.0]),
                seed=rng.randrange(100),
            ),
        )
        for prompt, own in greedy_requests(rng)
    ]


@examples(0.4)
@given(seeds)
def test_certain_drafts_change_nothing_of_what_is_drawn(rng: Random) -> None:
    """Drafts without stated probabilities stand if they are what a plain step draws: token by token the same text."""
    check_plain(*TOY, drawn_requests(rng), rng)


@examples(0.2)
@given(seeds)
def test_greedy_speculation_is_greedy_on_a_model(rng: Random) -> None:
    check_plain(*LLAMA, greedy_requests(rng), rng)


def test_right_drafts_are_kept() -> None:
    """Else the laws above would hold of steps that keep no draft at all."""
    requests = [((1, 2, 3), SamplingParams(temperature=0, ignore_eos=True, max_tokens=13))]
    assert sum(check_plain(*TOY, requests, Random(seed)) for seed in range(5)) >= 15


@pytest.mark.parametrize("stop_at", range(5))
@pytest.mark.parametrize("min_tokens", range(5))
def test_min_tokens_ends_within_the_drafts(stop_at: int, min_tokens: int) -> None:
    """The stop id is the only id that is wanted, and becomes legal at a draft, the bonus token or later."""
    free = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
    whole = history(run_plain(*TOY, prefilled(*TOY, [((5, 3), free)])), 0)
    params = replace(free, stop_token_ids=(whole[2 + stop_at],), min_tokens=min_tokens)
    state = prefilled(*TOY, [((5, 3), params)])
    end = run_plain(*TOY, state)
    truth = history(end, 0)
    while state.ledger.active[0]:
        known = len(history(state, 0))
        state, _ = verified(*TOY, state, {0: truth[known : known + NUM_DRAFTS]})
        assert history(state, 0) == truth[: len(history(state, 0))]
    assert torch.equal(state.ledger.table[:STEP], end.ledger.table[:STEP])


RANDOM = SamplingParams(
    seed=3, temperature=0.9, top_k=8, top_p=0.95, min_p=0.01, presence_penalty=0.3, max_tokens=12, ignore_eos=True,
    logprobs=2, logprobs_mode="processed_logprobs", kept_mass=True,
)  # fmt: skip


@examples(0.2)
@given(seeds)
def test_no_drafts_are_plain_to_the_bit(rng: Random) -> None:
    """Tokens, log-probabilities, ledger and tapes of rows that draw, whatever room is left for drafts."""
    requests = [
        ([rng.randrange(VOCAB) for _ in range(3)], replace(RANDOM, seed=rng.randrange(99))) for _ in range(3)
    ]
    state = theirs = prefilled(*TOY, requests)
    for _ in range(4):
        state, output = verified(*TOY, state, {0: [], 1: [], 2: []})
        theirs, expected = step(*TOY, plain(theirs, [0, 1, 2]), kernels=reference)
        assert equal(output.sampled_token_ids[:, 0], expected.sampled_token_ids[:, 0])
        assert (output.sampled_token_ids[:, 1:] == -1).all()
        assert equal(state.ledger, theirs.ledger) and equal(state.token_ids[:-1], theirs.token_ids[:-1])
        for name in ("logprobs_tensors", "kept_mass"):
            leaves, others = (tree_flatten(getattr(o, name))[0] for o in (output, expected))
            assert all(equal(a[:: NUM_DRAFTS + 1], b) for a, b in zip(leaves, others, strict=True))


@examples(0.4)
@given(seeds)
def test_kept_tokens_have_the_log_probabilities_of_plain_steps(rng: Random) -> None:
    """Raw and processed, of every accepted draft and of the token behind: those of the same history, step by step."""
    modes = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
    params = [
        replace(
            RANDOM, temperature=rng.choice([0, 0.7]), logprobs_mode=mode, logit_bias={2: 1.5}, max_tokens=30
        )
        for mode in modes
    ]
    requests = [((1, 4, 2, i), own) for i, own in enumerate(params)]
    state = prefilled(*TOY, requests)
    rows = list(range(4))
    guesses = {row: [rng.randrange(VOCAB) for _ in range(3)] for row in rows}
    _, output = verified(*TOY, state, guesses)
    single = state
    for place in range(NUM_DRAFTS + 1):
        kept = output.sampled_token_ids[:, place]
        # The plain step of the same history, whose own token is replaced by the one that was kept.
        stepped, expected = step(*TOY, plain(single, rows), kernels=reference)
        ours, theirs = output.logprobs_tensors, expected.logprobs_tensors
        assert ours is not None and theirs is not None
        for row in rows:
            if kept[row] < 0:
                continue
            at = row * (NUM_DRAFTS + 1) + place
            told = dict(
                zip(
                    theirs.logprob_token_ids[row, 1:].tolist(), theirs.logprobs[row, 1:].tolist(), strict=True
                )
            )
            assert ours.logprob_token_ids[at, 1:].tolist() == list(told)
            assert ours.logprobs[at, 1:].tolist() == list(told.values())
            assert int(ours.logprob_token_ids[at, 0]) == int(kept[row])
            assert int(kept[row]) not in told or float(ours.logprobs[at, 0]) == told[int(kept[row])]
        where = stepped.ledger.num_known_tokens[rows].long() - 1
        tapes = stepped.token_ids.clone()
        tapes[rows, where] = kept.clamp(min=0)
        single = replace(stepped, token_ids=tapes)


def echoes(logits: Tensor, history: History, params: dict[str, Tensor]) -> Tensor:
    """Wants the token before last once more, and some other one at every third output."""
    place = history.lengths - history.prompt_lengths
    before = history.token_ids.gather(1, (history.lengths[:, None] - 2).long())
    wanted = torch.where((place % 3 == 0)[:, None], params["other"][:, None], before)
    return logits + 30.0 * (torch.arange(logits.shape[1]) == wanted)


def test_processors_see_the_history_of_their_own_row_of_logits() -> None:
    """Accepted drafts are outputs to them: the tokens, and values of chosen ids, are those of plain steps."""
    params = replace(
        RANDOM, max_tokens=12, temperature=0.5, logprobs_mode="raw_logprobs", logprob_token_ids=(3, 4)
    )
    kinds = [
        replace(params, logits_processors=[LogitsProcessor(echoes, {"other": 5})]),
        replace(params, temperature=0, logits_processors=[LogitsProcessor(echoes, {"other": 2})]),
        replace(params, logits_processors=[LogitsProcessor(echoes, {"other": 1}, argmax_invariant=True)]),
    ]
    rows = list(range(3))
    plain_kinds = [replace(own, logits_processors=(), logprob_token_ids=None) for own in kinds]
    state = prefilled(*TOY, [((1, 4, 2, i), own) for i, own in enumerate(plain_kinds)])
    chosen = grouped([own.logits_processors for own in kinds], [own.greedy for own in kinds])
    extras = SamplingExtras(chosen, torch.tensor([[3, 4]] * 3)).to("cpu")

    def stepped(state: StepState) -> tuple[StepState, StepOutput]:
        return sample(execute(*TOY, state, kernels=reference), kernels=reference, extras=extras)

    end, of_ids = state, []
    while end.ledger.active[rows].any():
        end, output = stepped(plain(end, rows))
        of_ids.append(output.id_logprobs)
    whole = [history(end, row) for row in rows]
    at, num_kept = [0] * 3, 0
    while state.ledger.active[rows].any():
        drafts = {row: whole[row][len(history(state, row)) :][:NUM_DRAFTS] for row in rows}
        state, output = stepped(guessed(state, drafts))
        for row in rows:
            kept = int((output.sampled_token_ids[row] >= 0).sum())
            for place in range(kept):
                told = output.id_logprobs[row * (NUM_DRAFTS + 1) + place]  # type: ignore[index]
                assert equal(told, of_ids[at[row] + place][row])
            at[row] += kept
            num_kept += max(kept - 1, 0)
        assert [history(state, row) for row in rows] == [
            whole[row][: len(history(state, row))] for row in rows
        ]
    assert num_kept > 12


def test_a_step_with_drafts_is_pure() -> None:
    state = prefilled(*LLAMA, [((1, 2, 3), RANDOM), ((4, 5), RANDOM)])
    assert_pure(step, *LLAMA, guessed(state, {0: [1, 2], 1: [3]}), kernels=reference)


def test_donating_kernels_make_the_same_step() -> None:
    state = prefilled(*LLAMA, [((1, 2, 3), RANDOM), ((4, 5), RANDOM)])
    before = guessed(state, {0: [1, 2], 1: [3]})
    expected, output = step(*LLAMA, before, kernels=reference)
    owned = torch.utils._pytree.tree_map(torch.clone, before)
    ours, told = step(
        *LLAMA, owned, kernels=replace(donating, **{n: getattr(reference, n) for n in ("prepare", "linear")})
    )
    assert equal(told.sampled_token_ids, output.sampled_token_ids)
    assert equal(ours.ledger, expected.ledger) and equal(ours.token_ids[:-1], expected.token_ids[:-1])
    assert (
        ours.ledger.drafts is owned.ledger.drafts
        or ours.ledger.drafts.data_ptr() == owned.ledger.drafts.data_ptr()
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["greedy", "random", "constrained", "probs"])
def test_a_verify_step_in_four_worlds(world: str, kind: str, unchecked_records: None) -> None:
    """Eager = vmap over a batch of one = a make_fx trace = one compiled graph."""
    params = {
        "greedy": SamplingParams(temperature=0, ignore_eos=True, max_tokens=9),
        "random": RANDOM,
        "constrained": replace(
            RANDOM,
            min_tokens=4,
            stop_token_ids=(3,),
            logit_bias={2: 1.5},
            bad_words_token_ids=((4, 5), (6,)),
            allowed_token_ids=range(1, 11),
        ),
        "probs": RANDOM,
    }[kind]
    model, weights = LLAMA
    state = guessed(prefilled(model, weights, [((1, 2, 3), params), ((4, 5), params)]), {0: [1, 2], 1: [3]})
    if kind == "probs":
        state = replace(state, draft_probs=torch.full((3, NUM_DRAFTS, VOCAB), 1 / VOCAB))

    def function(params: Params, state: StepState) -> Any:
        return step(model, params, state, kernels=reference)

    with torch.no_grad():
        eager, other = function(weights, state), WORLDS[world](function)(weights, state)
    (leaves, structure), (others, other_structure) = tree_flatten(eager), tree_flatten(other)
    assert structure == other_structure
    for ours, theirs in zip(leaves, others, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-12)


def test_unroll_repeats_a_layout_with_drafts() -> None:
    """Rows that have no drafts left run one token of the places they are given; the bits are those of single steps."""
    state = guessed(prefilled(*TOY, [((1, 2, 3), RANDOM), ((4, 5), RANDOM)]), {0: [1, 2], 1: []})
    at_once, outputs = unroll(*TOY, state, 4, kernels=reference)
    for output in outputs:
        state, single = step(*TOY, state, kernels=reference)
        assert equal(output, single)
    assert equal(at_once.ledger, state.ledger) and equal(at_once.token_ids, state.token_ids)


def test_a_row_runs_idle_that_was_given_more_than_known_tokens_and_drafts() -> None:
    """As without drafts one that was given more than its known tokens: a layout run again, say."""
    state = prefilled(*TOY, [((1, 2, 3), RANDOM), ((4, 5), RANDOM)])
    after, output = verified(*TOY, state, {0: [1], 1: [1]}, {0: NUM_DRAFTS + 2, 1: 2})
    assert (
        output.sampled_token_ids[0].tolist() == [-1] * (NUM_DRAFTS + 1)
        and output.sampled_token_ids[1, 0] >= 0
    )
    assert torch.equal(after.ledger.table[:STEP, 0], state.ledger.table[:STEP, 0])
    assert after.ledger.drafts is not None and after.ledger.drafts[0].tolist() == [1, -1, -1]


def test_room_trims_drafts() -> None:
    """A row goes as far as its blocks reach, and never less far than without drafts."""
    requests = [((1, 2, 3), SamplingParams(temperature=0, ignore_eos=True, max_tokens=20))]
    state = prefilled(*TOY, requests)
    truth = history(run_plain(*TOY, state), 0)
    for room, num_kept in ((3, 0), (4, 1), (5, 2), (6, 3), (7, 4), (8, 4)):
        limited = replace(state, room=torch.tensor([room, 48], dtype=torch.int32))
        _, output = verified(*TOY, limited, {0: truth[4:7]})
        assert int((output.sampled_token_ids >= 0).sum()) == num_kept


def test_tokens_behind_missing_drafts_are_padding() -> None:
    """Tokens of later requests move up: what attention sees is a batch of requests with as many tokens as they run."""
    state = prefilled(*TOY, [((1, 2, 3), RANDOM), ((4, 5), RANDOM), ((6,), RANDOM)])
    inputs = prepare_inputs(guessed(state, {2: [7], 0: [], 1: [8, 9, 10]}), kernels=reference)
    assert inputs.query_start_loc.tolist() == [0, 2, 3, 7]
    assert inputs.positions[:7].tolist() == [1, 2, 3, 2, 3, 4, 5]
    last = [int(state.token_ids[row, int(state.ledger.num_known_tokens[row]) - 1]) for row in range(3)]
    assert inputs.input_ids[:7].tolist() == [last[2], 7, last[0], last[1], 8, 9, 10]
    assert (inputs.slot_mapping[:, 7:] < 4).all() and (inputs.slot_mapping[:, :7] >= 4).all()
    assert inputs.logits_indices.tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 3, 4, 5, 6]
    assert inputs.drafts is not None
    assert inputs.drafts.tolist() == [[7, -1, -1], [-1, -1, -1], [8, 9, 10]]
    assert inputs.seq_lens.tolist() == [3, 4, 6]


def broken(value: float) -> tuple[Model, Params]:
    """The toy, whose logits behind token 0 are all of this value."""
    model, params = TOY
    last = model.pieces[-1]

    def say(piece: Any, weights: Any, carried: Any, inputs: Any, *, kernels: Any) -> Any:
        (logits,) = last.function(piece, weights, carried, inputs, kernels=kernels)
        return (torch.where(inputs.input_ids[:, None] == 0, value, logits),)

    return replace(model, pieces=(*model.pieces[:-1], replace(last, function=say))), params


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_logits_without_a_distribution_end_a_row_where_they_stand(value: float, temperature: float) -> None:
    """What was accepted before is kept, as plain steps would; what lies behind a draft that fell is never looked at."""
    model, params = broken(value)
    wants_zero = SamplingParams(
        temperature=temperature, seed=1, logit_bias={0: 100.0}, ignore_eos=True, max_tokens=20
    )
    state = prefilled(*TOY, [((1, 2, 3), wants_zero)] * 2)
    places = torch.tensor([0, 1]), torch.tensor([3, 3])
    state = replace(state, token_ids=state.token_ids.index_put(places, torch.tensor(5, dtype=torch.int32)))
    after, output = step(model, params, guessed(state, {0: [0, 7, 7], 1: [7, 0, 0]}), kernels=reference)
    assert output.sampled_token_ids.tolist() == [[0, -1, -1, -1]] * 2
    assert output.has_nan.tolist() == [True, False] and output.active.tolist() == [False, True]
    expected = [state]
    for _ in range(2):
        expected.append(step(model, params, plain(expected[-1], [0, 1]), kernels=reference)[0])
    assert torch.equal(after.ledger.table[:STEP, 0], expected[2].ledger.table[:STEP, 0])
    assert torch.equal(after.ledger.table[:STEP, 1], expected[1].ledger.table[:STEP, 1])


def inbox(**sections: list[list[int]]) -> Inbox:
    """An inbox of these sections, which are in the order of InboxShape's fields."""
    words = [word for entries in sections.values() for entry in entries for word in entry]
    shape = InboxShape(**{name: len(entries) for name, entries in sections.items()})
    return Inbox(torch.tensor(words, dtype=torch.int32), shape)


def test_an_inbox_brings_all_the_drafts_of_a_row() -> None:
    """A row that it names has those and no others, a row that is written anew or forked has none of before."""
    state = prefilled(*TOY, [((1, 2, 3), RANDOM)] * 4)
    state = replace(state, ledger=replace(state.ledger, drafts=torch.full((5, 3), 7, dtype=torch.int32)))
    anew = [[1, 0, 3, 0, 9, 1, 0]]
    brought = inbox(ledger=anew, forks=[[0, 2]], drafts=[[3, 0, 5], [3, 1, 6]])
    before = replace(state, inbox=brought)
    after = assert_pure(absorb, before, kernels=reference)
    assert after.ledger.drafts is not None
    assert after.ledger.drafts.tolist() == [[7] * 3, [-1] * 3, [-1] * 3, [5, 6, -1], [7] * 3]
    drawn = replace(before, draft_probs=torch.full((5, 3, VOCAB), 0.25))
    probs = absorb(drawn, kernels=reference).draft_probs
    assert probs is not None
    assert probs[3, :2].nonzero().tolist() == [[0, 5], [1, 6]] and (probs[:3] == 0.25).all()
    cleared = absorb(replace(state, inbox=inbox(drafts=[[3, 0, -1]])), kernels=reference)
    assert cleared.ledger.drafts is not None and cleared.ledger.drafts[3].tolist() == [-1] * 3


def test_plain_steps_leave_no_drafts_behind() -> None:
    """A guess at what follows is none any more once something follows."""
    state = prefilled(*TOY, [((1, 2, 3), RANDOM)] * 2)
    state = replace(state, ledger=replace(state.ledger, drafts=torch.full((3, 3), 7, dtype=torch.int32)))
    after, _ = step(*TOY, plain(state, [1]), kernels=reference)
    assert after.ledger.drafts is not None and after.ledger.drafts[:2].tolist() == [[7] * 3, [-1] * 3]
