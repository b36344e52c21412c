"""The bare step beside the engine's, and what a step costs the host.

A batch is brought to where decode is timed from, and remembered there. From then on its plans are values: they are made
before the clock starts, run on the buffers as often as is wanted, and in the end the buffers are put back, so that the
engine goes on as if nothing had been.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from purestep.pure.errors import BenchmarkError
from purestep.pure.record import replace
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.bare import plans_ahead, put_back
from purestep.state.bench.clocks import Clock
from purestep.state.bench.engines import SPARE_TOKENS
from purestep.state.bench.methods import SAMPLINGS, Method, Prompts
from purestep.state.engine import Engine
from purestep.state.moments import remember, rewind
from purestep.state.run import run
from purestep.state.turns import Turns


@attrs.frozen
class StepTime:
    """What running one step after another took."""

    ms: float  # a step
    num_uploads: int  # steps whose plan brought the device anything; a steady one brings nothing


@contextmanager
def decoding(
    engine: Engine, prompts: Prompts, method: Method, *, sampling: str = "decode"
) -> Iterator[Turns]:
    """The engine's turns, once each of these prompts has `short` output tokens; in the end they are aborted.

    `sampling` names how tokens are chosen, one of SAMPLINGS.

    Raises:
        BenchmarkError: that does not come about, since not all of them run at once.
    """
    turns = engine.turns
    params = SamplingParams(
        max_tokens=method.long + SPARE_TOKENS // 2, ignore_eos=True, detokenize=False, **SAMPLINGS[sampling]
    )
    engine.generate(prompts, replace(params, max_tokens=1), progress=False)  # now all begin to decode at once
    names = [f"bench-{i}" for i in range(len(prompts))]
    try:
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, prompt, params)
        while _fewest_outputs(turns, len(prompts)) < method.short:
            if not len(turns.now.queue.live):
                raise BenchmarkError(
                    f"{len(prompts)} prompts of {method.context} tokens do not decode together: give the engine "
                    "blocks, rows and max_num_batched_tokens for all of them"
                )
            take_turn(turns)
        yield turns
    finally:
        engine.abort(names)


def step_ms(turns: Turns, method: Method, clock: Clock) -> StepTime:
    """Milliseconds of a step run after another, from `short` to `long` output tokens; the median of the repeats.

    Raises:
        BenchmarkError: a request stopped on the way, so that less was computed than was timed.
    """
    num_steps = method.long - method.short
    now = turns.now
    moment = remember(now.leased, now.batch)
    plans, leased, seconds = plans_ahead(turns, num_steps), now.leased, []
    for _ in range(1 + method.repeats):
        leased = rewind(moment, leased)
        begun = clock.idle()
        for plan, key in plans:
            leased, pending = run(turns.bound, leased, plan, key=key)
        seconds.append(clock.idle() - begun)
        tokens = pending.result().sampled_token_ids
        if not (tokens[: len(now.batch.row_of)] >= 0).all():
            raise BenchmarkError(
                f"of {len(now.batch.row_of)} rows {int((tokens < 0).sum())} had stopped by step {num_steps}, so that "
                "less was computed than was timed: their logits are NaN; try another dtype"
            )
    put_back(turns, moment, leased)
    num_uploads = sum(plan.inbox.brings_data for plan, _ in plans)
    return StepTime(statistics.median(seconds[1:]) / num_steps * 1e3, num_uploads)


def run_us(turns: Turns, method: Method, clock: Clock) -> float:
    """Microseconds from calling `run` to its return, the device idle before; the median of the steps.

    On a GPU that is what it takes to launch a step. A CPU computes the step meanwhile.
    """
    now = turns.now
    moment = remember(now.leased, now.batch)
    leased, seconds = rewind(moment, now.leased), []
    for plan, key in plans_ahead(turns, method.host_steps):
        begun = clock.idle()
        leased, _ = run(turns.bound, leased, plan, key=key)
        seconds.append(clock.now() - begun)
    put_back(turns, moment, leased)
    return statistics.median(seconds) * 1e6


def turn_us(turns: Turns, method: Method, clock: Clock) -> float:
    """Microseconds that the host takes for a step in a whole turn of the engine, which may be of several; the median.

    The device is idle before, so that with a step ahead nothing is waited for: what is left is scheduling, planning,
    launching, settling and keeping account of tokens. A CPU computes the step meanwhile.
    """
    seconds, num_steps = list[float](), 0
    while num_steps < method.host_steps:
        begun = clock.idle()
        take_turn(turns)
        at_once = turns.now.batch.layout.bounds.num_steps
        seconds.append((clock.now() - begun) / at_once)
        num_steps += at_once
    return statistics.median(seconds) * 1e6


def take_turn(turns: Turns) -> None:
    """A step begun, one taken in; nobody wants to hear what it brought."""
    turns.turn()
    turns.tell(turns.now.book.news, of=())


def _fewest_outputs(turns: Turns, num_requests: int) -> int:
    """Settled output tokens of the request that has fewest, 0 while not all of them are in the batch."""
    batch = turns.now.batch
    rows = list(batch.row_of.values())
    if len(rows) < num_requests:
        return 0
    columns = batch.columns
    return int((columns.num_tokens - columns.num_prompt_tokens)[rows].min())
