"""vLLM's records in, ours out: dicts and objects alike, nothing dropped in silence."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from purestep.pure.errors import InvalidParameterError, SchedulerOutputError
from purestep.pure.interop import (
    grammar_output_from_vllm,
    sampling_params_from_vllm,
    scheduler_output_from_vllm,
    stream_of,
)
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.update import update_states
from tests.laws import assert_pure, equal
from tests.tiny import settled

GREEDY = {
    "temperature": 0.0,
    "max_tokens": 4,
    "top_k": 0,
    "stop_token_ids": [],
    "seed": None,
    "logprobs": None,
}


def new_data(req_id: str, **changes: Any) -> dict[str, Any]:
    return {
        "req_id": req_id,
        "prompt_token_ids": [1, 2, 3],
        "mm_features": [],
        "sampling_params": GREEDY,
        "pooling_params": None,
        "block_ids": ([1],),
        "num_computed_tokens": 0,
        "lora_request": None,
    } | changes


def output(**changes: Any) -> dict[str, Any]:
    """A step of a new request and three known ones, in upstream's form."""
    return {
        "scheduled_new_reqs": [new_data("n")],
        "scheduled_cached_reqs": {
            "req_ids": ["a", "b", "c"],
            "resumed_req_ids": {"c"},
            "new_token_ids": [],
            "all_token_ids": {"c": [7, 8]},
            "new_block_ids": [None, ([5, 6],), ([9],)],
            "num_computed_tokens": [4, 5, 0],
            "num_output_tokens": [1, 2, 1],
        },
        "num_scheduled_tokens": {"b": 1, "a": 1, "n": 3, "c": 2},
        "total_num_scheduled_tokens": 7,
        "scheduled_spec_decode_tokens": {},
        "scheduled_encoder_inputs": {},
        "num_common_prefix_blocks": [0],
        "finished_req_ids": {"old"},
        "free_encoder_mm_hashes": [],
        "preempted_req_ids": None,
    } | changes


def as_objects(value: Any) -> Any:
    """The same with attributes where upstream has dataclasses."""
    if not isinstance(value, dict):
        return value
    data = dict(value, scheduled_cached_reqs=SimpleNamespace(**value["scheduled_cached_reqs"]))
    data["scheduled_new_reqs"] = [
        SimpleNamespace(**(new | {"sampling_params": SimpleNamespace(**new["sampling_params"])}))
        for new in value["scheduled_new_reqs"]
    ]
    return SimpleNamespace(**data)


@pytest.mark.parametrize("form", [output(), as_objects(output())], ids=["dicts", "objects"])
def test_a_step_becomes_columns(form: Any) -> None:
    """The order of the counts is the order of the batch; None entries of parallel lists are left out."""
    ours = scheduler_output_from_vllm(form)
    assert ours.req_ids == ("b", "a", "n", "c")
    assert ours.num_scheduled_tokens.tolist() == [1, 1, 3, 2]
    assert ours.num_scheduled_tokens.dtype == np.int32 and not ours.num_scheduled_tokens.flags.writeable
    cached = ours.scheduled_cached_reqs
    assert cached.req_ids == ("a", "b", "c")
    assert cached.new_block_ids == {"b": ((5, 6),), "c": ((9,),)}
    assert cached.num_computed_tokens.tolist() == [4, 5, 0]
    assert cached.num_output_tokens.tolist() == [1, 2, 1]
    assert cached.resumed_req_ids == {"c"}
    assert cached.all_token_ids == {"c": (7, 8)}
    assert cached.new_token_ids == {}
    (new,) = ours.scheduled_new_reqs
    assert (new.req_id, new.prompt_token_ids, new.block_ids) == ("n", (1, 2, 3), ((1,),))
    assert new.sampling_params == SamplingParams(temperature=0, max_tokens=4)
    assert ours.finished_req_ids == {"old"}
    assert ours.preempted_req_ids == frozenset()


def test_dicts_and_objects_mean_the_same() -> None:
    """And conversion is pure."""
    ours = assert_pure(scheduler_output_from_vllm, output())
    assert equal(ours, scheduler_output_from_vllm(as_objects(output())))


def test_tokens_for_earlier_pipeline_stages_and_drafts_and_blocks_to_zero() -> None:
    """What one rank in many gets."""
    form = output(
        scheduled_spec_decode_tokens={"a": [3, 4]},
        scheduled_encoder_inputs={"n": [0]},
        new_block_ids_to_zero=[5, 6],
        num_common_prefix_blocks=[2, 0],
        preempted_req_ids={"p"},
        num_spec_tokens_to_schedule=2,
        has_structured_output_requests=True,
        kv_connector_metadata="meta",
    )
    form["scheduled_cached_reqs"] = form["scheduled_cached_reqs"] | {"new_token_ids": [[1], [2, 3], []]}
    ours = scheduler_output_from_vllm(form)
    assert ours.scheduled_spec_decode_tokens == {"a": (3, 4)}
    assert ours.scheduled_encoder_inputs == {"n": (0,)}
    assert ours.new_block_ids_to_zero == ((5, 6), (5, 6))
    assert ours.num_common_prefix_blocks == (2, 0)
    assert ours.preempted_req_ids == {"p"}
    assert ours.num_spec_tokens_to_schedule == 2
    assert ours.has_structured_output_requests
    assert ours.kv_connector_metadata == "meta"
    assert ours.scheduled_cached_reqs.new_token_ids == {"a": (1,), "b": (2, 3), "c": ()}


def test_the_total_must_be_the_sum() -> None:
    """Upstream's invariant."""
    with pytest.raises(SchedulerOutputError, match="is 8, but the counts of 4 requests add up to 7"):
        scheduler_output_from_vllm(output(total_num_scheduled_tokens=8))


def test_parallel_lists_must_be_as_long_as_the_ids() -> None:
    """A list that is too short is refused, not cut."""
    form = output()
    for name, value in {
        "num_computed_tokens": [4],
        "new_block_ids": [([5],)],
        "new_token_ids": [[1]],
    }.items():
        short = form["scheduled_cached_reqs"] | {name: value}
        with pytest.raises(ValueError):
            scheduler_output_from_vllm(form | {"scheduled_cached_reqs": short})


def test_a_converted_step_runs() -> None:
    """From an empty batch to the next step."""
    limits = BatchLimits(4, 16, 10, (4,), (20,))
    first = output(
        scheduled_new_reqs=[new_data("a"), new_data("b", block_ids=([2],))],
        scheduled_cached_reqs={},
        num_scheduled_tokens={"a": 3, "b": 2},
        total_num_scheduled_tokens=5,
    )
    batch = update_states(InputBatch.make_empty(limits), scheduler_output_from_vllm(first))
    cached = {
        "req_ids": ["a", "b"],
        "new_block_ids": [None, ([7],)],
        "num_computed_tokens": [3, 2],
        "num_output_tokens": [1, 0],
    }
    second = output(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"a": 1, "b": 1},
        total_num_scheduled_tokens=2,
    )
    batch = update_states(settled(batch), scheduler_output_from_vllm(second))
    assert batch.rows.block_ids[0][batch.row_of["b"]].tolist() == [2, 7]  # type: ignore[union-attr]
    assert batch.req_ids == ("a", "b")


def test_every_shared_parameter_is_taken() -> None:
    """By name, with None where upstream has it; derived fields are left to us."""
    theirs = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "max_tokens": None,
        "min_tokens": 2,
        "stop": ["x"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "logprob_token_ids": [7, 2],
        "logit_bias": {"2": 1.5, 3: -2.0},
        "allowed_token_ids": [1, 2],
        "bad_words_token_ids": [[1, 2], [3]],
        "detokenize": False,
        "skip_special_tokens": False,
        "eos_token_id": 2,
        "all_stop_token_ids": {2, 4},
        "sampling_type": "RANDOM_SEED",
        "structured_outputs": None,
    }
    expected = SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        max_tokens=None,
        min_tokens=2,
        stop=("x",),
        stop_token_ids=(4,),
        ignore_eos=True,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        logprobs=3,
        prompt_logprobs=1,
        logprob_token_ids=(7, 2),
        logit_bias=((2, 1.5), (3, -2.0)),
        allowed_token_ids=(1, 2),
        bad_words_token_ids=((1, 2), (3,)),
        detokenize=False,
        skip_special_tokens=False,
    )
    assert sampling_params_from_vllm(theirs) == expected
    assert sampling_params_from_vllm(SimpleNamespace(**theirs)) == expected
    assert sampling_params_from_vllm({"max_tokens": None}) == SamplingParams(max_tokens=None)


@pytest.mark.parametrize("name", ["structured_outputs", "logits_processors", "thinking_token_budget"])
def test_what_no_stage_obeys_is_refused(name: str) -> None:
    """A parameter is never dropped in silence."""
    with pytest.raises(InvalidParameterError, match=name):
        sampling_params_from_vllm(GREEDY | {name: [1]})


def test_bad_words_must_be_token_ids_by_now() -> None:
    """Upstream turns them into ids with the tokenizer, which is not here."""
    with pytest.raises(InvalidParameterError, match="bad_words"):
        sampling_params_from_vllm(GREEDY | {"bad_words": ["no"]})
    both = sampling_params_from_vllm(GREEDY | {"bad_words": ["no"], "bad_words_token_ids": [[4]]})
    assert both.bad_words_token_ids == ((4,),)


def test_requests_without_a_seed_have_streams_of_their_own() -> None:
    """Two of them never draw alike; two with one seed do, as upstream's generators would."""

    def streams(**changes: Any) -> list[int]:
        new = [new_data(name, **changes) for name in "ab"]
        return [
            r.stream for r in scheduler_output_from_vllm(output(scheduled_new_reqs=new)).scheduled_new_reqs
        ]

    assert streams() == [stream_of("a"), stream_of("b")]
    assert streams()[0] != streams()[1]
    assert all(0 <= stream < 2**63 for stream in streams())
    assert streams(sampling_params=GREEDY | {"seed": 5}) == [0, 0]


def test_a_request_that_goes_on_with_a_longer_prompt_draws_from_another_stream() -> None:
    """Its outputs are counted anew. One of its id that has finished is another request, and begins anew."""

    def stream(length: int, known: tuple[str, ...], **changes: Any) -> int:
        params = {name: changes.pop(name) for name in ("seed",) if name in changes}
        new = new_data("a", prompt_token_ids=[1] * length, sampling_params=GREEDY | params)
        step = output(scheduled_new_reqs=[new], **changes)
        return scheduler_output_from_vllm(step, known=known).scheduled_new_reqs[0].stream

    for seed in ({}, {"seed": 5}):
        first = stream(3, (), **seed)
        assert first == stream(9, ("b",), **seed) == stream(9, ("a",), finished_req_ids={"a"}, **seed)
        assert len({first, stream(9, ("a",), **seed), stream(12, ("a",), **seed)}) == 3


def test_a_grammar_is_obeyed_by_masks_and_refused_where_none_can_come() -> None:
    """The scheduler keeps the grammar; what a step needs of it is its bits."""
    params = GREEDY | {"structured_outputs": {"regex": "[a-z]+"}}
    step = output(scheduled_new_reqs=[new_data("n", sampling_params=params)])
    assert scheduler_output_from_vllm(step).scheduled_new_reqs[0].sampling_params == SamplingParams(
        temperature=0, max_tokens=4
    )
    bits = np.array([[1, -1], [0, 3]], np.int32)
    form = {"structured_output_request_ids": ["n", "b"], "grammar_bitmask": bits}
    for ours in (
        assert_pure(grammar_output_from_vllm, form),
        grammar_output_from_vllm(SimpleNamespace(**form)),
    ):
        assert ours is not None
        assert ours.structured_output_request_ids == ("n", "b")
        assert ours.grammar_bitmask.tolist() == bits.tolist()
    assert grammar_output_from_vllm(None) is None
    for wrong in (bits.astype(np.int64), bits[0]):
        with pytest.raises(SchedulerOutputError, match="int32 words, a row a mask"):
            grammar_output_from_vllm({"structured_output_request_ids": ["n"], "grammar_bitmask": wrong})
