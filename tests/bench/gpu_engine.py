"""The engine on this GPU: captured steps against eager ones and the CPU's, then `purestep bench` with its targets.

    PYTHONPATH=.ci/src:.ci/test python -P tests/bench/gpu_engine.py OUT.json [--shapes 1B 8B] [--batches 1 8 64 256]
        [--what decode prefill sampled startup host capture] [--peers]

`--unroll` says how many decode steps one launch is of. How things are timed is said in `purestep.state.bench.methods`.
Random weights, bfloat16. The exit status is 1 if tokens differ.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.bench.clocks import clock_of
from purestep.state.bench.floors import measure_rates
from purestep.state.bench.measure import WHAT, Wanted, measure
from purestep.state.bench.methods import GPU_METHOD
from purestep.state.bench.peers import installed
from purestep.state.bench.report import OWN, label, shown
from purestep.state.bench.rows import Row, about
from purestep.state.bench.shapes import SHAPES, Subject
from purestep.state.engine import Engine

DECODE = {  # milliseconds a step
    "0.6B": {1: 0.70, 8: 0.90, 64: 2.80, 256: 8.70},
    "1B": {1: 0.78, 8: 0.90, 64: 1.50, 256: 3.50},
    "8B": {1: 4.00, 8: 4.30, 64: 6.60, 256: 15.9},
}
PREFILL = {"0.6B": 380_000, "1B": 280_000, "8B": 42_100}  # prompt tokens per second
STARTUP = {"1B": 25.0, "8B": 35.0}  # seconds, caches cold
SAMPLED = 1.04  # of our own greedy step
RUN_US = 60.0  # from calling `run` to its return
CAPTURE = {"s": 15.0, "bytes": 2**30}


def check_equal() -> list[dict[str, Any]]:
    """Tokens of a small float32 model: on the CPU, eagerly on the GPU, captured, steps ahead, and several at once."""
    config = tiny_config(vocab_size=512, hidden_size=128, num_layers=4, max_position_embeddings=512)
    model, params = llama(config), random_params(config, seed=1, std=0.3)
    there = Params(pytree.tree_map(lambda leaf: leaf.cuda(), params.tree))
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(512, (n,), generator=generator).tolist()
        for n in (1, 7, 33, 64, 100, 129, 5, 16, 250, 3, 3)
    ]
    wanted = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=40),
        "random": SamplingParams(seed=5, top_k=20, top_p=0.9, n=2, max_tokens=40),
        "penalties": SamplingParams(
            seed=5, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=40, logprobs=3
        ),
    }
    sizes: dict[str, Any] = {
        "kv_cache_bytes": 2**24,
        "max_model_len": 400,
        "max_num_reqs": 16,
        "max_num_batched_tokens": 96,
    }
    worlds: dict[str, Any] = {
        "eager": {"cudagraph_mode": CUDAGraphMode.NONE, "steps_ahead": 0},
        "captured": {"steps_ahead": 0, "unroll": 1},
        "captured, one ahead": {"steps_ahead": 1, "unroll": 1},
        "captured, two ahead": {"steps_ahead": 2, "unroll": 1},
        "captured, 4 steps at once": {"steps_ahead": 0, "unroll": 4},
        "captured, 8 steps at once, one ahead": {"steps_ahead": 1, "unroll": 8},
    }
    rows = []
    for name, sampling in wanted.items():
        with Engine((model, params), **sizes) as engine:
            expected = _tokens(engine, prompts, sampling)
        for world, settings in worlds.items():
            with Engine((model, there), device="cuda", **sizes, **settings) as engine:
                same = _tokens(engine, prompts, sampling) == expected
            rows.append({"bench": "check", "what": f"{name}: {world} = cpu", "equal": same})
            print("ok  " if same else "BAD ", rows[-1]["what"], flush=True)
    return rows


def capture_row(shape: str, unroll: int | None) -> dict[str, Any]:
    """What the engine captures by default for this shape, how long that takes, and how much memory graphs hold."""
    config = SHAPES[shape]
    params = random_params(config, seed=0, dtype=torch.bfloat16, device="cuda")
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "capture_progress": False, "unroll": unroll}
    with Engine((llama(config), params), device="cuda", **settings) as engine:
        report, captured = engine.capture_report, engine.turns.bound.captured
        assert report is not None and captured is not None
        several = sum(key.num_steps > 1 for key in captured.keys)
    print(
        f"{shape:5} {report.num_graphs} graphs, {several} of several steps: {report.seconds:.1f} s, "
        f"{report.num_bytes:,} bytes",
        flush=True,
    )
    return {
        "bench": "capture",
        "shape": shape,
        "graphs": report.num_graphs,
        "of_several_steps": several,
        "s": report.seconds,
        "bytes": report.num_bytes,
        "target": CAPTURE,
    }


def _tokens(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    return [[o.token_ids for o in r.outputs] for r in engine.generate(prompts, params, progress=False)]


def with_targets(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """The rows as they are written, each with its target if it has one; a sampled step's is ours without sampling."""
    greedy: dict[int | None, float] = {}
    for row in rows:
        target = _target(row, greedy) if row.who == OWN else None
        share = "" if row.share is None else f"{row.share:6.1%} of what the device allows"
        wanted = "" if target is None else f"target {shown(row, target)}"
        who = "" if row.who == OWN else row.who
        print(
            f"{row.shape:5} {label(row):24} {shown(row, row.value):>16}  {share:34} {wanted}{who}", flush=True
        )
        yield row.as_json() | {"target": target}


def _target(row: Row, greedy: dict[int | None, float]) -> float | None:
    if row.bench == "decode" and row.level == "engine":
        greedy[row.batch] = row.value or 0.0
        return DECODE[row.shape].get(row.batch or 0)
    if row.bench == "sampled" and row.batch in greedy:
        return SAMPLED * greedy[row.batch]
    if row.bench == "prefill":
        return PREFILL[row.shape]
    if row.bench == "startup" and row.facts["caches"] == "cold":
        return STARTUP.get(row.shape)
    return RUN_US if row.bench == "host" and row.level == "step" else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="*", default=["1B"], choices=list(DECODE))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--unroll", type=int, help="decode steps in one launch")
    parser.add_argument("--what", nargs="*", default=[*WHAT, "capture"], choices=[*WHAT, "capture"])
    parser.add_argument(
        "--peers", action="store_true", help="installed engines beside ours, which takes minutes"
    )
    options = parser.parse_args()

    rows = check_equal()
    rates = measure_rates("cuda", torch.bfloat16, clock_of("cuda"))
    torch.cuda.empty_cache()
    for name in options.shapes:
        wanted = Wanted(
            subject=Subject(shape=name, device="cuda", dtype="bfloat16"),
            method=GPU_METHOD,
            what=tuple([what for what in options.what if what != "capture"]),
            batches=tuple(options.batches),
            peers=installed() if options.peers else (),
            unroll=options.unroll,
        )
        if wanted.what:
            rows += with_targets(measure(wanted, rates=rates))
        if "capture" in options.what:
            rows.append(capture_row(name, options.unroll))
        torch.cuda.empty_cache()
    own = about("cuda")
    options.out.write_text(json.dumps([row | own for row in rows], indent=1) + "\n")
    return int(any(row.get("equal") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
