"""`update_states` against plain dicts and lists, over random legal schedules; and what it refuses."""

from dataclasses import dataclass
from random import Random
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import InvalidParameterError, SchedulerOutputError
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import CachedRequestData, SchedulerOutput
from purestep.pure.update import update_states
from tests.laws import assert_pure, digest
from tests.profiles import examples
from tests.schedules import DRAFTED, Moment, Schedule, drive, seeds
from tests.schedules import LIMITS as ALL_LIMITS
from tests.tiny import cached_requests, column, decode, new_request, scheduled, settled

LIMITS = BatchLimits(max_num_reqs=3, max_model_len=16, vocab_size=8, block_sizes=(4,), num_blocks=(20,))

lags = st.integers(0, 2)


@examples(0.5)
@given(seeds, lags)
def test_laws_of_any_legal_schedule(rng: Random, lag: int) -> None:
    """After every step the batch is what plain lists say, and the laws below hold."""
    schedule = Schedule(rng, rng.choice((ALL_LIMITS, DRAFTED)))
    for moment in drive(schedule, 20, max_unsettled=lag):  # which checks the batch against the lists
        assert_partition(moment)
        assert_stable(moment)
        assert_shared(moment)


@examples(0.1)
@given(seeds, lags)
def test_it_is_pure(rng: Random, lag: int) -> None:
    """Neither the batch nor the output changes, and a second call gives the same."""
    for moment in drive(Schedule(rng, rng.choice((ALL_LIMITS, DRAFTED))), 10, max_unsettled=lag):
        assert_pure(update_states, moment.before, moment.output)


def assert_partition(moment: Moment) -> None:
    """Every row is free or belongs to one request; a request has a row or is parked; a step runs each row once."""
    batch, output = moment.after, moment.output
    used = [row for row, request in enumerate(batch.rows.requests) if request is not None]
    assert sorted(batch.row_of.values()) == used
    assert not batch.row_of.keys() & batch.parked.keys()
    for entries in (batch.rows.tokens, *batch.rows.block_ids):
        assert [row for row, item in enumerate(entries) if item is not None] == used
    assert batch.layout.row_of_index.tolist() == [batch.row_of[r] for r in batch.req_ids]
    columns, sits_out = batch.columns, sorted(set(used) - set(batch.layout.row_of_index.tolist()))
    on_its_way = columns.num_computed_tokens_bound > columns.num_computed_tokens_settled
    assert on_its_way[sits_out].all()  # who does not run is parked, but for what waits for its tokens
    assert batch.req_ids == output.req_ids
    assert np.diff(batch.layout.query_start_loc).tolist() == output.num_scheduled_tokens.tolist()


def assert_stable(moment: Moment) -> None:
    """A request keeps its row for as long as it runs in every step."""
    before, after, output = moment.before, moment.after, moment.output
    moved = output.finished_req_ids | output.scheduled_cached_reqs.resumed_req_ids
    for req_id in (before.row_of.keys() & after.row_of.keys()) - moved:
        assert before.row_of[req_id] == after.row_of[req_id]


def assert_shared(moment: Moment) -> None:
    """What did not change is the same object, so `is` answers whether it did."""
    before, after, output = moment.before, moment.after, moment.output
    for name in (field.name for field in attrs.fields(type(before.columns))):
        old, new = getattr(before.columns, name), getattr(after.columns, name)
        assert not new.flags.writeable
        if (
            after.rows.requests is before.rows.requests
        ):  # an admission writes counts that may be written again
            assert new is old or not np.array_equal(new, old), name
    moved = output.finished_req_ids | output.scheduled_cached_reqs.resumed_req_ids
    for req_id in (before.row_of.keys() & after.row_of.keys()) - moved:
        row = before.row_of[req_id]
        for then, now in zip(before.rows.block_ids, after.rows.block_ids, strict=True):
            assert now[row] is then[row] or now[row] != then[row]


def decoding(num_reqs: int = 2) -> InputBatch:
    """Requests a, b, ... with prompts of 3 tokens, one block each, and one output, everything settled."""
    names = "abc"[:num_reqs]
    new = [new_request(name, (1, 2, 3), ((i + 1,),)) for i, name in enumerate(names)]
    empty = InputBatch.make_empty(LIMITS)
    return settled(update_states(empty, scheduled(*new, counts=dict.fromkeys(names, 3))))


def test_a_steady_step_shares_everything_but_the_bound() -> None:
    """Decoding goes on: rows, ids, layout and all other columns are the very same objects."""
    before = settled(decode(decoding(), "a", "b", new_block_ids={"a": ((7,),), "b": ((8,),)}))
    after = decode(before, "a", "b")
    shared = ("limits", "rows", "row_of", "parked", "req_ids", "layout")
    assert all(getattr(after, name) is getattr(before, name) for name in shared)
    names = {field.name for field in attrs.fields(type(before.columns))}
    same = {name for name in names if getattr(after.columns, name) is getattr(before.columns, name)}
    assert names - same == {"num_computed_tokens_bound"}


def test_the_layout_goes_on_while_only_its_bound_grows() -> None:
    """Past a bucket the layout has another bound and the same arrays."""
    limits = replace(LIMITS, max_model_len=256, num_blocks=(99,))
    new = new_request("a", tuple(range(8)) * 8, (tuple(range(1, 31)),))
    before = settled(update_states(InputBatch.make_empty(limits), scheduled(new, counts={"a": 64})))
    lengths = []
    for _ in range(12):
        after = decode(before, "a")
        lengths.append(after.layout.bounds.max_seq_len)
        if before.layout.bounds.max_query_len == 1:
            assert after.layout.query_start_loc is before.layout.query_start_loc
            assert after.layout.row_of_index is before.layout.row_of_index
            assert (after.layout is before.layout) == (lengths[-1] == lengths[-2])
        before = settled(after)
    assert lengths == [72] * 8 + [80] * 4


def test_finished_and_submitted_again_in_one_step() -> None:
    """The old one is dropped first; the new one has nothing of it."""
    before = decoding()
    new = new_request("a", (6, 6), ((9,),), SamplingParams(temperature=0.5))
    output = scheduled(new, cached=cached_requests(before, "b"), counts={"b": 1, "a": 2}, finished=("a",))
    after = update_states(before, output)
    row = after.row_of["a"]
    assert after.rows.tokens[row].tolist() == [6, 6]  # type: ignore[union-attr]
    assert after.rows.block_ids[0][row].tolist() == [9]  # type: ignore[union-attr]
    assert after.rows.requests[row].sampling_params.temperature == 0.5  # type: ignore[union-attr]
    assert after.columns.num_computed_tokens_settled[row] == 0


def test_a_known_id_that_is_new_starts_over() -> None:
    """A new request with the id of a running one takes its place: the longer prompt of a streaming request."""
    before = decoding()
    new = new_request("a", (1, 2, 3, 5, 4), ((1, 9),), num_computed_tokens=3)
    after = update_states(
        before, scheduled(new, cached=cached_requests(before, "b"), counts={"a": 2, "b": 1})
    )
    row = after.row_of["a"]
    assert after.rows.tokens[row].tolist() == [1, 2, 3, 5, 4]  # type: ignore[union-attr]
    assert after.columns.num_prompt_tokens[row] == 5
    assert after.parked == {}


@pytest.mark.parametrize(("resumed", "blocks"), [(False, [1, 7]), (True, [7])])
def test_blocks_are_appended_or_replaced(resumed: bool, blocks: list[int]) -> None:
    """A running request's new blocks follow those it has; a resumed one's list is complete."""
    before = decoding()
    ids = frozenset({"a"} if resumed else ())
    cached = cached_requests(before, "b", "a", new_block_ids={"a": ((7,),)}, resumed_req_ids=ids)
    if resumed:
        cached = replace(cached, num_computed_tokens=column(3, 0))
    after = update_states(before, scheduled(cached=cached, counts={"a": 4 if resumed else 1, "b": 1}))
    assert after.rows.block_ids[0][after.row_of["a"]].tolist() == blocks  # type: ignore[union-attr]
    assert after.rows.tokens[after.row_of["a"]].tolist() == [1, 2, 3, 5]  # type: ignore[union-attr]


def test_outputs_are_cut_back() -> None:
    """The scheduler takes outputs back: tokens end where it says, and the row is written anew."""
    before = settled(decode(decoding(), "a", "b", new_block_ids={"b": ((8,),)}), token=6)
    cached = replace(
        cached_requests(before, "a", "b"), num_computed_tokens=column(2, 4), num_output_tokens=column(0, 2)
    )
    after = update_states(before, scheduled(cached=cached, counts={"a": 1, "b": 1}))
    row, other = after.row_of["a"], after.row_of["b"]
    assert after.rows.tokens[row].tolist() == [1, 2, 3]  # type: ignore[union-attr]
    assert before.rows.tokens[row].tolist() == [1, 2, 3, 5, 6]  # type: ignore[union-attr]
    assert after.columns.num_computed_tokens_settled[row] == 2
    assert after.rows.requests[row] is not before.rows.requests[row]
    assert after.rows.requests[other] is before.rows.requests[other]


def test_the_order_of_the_batch_is_that_of_the_output() -> None:
    """Index follows `req_ids`, row does not."""
    before = decoding(3)
    cached = cached_requests(before, "a", "b", "c")
    after = update_states(before, scheduled(cached=cached, counts={"c": 1, "a": 1, "b": 1}))
    assert after.req_ids == ("c", "a", "b")
    assert after.layout.row_of_index.tolist() == [2, 0, 1]


@dataclass
class Refused:
    """An output that contradicts `decoding()`, and what the message must say."""

    output: Any
    message: str


def _steady(**changes: Any) -> Any:
    """The next decode step of a and b, with some fields of CachedRequestData or SchedulerOutput exchanged."""

    def make(batch: InputBatch) -> SchedulerOutput:
        cached = cached_requests(batch, "a", "b")
        own = {k: v for k, v in changes.items() if hasattr(cached, k)}
        output = scheduled(cached=replace(cached, **own), counts={"a": 1, "b": 1})
        return replace(output, **{k: v for k, v in changes.items() if k not in own and k != "req_ids"})

    return make


def _with_new(counts: dict[str, int] | None = None, **fields: Any) -> Any:
    """The next decode step of a and b, and a new request c."""

    def make(batch: InputBatch) -> SchedulerOutput:
        new = replace(new_request("c", (1, 2, 3), ((9,),)), **fields)
        return scheduled(
            new, cached=cached_requests(batch, "a", "b"), counts={"a": 1, "b": 1, "c": 3} | (counts or {})
        )

    return make


REFUSED = {
    "an unknown id": Refused(
        lambda b: scheduled(
            cached=replace(cached_requests(b, "a", "b"), req_ids=("a", "z")), counts={"a": 1, "z": 1}
        ),
        "'z'",
    ),
    "an id that is scheduled twice": Refused(
        lambda b: replace(
            scheduled(cached=cached_requests(b, "a", "a"), counts={"a": 1}),
            req_ids=("a", "a"),
            num_scheduled_tokens=column(1, 1),
        ),
        "exactly once",
    ),
    "an id that is known and new": Refused(
        lambda b: scheduled(
            new_request("a", (1,), ((9,),)), cached=cached_requests(b, "a", "b"), counts={"a": 1, "b": 1}
        ),
        "exactly once",
    ),
    "an id without tokens": Refused(
        lambda b: scheduled(cached=cached_requests(b, "a", "b"), counts={"a": 1}), "exactly once"
    ),
    "zero tokens": Refused(_steady(num_scheduled_tokens=column(1, 0)), "'b': 0 tokens"),
    "negative tokens": Refused(_steady(num_scheduled_tokens=column(-1, 1)), "'a': -1 tokens"),
    "too few counts": Refused(_steady(num_scheduled_tokens=column(1)), "one for each"),
    "too few computed counts": Refused(_steady(num_computed_tokens=column(3)), "one for each"),
    "too few output counts": Refused(_steady(num_output_tokens=column(1)), "one for each"),
    "tokens past the known end": Refused(
        _steady(num_scheduled_tokens=column(1, 2)), "'b': 2 tokens.*4 known"
    ),
    "computed tokens that were not": Refused(
        _steady(num_computed_tokens=column(4, 3)), "after 4 computed.*3 of them"
    ),
    "negative computed tokens": Refused(_steady(num_computed_tokens=column(-1, 3)), "-1 computed"),
    "negative outputs": Refused(_steady(num_output_tokens=column(-1, 1)), "only outputs"),
    "a block that does not exist": Refused(
        _steady(new_block_ids={"a": ((20,),)}), "blocks 20 to 20.*0 to 19"
    ),
    "a block that is no number": Refused(
        _steady(new_block_ids={"a": (("9",),)}), "'a' got blocks .*whole num"
    ),
    "a block that is a fraction": Refused(
        _steady(new_block_ids={"a": ((9.0,),)}), "'a' got blocks .*whole num"
    ),
    "blocks that are no lists": Refused(_steady(new_block_ids={"a": (9,)}), "'a' got blocks .*whole numbers"),
    "a new request's block that is a fraction": Refused(_with_new(block_ids=((9.5,),)), "'c' got blocks"),
    "a request that runs and was preempted": Refused(
        _steady(preempted_req_ids=frozenset({"a"})), "'a' is scheduled.*preempted"
    ),
    "a negative block": Refused(_steady(new_block_ids={"a": ((-1,),)}), "blocks -1 to -1"),
    "blocks for too many groups": Refused(_steady(new_block_ids={"a": ((9,), (9,))}), "2 KV groups"),
    "a copy into the null block": Refused(_steady(block_copies=(((3, 0),),)), "blocks 0 to 3.*copy"),
    "a copy of a block that does not exist": Refused(_steady(block_copies=(((20, 3),),)), "1 to 19"),
    "copies for too many groups": Refused(_steady(block_copies=((), ((1, 2),))), "2 KV groups"),
    "a negative block to zero": Refused(_steady(new_block_ids_to_zero=((-1,),)), "zero in KV group 0"),
    "blocks for a stranger": Refused(_steady(new_block_ids={"z": ((9,),)}), "'z'"),
    "a stranger resumed": Refused(_steady(resumed_req_ids=frozenset({"z"})), "'z'"),
    "resumed without blocks": Refused(_steady(resumed_req_ids=frozenset({"a"})), "'a'.*complete list"),
    "embeddings of a prompt": Refused(
        _with_new(prompt_embeds=np.zeros((3, 2))), "'c' brings prompt_embeds: not supp"
    ),
    "a block to copy that is zeroed first": Refused(
        _steady(block_copies=(((2, 9),),), new_block_ids_to_zero=((2, 9),)),
        "block 2 of KV group 0 is to be copied, and to be zeroed",
    ),
    "a prompt that is embeddings in part": Refused(
        _with_new(prompt_is_token_ids=(True, False, True)), "'c' brings prompt_is_token_ids: not supported"
    ),
    "features of images": Refused(
        _with_new(mm_features=("an image",)), "'c' brings mm_features: not supported"
    ),
    "an adapter": Refused(_with_new(lora_request="an adapter"), "'c' brings lora_request: not supported"),
    "pooling": Refused(
        _with_new(sampling_params=None, pooling_params={"task": "embed"}),
        "'c' brings pooling_params: not supported",
    ),
    "no sampling parameters": Refused(_with_new(sampling_params=None), "sampling_params"),
    "an empty prompt": Refused(_with_new(prompt_token_ids=()), "prompt of 0 tokens"),
    "a token outside the vocabulary": Refused(_with_new(prompt_token_ids=(1, 8, 3)), "ids from 0 to 7"),
    "a negative token": Refused(_with_new(prompt_token_ids=(1, -1, 3)), "ids from 0 to 7"),
    "a token that is no int32": Refused(_with_new(prompt_token_ids=(1, 2**40, 3)), "ids from 0 to 7"),
    "a prompt that leaves no room": Refused(
        _with_new(prompt_token_ids=(1,) * 16, block_ids=((9, 10, 11, 12),)),
        "prompt of 16 tokens: send 1 to 15",
    ),
    "a new request without blocks": Refused(_with_new(block_ids=((),)), "room for 0"),
    "a new request's block that does not exist": Refused(_with_new(block_ids=((2**40,),)), "0 to 19"),
    "a prompt longer than its blocks": Refused(
        _with_new({"c": 5}, prompt_token_ids=(1,) * 5), "5 tokens scheduled.*room for 4"
    ),
    "more computed than the prompt has": Refused(_with_new({"c": 1}, num_computed_tokens=3), "'c'"),
    "negative computed tokens of a new request": Refused(_with_new(num_computed_tokens=-1), "'c'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradiction_is_refused_and_nothing_changes(name: str, unchecked_records: None) -> None:
    """A named error that says what is wrong; the batch is as it was, and the right output still works."""
    case, batch = REFUSED[name], decoding()
    output, before = case.output(batch), digest(batch)
    with pytest.raises(SchedulerOutputError, match=case.message):
        update_states(batch, output)
    assert digest(batch) == before
    assert decode(batch, "a", "b").req_ids == ("a", "b")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": float("nan")}, "'c': temperature"),
        ({"stop_token_ids": (8,)}, r"'c': every id in stop_token_ids must be in \[0, 8\)"),
        ({"min_tokens": 17, "max_tokens": None}, "'c': min_tokens .* <= 16"),
        ({"allowed_token_ids": (7,), "min_tokens": 1}, "'c': allowed_token_ids"),  # 7 is the model's end
    ],
)
def test_sampling_parameters_are_judged_before_a_request_is_taken_in(
    fields: dict[str, Any], message: str
) -> None:
    """A scheduler of someone else's may not have done it; nothing changes."""
    limits = replace(LIMITS, eos_token_ids=(7,))
    batch = InputBatch.make_empty(limits)
    new = new_request("c", (1, 2, 3), ((9,),), SamplingParams(**fields))
    before = digest(batch)
    with pytest.raises(InvalidParameterError, match=message):
        update_states(batch, scheduled(new, counts={"c": 3}))
    assert digest(batch) == before


def test_no_free_row() -> None:
    """A fourth request does not fit three rows."""
    batch = decoding(3)
    cached = cached_requests(batch, "a", "b", "c")
    output = scheduled(
        new_request("d", (1,), ((9,),)), cached=cached, counts={"a": 1, "b": 1, "c": 1, "d": 1}
    )
    with pytest.raises(SchedulerOutputError, match="1 requests are to be admitted and 0 of 3 rows are free"):
        update_states(batch, output)


def test_the_last_token_of_the_model_may_be_computed() -> None:
    """max_model_len tokens fit, one more does not."""
    new = new_request("a", (1,) * 15, ((1, 2, 3, 4, 5),))
    batch = settled(update_states(InputBatch.make_empty(LIMITS), scheduled(new, counts={"a": 15})))
    batch = decode(batch, "a")
    assert batch.columns.num_computed_tokens_bound[0] == LIMITS.max_model_len
    ahead = CachedRequestData(("a",), column(16), column(2))
    with pytest.raises(SchedulerOutputError, match="max_model_len is 16"):
        update_states(batch, scheduled(cached=ahead, counts={"a": 1}))


def test_a_request_left_out_while_its_step_is_in_flight_goes_on_behind_it() -> None:
    """It waits in its row for the token that is on its way, and may run before the host knows that."""
    begun = decode(decoding(), "a", "b")
    cached = CachedRequestData(("b",), column(4), column(2), new_block_ids={"b": ((8,),)})
    without = update_states(begun, scheduled(cached=cached, counts={"b": 1}))
    assert (without.row_of, without.req_ids) == (begun.row_of, ("b",))
    both = CachedRequestData(("b", "a"), column(5, 4), column(3, 2), new_block_ids={"a": ((7,),)})
    back = update_states(without, scheduled(cached=both, counts={"a": 1, "b": 1}))
    assert (back.row_of, back.rows.requests) == (begun.row_of, begun.rows.requests)
    assert back.columns.num_computed_tokens_bound[[0, 1]].tolist() == [5, 6]
    assert back.columns.num_computed_tokens_settled[[0, 1]].tolist() == [3, 3]


def test_a_request_whose_blocks_were_taken_while_its_step_is_in_flight_does_not_wait() -> None:
    """Who is preempted gives up its row, and comes back only with what is known for certain."""
    begun = decode(decoding(), "a", "b")
    cached = CachedRequestData(("b",), column(4), column(2), new_block_ids={"b": ((8,),)})
    output = replace(scheduled(cached=cached, counts={"b": 1}), preempted_req_ids=frozenset("a"))
    without = update_states(begun, output)
    assert without.parked.keys() == {"a"}
    both = CachedRequestData(("b", "a"), column(5, 4), column(3, 2), new_block_ids={"a": ((7,),)})
    with pytest.raises(SchedulerOutputError, match=r"'a' comes back with 4 computed tokens.*3 for certain"):
        update_states(without, scheduled(cached=both, counts={"a": 1, "b": 1}))


def test_a_prompt_that_is_wholly_in_the_cache_has_nothing_to_sample_from() -> None:
    """One token at least must be computed, whatever else is in flight."""
    begun = decode(decoding(), "a", "b")
    cached = CachedRequestData(
        ("a", "b"), column(4, 4), column(2, 2), new_block_ids={"a": ((7,),), "b": ((8,),)}
    )
    new = new_request("c", (1, 2, 3), ((9,),), num_computed_tokens=3)
    with pytest.raises(SchedulerOutputError, match="'c': 1 tokens scheduled after 3"):
        update_states(begun, scheduled(new, cached=cached, counts={"a": 1, "b": 1, "c": 1}))


def test_lookahead_is_one_token_and_only_where_a_step_will_have_sampled_it() -> None:
    """With a step in flight a row may run one token past what is known; a prefill that goes on may not."""
    new = new_request("a", (1, 2, 3, 4, 5), ((1, 2),))
    begun = update_states(InputBatch.make_empty(LIMITS), scheduled(new, counts={"a": 3}))

    def goes_on(computed: int, outputs: int, count: int) -> InputBatch:
        return update_states(
            begun,
            scheduled(
                cached=CachedRequestData(("a",), column(computed), column(outputs)), counts={"a": count}
            ),
        )

    assert goes_on(3, 0, 2).columns.num_computed_tokens_bound[0] == 5
    with pytest.raises(SchedulerOutputError, match="3 tokens scheduled after 3"):
        goes_on(3, 0, 3)
    with pytest.raises(SchedulerOutputError, match="1 tokens scheduled after 4"):
        goes_on(4, 0, 1)
    begun = goes_on(3, 0, 2)
    assert goes_on(5, 1, 1).columns.num_computed_tokens_bound[0] == 6
    with pytest.raises(SchedulerOutputError, match="2 tokens scheduled after 5"):
        goes_on(5, 1, 2)
    with pytest.raises(SchedulerOutputError, match="1 tokens scheduled after 6"):
        goes_on(6, 2, 1)
