"""Clocks that count instead of ticking, and engines that take a known time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from purestep.state.bench.clocks import Clock
from purestep.state.bench.floors import Rates
from purestep.state.bench.methods import Generate, Method, Prompts, Tokens
from purestep.state.bench.peers import Peer, Room
from purestep.state.bench.shapes import Subject
from purestep.state.engine import Engine

SMALL = Method(context=16, short=2, long=8, prefill_batch=2, prefill_length=24, repeats=1, host_steps=3)
TINY = Subject(shape="tiny")
RATES = Rates(read=1e9, multiply=1e12)


class FakeTime:
    """Seconds that pass only when somebody lets them; what is given to a device takes effect when it is waited for."""

    def __init__(self) -> None:
        self.seconds = self.given = 0.0
        self.num_waits = 0

    def give(self, seconds: float) -> None:
        self.given += seconds

    def wait(self) -> None:
        self.num_waits += 1
        self.seconds, self.given = self.seconds + self.given, 0.0

    def clock(self) -> Clock:
        return Clock(now=lambda: self.seconds, wait=self.wait)


def steps_of(engine: Engine) -> Clock:
    """A clock on which every step that writes the buffers takes a second."""
    buffers = engine._turns.bound.buffers
    return Clock(now=lambda: float(buffers.generation))


class TimedGenerate:
    """So many seconds for a call, and so many for each step of it; it keeps what it was asked."""

    def __init__(
        self, time: FakeTime, cost: Callable[[int, int], float], *, missing: int = 0, warm_up: float = 0.0
    ) -> None:
        self.time, self.cost, self.missing, self.warm_up = time, cost, missing, warm_up
        self.calls: list[tuple[Prompts, int, Mapping[str, Any]]] = []
        self._seen: set[int] = set()

    def __call__(self, prompts: Prompts, num_tokens: int, sampling: Mapping[str, Any]) -> Tokens:
        self.calls.append((prompts, num_tokens, sampling))
        self.time.give(self.cost(sum(map(len, prompts)), num_tokens))
        if num_tokens not in self._seen:
            self.time.give(self.warm_up)
        self._seen.add(num_tokens)
        return [[0] * (num_tokens - self.missing)] * len(prompts)


def peer(name: str = "transformers", error: Exception | None = None) -> Peer:
    """A peer under the name of an installed package, that gives tokens at once, or fails."""

    @contextmanager
    def opened(subject: Subject, weights: Any, room: Room) -> Iterator[Generate]:
        if error is not None:
            raise error
        yield lambda prompts, num_tokens, sampling: [[0] * num_tokens] * len(prompts)

    return Peer(name, opened)
