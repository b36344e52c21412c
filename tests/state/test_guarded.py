"""A logits processor that fails in the midst of a run ends its own requests, by name; nobody else notices."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.pure.errors import NoTokenError, ProcessorError, ReentrantCallError
from purestep.pure.record import replace
from purestep.pure.records.logits_processor import History, LogitsProcessor
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from tests.bugs.tiny_engine import GREEDY, Tokens, alone, drained, engine
from tests.profiles import examples

PROMPT: Tokens = (3, 1, 4, 1, 5)
Params = Mapping[str, Tensor]


def fails_late(logits: Tensor, history: History, params: Params) -> Tensor:
    """For rows with as many outputs as their parameter says."""
    late = history.lengths - history.prompt_lengths >= params["after"]
    if late.any():
        raise ArithmeticError(f"{int(late.sum())} rows are too long")
    return logits * 1


def narrows_late(logits: Tensor, history: History, params: Params) -> Tensor:
    late = bool((history.lengths - history.prompt_lengths >= params["after"]).any())
    return logits[:, :3] if late else logits


def failing(after: int, *, function: Any = fails_late, **changes: Any) -> SamplingParams:
    processor = LogitsProcessor(function, {"after": after}, argmax_invariant=changes.pop("late", False))
    return replace(GREEDY, logits_processors=[processor], **changes)


@examples(0.15)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 39), min_size=1, max_size=9).map(tuple), st.none() | st.integers(1, 7)
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([3, 64]),
    st.sampled_from([9, 40]),
    st.integers(0, 2),
)
def test_a_failing_processor_ends_whom_it_fails_for_and_nobody_else(
    unchecked_records: None,
    asked: list[tuple[Tokens, int | None]],
    budget: int,
    num_blocks: int,
    steps_ahead: int,
) -> None:
    """All share one function, which fails for some rows of a call: each gets what it gets up to its own failure."""
    sizes = {"max_num_batched_tokens": budget, "kv_cache_bytes": num_blocks * 1024}
    with engine(**sizes, steps_ahead=steps_ahead) as own:
        for i, (prompt, after) in enumerate(asked):
            own.add_request(str(i), prompt, GREEDY if after is None else failing(after))
        results = drained(own)
        assert own.num_free_blocks == own.limits.num_blocks[0] - 1
    for i, (prompt, after) in enumerate(asked):
        whole, (output,) = alone(prompt, GREEDY).token_ids, results[str(i)].outputs
        if after is None or after >= len(whole):
            assert (output.token_ids, output.finish_reason, output.error) == (whole, "length", None)
            continue
        assert (output.token_ids, output.finish_reason) == (whole[:after], "error")
        assert isinstance(output.error, ProcessorError)
        assert isinstance(output.error.__cause__, ArithmeticError)
        assert f"request '{i}' can not go on after {after} outputs" in str(output.error)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("function", [fails_late, narrows_late])
def test_in_either_place_and_with_results_of_another_shape(function: Any, late: bool) -> None:
    drawn = failing(2, function=function, late=late, temperature=1.0, seed=1)
    with engine() as own:
        results = own.generate([PROMPT, PROMPT], [drawn, GREEDY], progress=False)
    (output,) = results[0].outputs
    assert (len(output.token_ids), output.finish_reason) == (2, "error")
    assert results[1].token_ids == alone(PROMPT, GREEDY).token_ids


def test_forks_and_samples_of_a_failing_request_fail_for_themselves() -> None:
    for steps_ahead in (0, 1):
        with engine(steps_ahead=steps_ahead) as own:
            own.add_request("r", PROMPT, failing(3, n=2))
            own.step()
            own.step()
            own.fork("r", "twin")
            results = drained(own)
        outputs = [*results["r"].outputs, *results["twin"].outputs]
        assert [len(output.token_ids) for output in outputs] == [3, 3, 3]
        assert {output.finish_reason for output in outputs} == {"error"}
        assert [str(output.error).split("'")[1] for output in outputs] == ["r#0", "r#1", "twin"]


def test_a_function_that_takes_one_row_only_still_serves_each() -> None:
    """Called for all at once it fails, called for each it does not: then nobody has failed."""

    def lonely(logits: Tensor, history: History, params: Params) -> Tensor:
        assert len(logits) == 1
        return logits + 0

    params = replace(GREEDY, logits_processors=[LogitsProcessor(lonely)])
    with engine() as own:
        results = own.generate([PROMPT, (7, 7)], params, progress=False)
    assert [r.token_ids for r in results] == [alone(p, GREEDY).token_ids for p in (PROMPT, (7, 7))]


def test_a_row_that_is_spoilt_says_what_may_have_spoilt_it() -> None:
    def spoils(logits: Tensor, history: History, params: Params) -> Tensor:
        return logits * float("nan") if int(history.lengths.max()) > len(PROMPT) else logits

    params = replace(GREEDY, logits_processors=[LogitsProcessor(spoils)])
    with engine() as own:
        (output,) = own.generate(PROMPT, params, progress=False)[0].outputs
    assert output.finish_reason == "error" and isinstance(output.error, NoTokenError)
    assert "ended after 1 outputs" in str(output.error)


CALLS: dict[str, Callable[[Engine], Any]] = {
    "add_request": lambda own: own.add_request("new", PROMPT, GREEDY),
    "abort": lambda own: own.abort("r"),
    "step": lambda own: own.step(),
    "generate": lambda own: own.generate(PROMPT, GREEDY, progress=False),
    "fork": lambda own: own.fork("r", "twin"),
    "remember": lambda own: own.remember(),
    "update_weights": lambda own: own.update_weights(own.params),
    "close": lambda own: own.close(),
}


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("at_once", [False, True])
def test_an_engine_is_not_called_from_inside_its_own_step(name: str, at_once: bool) -> None:
    """From a step, and from the trial of a new request's processors: nothing changes, and the request goes on."""
    raised = list[ReentrantCallError]()
    with engine() as own:

        def meddles(logits: Tensor, history: History, params: Params) -> Tensor:
            if at_once or int(history.lengths.max()) > len(PROMPT) + 1:
                with pytest.raises(ReentrantCallError, match="from inside its own step") as caught:
                    CALLS[name](own)
                raised.append(caught.value)
            return logits + 0

        own.add_request("r", PROMPT, replace(GREEDY, logits_processors=[LogitsProcessor(meddles)]))
        own.add_request("s", (7, 7), GREEDY)
        results = drained(own)
        assert own.num_free_blocks == own.limits.num_blocks[0] - 1
        own.add_request("t", PROMPT, GREEDY)  # from outside it is welcome again
        assert drained(own)["t"].token_ids == alone(PROMPT, GREEDY).token_ids
    assert raised
    assert results["r"].token_ids == alone(PROMPT, GREEDY).token_ids
    assert results["s"].token_ids == alone((7, 7), GREEDY).token_ids


def test_a_processor_that_lets_the_refusal_through_fails() -> None:
    with engine() as own:

        def meddles(logits: Tensor, history: History, params: Params) -> Tensor:
            if int(history.lengths.max()) > len(PROMPT):
                own.abort("s")
            return torch.clone(logits)

        own.add_request("r", PROMPT, replace(GREEDY, logits_processors=[LogitsProcessor(meddles)]))
        own.add_request("s", (7, 7), GREEDY)
        results = drained(own)
    (output,) = results["r"].outputs
    assert output.error is not None and isinstance(output.error.__cause__, ReentrantCallError)
    assert results["s"].token_ids == alone((7, 7), GREEDY).token_ids


def test_an_interrupt_inside_a_processor_is_no_failure_of_it() -> None:
    interrupts = [True]

    def slow(logits: Tensor, history: History, params: Params) -> Tensor:
        if int(history.lengths.max()) > len(PROMPT) + 1 and interrupts:
            interrupts.clear()
            raise KeyboardInterrupt
        return logits + 0

    with engine() as own:
        own.add_request("r", PROMPT, replace(GREEDY, logits_processors=[LogitsProcessor(slow)]))
        with pytest.raises(KeyboardInterrupt):
            drained(own)
        assert drained(own)["r"].token_ids == alone(PROMPT, GREEDY).token_ids


def test_an_error_in_a_result_keeps_nothing_else_alive() -> None:
    """No frame of what failed, in which buffers and logits lie; nor one of a refused prompt."""
    with engine() as own:
        failed, refused = own.generate([PROMPT, ()], [failing(2), GREEDY], progress=False, on_error="return")
    error = failed.outputs[0].error
    assert isinstance(error, ProcessorError) and isinstance(error.__cause__, ArithmeticError)
    for kept in (error, error.__cause__, refused.error):
        assert kept is not None and kept.__traceback__ is None
