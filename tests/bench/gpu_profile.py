"""Where the time of a step goes on this GPU: every kernel of captured decode steps (greedy, sampled) and of a prefill.

    PYTHONPATH=.ci/src:.ci/test python -P tests/bench/gpu_profile.py OUT.json [--shape 1B] [--batches 1 8 64 256]
        [--what decode sampled prefill]

Random weights, bfloat16; the method is that of `purestep bench`. Times are microseconds of a step, or of a whole
prefill. Kernels that begin early wait while others run: their own times add up to more than a step then, and `span`,
from the first begin to the last end, is what counts. `--device cpu --shape tiny` tries it without a GPU.
"""

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from purestep.state.bare import plans_ahead, put_back
from purestep.state.bench.clocks import Clock, clock_of
from purestep.state.bench.engines import decode_engine, generator_of, prefill_engine
from purestep.state.bench.methods import (
    GPU_METHOD,
    PREFILL_SEED,
    SAMPLINGS,
    TINY_METHOD,
    Method,
    random_prompts,
)
from purestep.state.bench.rows import about
from purestep.state.bench.shapes import SHAPES, Subject, load
from purestep.state.bench.steady import decoding, step_ms
from purestep.state.loading.loaded import LoadedModel
from purestep.state.moments import remember, rewind
from purestep.state.run import run
from purestep.state.turns import Turns

NUM_STEPS = 8  # that are profiled, behind as many that are not
WHAT = [*SAMPLINGS, "prefill"]
MOST = 24  # kernels that are written down
Row = dict[str, Any]


def profiled(doing: Callable[[], object], count: int, clock: Clock, device: str) -> Row:
    """What ran on the device while something was done so many times."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        doing()
        clock.idle()
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    events = [event for event in found.events() if event.device_type == wanted]
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kernels[event.name].append(event.time_range.elapsed_us())
    slowest = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    begun, ended = (
        pick(times) for pick, times in ((min, _times(events, "start")), (max, _times(events, "end")))
    )
    return {
        "span_us": (ended - begun) / count,
        "nodes": len(events) / count,
        "kernels": [
            {"kernel": name[:120], "launches": len(times) / count, "us": sum(times) / count}
            for name, times in slowest[:MOST]
        ],
    }


def _times(events: list[Any], end: str) -> list[float]:
    return [getattr(event.time_range, end) for event in events]


def decode_steps(turns: Turns, clock: Clock, device: str) -> Row:
    """Bare steps of the requests that decode, in the graphs that the engine would replay."""
    here, leased = remember(turns.now.leased, turns.now.batch), turns.now.leased
    plans = plans_ahead(turns, NUM_STEPS)

    def steps() -> None:
        nonlocal leased
        leased = rewind(here, leased)
        for plan, key in plans:
            leased, _ = run(turns.bound, leased, plan, key=key)

    steps()
    clock.idle()
    row = profiled(steps, NUM_STEPS, clock, device)
    put_back(turns, here, leased)
    return row


def measure(
    loaded: LoadedModel, subject: Subject, method: Method, batches: list[int], what: list[str]
) -> Iterator[Row]:
    """A row for decode at each batch, greedy and sampled, and one for prefill."""
    clock, vocab_size = clock_of(subject.device), loaded.model.vocab_size
    if samplings := [sampling for sampling in SAMPLINGS if sampling in what]:
        with decode_engine(loaded, subject, method, batches) as engine:
            for batch, sampling in itertools.product(batches, samplings):
                prompts = random_prompts(vocab_size, batch, method.context, seed=batch)
                with decoding(engine, prompts, method, sampling=sampling) as turns:
                    wall = {"wall_us": step_ms(turns, method, clock).ms * 1e3}
                    yield (
                        {"bench": "profile", "what": sampling, "batch": batch}
                        | wall
                        | decode_steps(turns, clock, subject.device)
                    )
    if "prefill" in what:
        with prefill_engine(loaded, subject, method) as engine:
            generate, batch = generator_of(engine), method.prefill_batch
            seeds = iter(range(PREFILL_SEED, PREFILL_SEED + 3))

            def prefill() -> None:
                prompts = random_prompts(vocab_size, batch, method.prefill_length, seed=next(seeds))
                generate(prompts, 1, SAMPLINGS["decode"])

            prefill()
            begun = clock.idle()
            prefill()
            wall = {"wall_us": (clock.idle() - begun) * 1e6}
            row = profiled(prefill, 1, clock, subject.device)
            yield {"bench": "profile", "what": "prefill", "batch": batch} | wall | row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="1B", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--what", nargs="*", default=WHAT, choices=WHAT)
    options = parser.parse_args()
    subject = Subject(shape=options.shape, device=options.device, dtype="bfloat16")
    method = TINY_METHOD if options.shape == "tiny" else GPU_METHOD
    rows = []
    for row in measure(load(subject), subject, method, options.batches, options.what):
        print(
            f"{options.shape} {row['what']} x {row['batch']}: {row['wall_us']:.1f} us, span {row['span_us']:.1f} us"
        )
        for kernel in row["kernels"]:
            print(f"    {kernel['us']:10.1f} us {kernel['launches']:7.1f} x  {kernel['kernel']}", flush=True)
        rows.append(row | {"shape": options.shape} | about(options.device))
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
