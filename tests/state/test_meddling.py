"""Callers that abort, fork and step in the midst of other calls: nothing hangs, nothing is lost."""

from typing import Any

import pytest

from purestep.pure.errors import InvalidParameterError, StaleStateError
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.records.logits_processor import LogitsProcessor
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine

CONFIG = tiny_config()
MODEL, PARAMS = llama(CONFIG), random_params(CONFIG, std=0.3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def engine(**changes: Any) -> Engine:
    return Engine((MODEL, PARAMS), kv_cache_bytes=1 << 20, max_model_len=64, **changes)


def alone(prompt: list[int]) -> tuple[int, ...]:
    with engine() as own:
        return own.generate(prompt, GREEDY, progress=False)[0].token_ids


@pytest.mark.parametrize("steps_ahead", [1, 2])
def test_a_fork_beside_a_request_that_ended_while_its_step_was_on_its_way(steps_ahead: int) -> None:
    own = engine(steps_ahead=steps_ahead)
    own.add_request("a", [1], GREEDY)
    own.add_request("b", [2], GREEDY)
    own.step()
    own.abort("a")

    own.fork("b", "c")

    results = {}
    while own.has_unfinished():
        results |= {output.req_id: output.token_ids for output in own.step()}
    assert results["b"] == results["c"] == alone([2])


def test_a_stream_ends_when_one_of_its_requests_is_aborted_inside_it() -> None:
    own = engine()
    ended = {}
    for i, output in enumerate(own.stream([[1], [2]], GREEDY)):
        if i == 0:
            aborted = output.req_id
            own.abort(aborted)
        elif output.finished:
            ended[output.req_id] = output.token_ids

    assert list(ended.values()) == [alone([2])]
    assert not own.has_unfinished() and own.num_free_blocks == own.limits.num_blocks[0] - 1


def test_a_stream_ends_when_steps_inside_it_tell_its_end() -> None:
    own = engine()
    outputs = []
    for _ in own.stream([[1]], GREEDY):
        while own.has_unfinished():
            outputs += own.step()

    assert outputs[-1].token_ids == alone([1])


def test_a_call_whose_request_is_aborted_says_so_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = engine()
    turn, num_turns = own._turns.turn, 0

    def meddling() -> None:
        nonlocal num_turns
        num_turns += 1
        if num_turns == 3:
            own.abort("call0-0")
        turn()

    monkeypatch.setattr(own._turns, "turn", meddling)
    with pytest.raises(StaleStateError, match="1 of 2 requests of this call, 'call0-0' first, were aborted"):
        own.generate([[1], [2]], GREEDY, progress=False)
    monkeypatch.undo()

    assert own.generate([2], GREEDY, progress=False)[0].token_ids == alone([2])


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps_ahead": -1},
        {"steps_ahead": 1.5},
        {"max_num_reqs": True},
        {"block_size": "16"},
        {"max_model_len": 1},
    ],
    ids=str,
)
def test_sizes_that_are_no_whole_numbers_or_too_small_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidParameterError, match=f"{next(iter(wrong))}=.*must be a whole number, at least"
    ):
        Engine((MODEL, PARAMS), **({"kv_cache_bytes": 1 << 20, "max_model_len": 64} | wrong))


@pytest.mark.parametrize("argmax_invariant", [False, True])
def test_a_processor_that_spoils_a_row_ends_its_request_with_an_error(argmax_invariant: bool) -> None:
    def spoils(logits: Any, history: Any, params: Any) -> Any:
        return logits * float("nan") if int(history.lengths.max()) > 2 else logits

    processors = [LogitsProcessor(spoils, argmax_invariant=argmax_invariant)]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=4, logits_processors=processors)
    with engine() as own:
        result = own.generate([[1, 2]], params, progress=False)[0]

    assert (len(result.token_ids), result.finish_reason) == (1, "error")
