"""An interrupt at any point of the engine's own code loses nothing of anybody whom it does not abort."""

import gc
import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import pytest

from purestep.pure.models.initialize import random_params
from purestep.pure.record import replace
from purestep.pure.records.params import Params
from purestep.state import book, buffers, calls, engine, engine_moment, graphs, run, transcript, turns
from purestep.state.engine import Engine
from tests.bugs import tiny_engine
from tests.bugs.tiny_engine import GREEDY
from tests.profiles import IN_CI
from tests.state.fake_graphs import FakeGraph, FakeGraphs, unrolled

CAPTURES = {module.__file__ for module in (buffers, engine, graphs, run, turns)}
FILES = {module.__file__ for module in (book, calls, engine, engine_moment, transcript, turns)}
A, B, C = (5, 9, 2, 7), (1, 1, 3), (40, 8, 22, 17, 5)


class Interrupt:
    """Raises KeyboardInterrupt before the n-th line of these files that runs in its block, as Ctrl-C may do."""

    def __init__(self, number: int, files: Collection[str | None] = FILES) -> None:
        self.number, self.num_lines, self._files = number, 0, files

    def __enter__(self) -> "Interrupt":
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.number:
                raise KeyboardInterrupt
        return self._line


def everywhere(doing: Callable[[Interrupt], None], files: Collection[str | None] = FILES) -> None:
    """Interrupt it once at each line that it comes by; in CI at every third."""
    number = 0
    while True:
        number += 3 if IN_CI else 1
        interrupt = Interrupt(number, files)
        doing(interrupt)
        if interrupt.num_lines < number:
            assert number > 50, "this is no test of anything"
            return


def drained(own: Engine, results: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    for _ in range(100):
        if not own.has_unfinished():
            return results
        results |= {output.req_id: output.token_ids for output in own.step() if output.finished}
    raise AssertionError("it does not end")


def expected(max_tokens: int = 2, **prompts: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    params = replace(GREEDY, max_tokens=max_tokens)
    return {name: tiny_engine.alone(prompt, params).token_ids for name, prompt in prompts.items()}


@pytest.mark.parametrize(("steps_ahead", "unroll", "max_tokens"), [(0, 1, 2), (1, 1, 2), (1, 2, 4)])
def test_a_step_that_landed_is_published_whatever_interrupts(
    steps_ahead: int, unroll: int, max_tokens: int, unchecked_records: None
) -> None:
    """A call of `step` is interrupted anywhere: the next ones tell what it would have told, and no block is lost."""
    own_tokens, params = expected(max_tokens, a=A, b=B), replace(GREEDY, max_tokens=max_tokens)
    with tiny_engine.engine(steps_ahead=steps_ahead, max_num_reqs=2, **unrolled(unroll, 2)) as own:

        def doing(interrupt: Interrupt) -> None:
            own.add_request("a", A, params)
            own.add_request("b", B, params)
            results: dict[str, tuple[int, ...]] = {}
            try:
                with interrupt:
                    for _ in range(3):
                        results |= {o.req_id: o.token_ids for o in own.step() if o.finished}
            except KeyboardInterrupt:
                pass
            assert drained(own, results) == own_tokens, f"interrupted at line {interrupt.number}"
            assert own.num_free_blocks == own.limits.num_blocks[0] - 1

        everywhere(doing)


def test_requests_of_others_survive_the_interrupt_of_a_call(unchecked_records: None) -> None:
    own_tokens, params = expected(a=A), replace(GREEDY, max_tokens=2)
    with tiny_engine.engine(steps_ahead=1, max_num_reqs=2) as own:

        def doing(interrupt: Interrupt) -> None:
            own.add_request("a", A, params)
            try:
                with interrupt:
                    own.generate(C, replace(GREEDY, max_tokens=1), progress=False)
            except KeyboardInterrupt:
                pass
            results = drained(own, {})  # a call whose clean-up was interrupted leaves its request behind
            assert {name: results[name] for name in results if not name.startswith("call")} == own_tokens
            assert own.num_free_blocks == own.limits.num_blocks[0] - 1

        everywhere(doing)


def test_moves_on_whole_states_are_made_or_not_made(unchecked_records: None) -> None:
    """Remember, rewind and fork, interrupted anywhere: the engine is where it was, or where it was to be."""
    whole = expected(a=A)["a"]
    with tiny_engine.engine(steps_ahead=1) as own:

        def doing(interrupt: Interrupt) -> None:
            own.add_request("a", A, replace(GREEDY, max_tokens=2))
            own.step()
            before = own.remember()
            own.step()
            try:
                with interrupt:
                    with own.remember():
                        own.fork("a", "b")
                    own.rewind(before)
            except KeyboardInterrupt:
                pass
            results = drained(own, {})
            assert results["a"] == whole and results.get("b", whole) == whole
            del before
            assert own.num_free_blocks == own.limits.num_blocks[0] - 1

        everywhere(doing)


class Untraced(FakeGraphs):
    """Its captures are not interrupted, which would take long to try everywhere."""

    def capture(self, function: Callable[[], Any]) -> FakeGraph:
        trace = sys.gettrace()
        sys.settrace(None)
        self.captured.clear()  # an engine has its own graphs
        try:
            return super().capture(function)
        finally:
            sys.settrace(trace)


def test_weights_are_the_old_ones_or_the_new_ones_and_graphs_are_all_there(
    monkeypatch: pytest.MonkeyPatch, unchecked_records: None
) -> None:
    """Other weights, in memory of their own, interrupted anywhere: the next request has the one or the other."""
    monkeypatch.setattr(gc, "collect", lambda: 0)  # each capture does, which takes most of the time
    trees = [tiny_engine.PARAMS.tree, random_params(tiny_engine.CONFIG, seed=2, std=0.5).tree]
    params, own_tokens = replace(GREEDY, max_tokens=3), []
    for tree in trees:
        with tiny_engine.engine(params=Params(tree)) as alone:
            own_tokens.append(alone.generate(C, params, progress=False)[0].token_ids)
    with tiny_engine.engine(graph_api=Untraced(), max_num_reqs=1) as own:
        num_graphs = len(own._turns.bound.captured.keys)

        def doing(interrupt: Interrupt) -> None:
            other = trees[own.params.tree is trees[0]]
            try:
                with interrupt:
                    own.update_weights(other)
            except KeyboardInterrupt:
                pass
            now = own.params.tree is trees[1]
            assert own.generate(C, params, progress=False)[0].token_ids == own_tokens[now]
            assert len(own._turns.bound.captured.keys) == num_graphs
            assert own.num_free_blocks == own.limits.num_blocks[0] - 1

        everywhere(doing, CAPTURES)
