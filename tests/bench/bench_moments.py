"""What going back and branching costs the host: `Engine.remember`, `rewind`, `fork`, and the step behind each.

    python -P tests/bench/bench_moments.py [--runs 50] [--out tests/bench/results/moments.json]

One request of 4,097 tokens, or 64 of 200, on a tiny model, so that the host is all that counts. Times are medians over
runs, in microseconds; `step_us` is the turn after it, with its plan and copies, next to `steady_us`, a turn without.
Publishing a step's tokens is measured beside them. Between two steps little of this is in the processor's caches:
`fork_again_us` is a fork right behind others.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine

LONG = 4096
PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
OUT = Path(__file__).parent / "results" / "moments.json"


def decoding(num_requests: int, num_tokens: int) -> Engine:
    """An engine whose requests have been prefilled, one token each behind so long a prompt."""
    config = replace(tiny_config(), max_position_embeddings=2 * LONG)
    engine = Engine(
        (llama(config), random_params(config)),
        kv_cache_bytes=2**27,
        max_num_reqs=num_requests + 2,
        max_num_batched_tokens=2048,
        max_model_len=2 * LONG,
        enable_prefix_caching=False,
    )
    for i in range(num_requests):
        prompt = [(7 * i + k) % config.vocab_size for k in range(num_tokens)]
        engine.add_request(f"r{i}", prompt, PARAMS)
    while not all(len(output.token_ids) for output in engine.step()):
        pass
    engine.step()
    return engine


def microseconds(call: Callable[[], object]) -> float:
    """What one call takes."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def measure(num_requests: int, num_tokens: int, num_runs: int) -> dict[str, Any]:
    """Medians of every move, and of the turn that follows it."""
    times: dict[str, list[float]] = {}
    with decoding(num_requests, num_tokens) as engine:
        for _ in range(num_runs):
            for name, move in (
                ("steady", lambda: None),
                ("fork", lambda: engine.fork("r0", "fork")),
                ("remember", engine.remember),
            ):
                moment = None
                start = time.perf_counter()
                moment = move()
                times.setdefault(name, []).append((time.perf_counter() - start) * 1e6)
                times.setdefault(f"{name}_step", []).append(microseconds(engine.step))
                if moment is not None:
                    times.setdefault("rewind", []).append(microseconds(lambda m=moment: engine.rewind(m)))
                    times.setdefault("rewind_step", []).append(microseconds(engine.step))
                    moment.close()
                engine.abort("fork")
                engine.step()
        times["fork_again"] = []
        for _ in range(num_runs):
            times["fork_again"].append(microseconds(lambda: engine.fork("r0", "fork")))
            engine.abort("fork")
        turns, times["publish"] = engine.turns, []
        for _ in range(num_runs):
            turns._begin()
            turns._land()
            times["publish"].append(microseconds(turns.publish))
    medians = {name: round(statistics.median(values), 1) for name, values in times.items()}
    steady, _ = medians.pop("steady_step"), medians.pop("steady")
    return {
        "bench": "moments",
        "requests": num_requests,
        "tokens": num_tokens,
        "steady_us": steady,
        **{f"{name}_us": value for name, value in medians.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--out", type=Path, default=OUT, help="rows are written here (default: %(default)s)")
    arguments = parser.parse_args()
    about = {
        "versions": {name: version(name) for name in ("torch", "numpy", "attrs")}
        | {"python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    rows = []
    for num_requests, num_tokens in ((1, LONG), (64, 200)):
        rows.append(measure(num_requests, num_tokens, arguments.runs) | about)
        print(json.dumps(rows[-1]), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
