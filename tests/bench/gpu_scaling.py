"""How a decode step grows with the batch and with the context on this GPU, beside what has to be read.

    PYTHONPATH=.ci/src:.ci/test python -P tests/bench/gpu_scaling.py OUT.json [--shape 1B] [--plot OUT.png]

A step is what the engine captures, with greedy sampling; times are medians over replays of its graph. The floor is the
time in which its weights, keys and values can be read at the rate that is measured in the same run. What is to hold:
along a curve, the step grows at most 1.5 times as fast as its floor. Random weights, keys and values, bfloat16.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from purestep.pure.models.initialize import random_params
from purestep.pure.models.llama import llama
from purestep.state.bench.clocks import clock_of
from purestep.state.bench.floors import decode_floor_ms, kv_bytes, measure_rates, weight_bytes
from purestep.state.bench.rows import about
from purestep.state.bench.shapes import SHAPES
from tests.bench.gpu_gemm import milliseconds
from tests.kernels.triton.bare import MOST_STEPS, BareStep

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = tuple(1024 << i for i in range(8))
SIXTEEN = 16
REPLAYS = 20


def curves(shape: str) -> list[dict[str, Any]]:
    """The points of three curves, those left out for want of memory named."""
    config = SHAPES[shape]
    model, params = llama(config), random_params(config, seed=0, dtype=torch.bfloat16, device="cuda")
    read = measure_rates("cuda", torch.bfloat16, clock_of("cuda")).read
    points = [("batch", batch, 1024) for batch in BATCHES]
    points += [(f"context, batch {batch}", batch, context) for batch in (1, SIXTEEN) for context in CONTEXTS]
    rows = []
    for curve, batch, context in tqdm(points, desc=shape):
        row: dict[str, Any] = {
            "bench": "scaling",
            "shape": shape,
            "curve": curve,
            "batch": batch,
            "context": context,
        }
        token_bytes = kv_bytes(model.kv_layers, 1, 2)
        needed = batch * (context + MOST_STEPS + 16) * token_bytes + 2 * weight_bytes(config, 2)
        if needed > 0.9 * torch.cuda.mem_get_info()[0]:
            rows.append(row | {"why": f"{needed:,.0f} bytes of weights, keys and values"})
            continue
        bare = BareStep(model, params, batch, context=context)
        mean = context + REPLAYS / 2
        floor = decode_floor_ms(config, model.kv_layers, batch=batch, context=mean, itemsize=2, read=read)
        rows.append(row | {"ms": milliseconds(bare, REPLAYS), "floor": floor})
        del bare
        torch.cuda.empty_cache()
    return rows


def with_growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beside each point: how much the step has grown along its curve, over how much the floor has."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "ms" in row:
            start = first.setdefault(row["curve"], row)
            row["growth"] = row["ms"] / start["ms"] / (row["floor"] / start["floor"])
            where = f"{row['curve']:20} {row['batch']:5} x {row['context']:7}"
            print(
                f"{where}: {row['ms']:9.3f} ms, floor {row['floor']:9.3f}, {row['growth']:.2f} of its",
                flush=True,
            )
    return rows


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """The three curves, the steps' and the floors'."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["curve"] for row in rows))
    figure = Figure(figsize=(4.5 * len(names), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names)), names, strict=True):
        own = [row for row in rows if row["curve"] == name and "ms" in row]
        places = [row["batch" if name == "batch" else "context"] for row in own]
        axes.loglog(places, [row["ms"] for row in own], "o-", label="step")
        axes.loglog(places, [row["floor"] for row in own], "k--", label="reading alone")
        axes.set_xlabel("requests" if name == "batch" else "context")
        axes.set_ylabel("ms a step")
        axes.set_title(f"{rows[0]['shape']}: " + ("batch, context 1024" if name == "batch" else name))
        axes.legend()
    figure.savefig(out, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="1B", choices=list(SHAPES))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--drawn", type=Path, help="draw the rows of this file, and measure nothing")
    options = parser.parse_args()
    if options.drawn is not None:
        draw(json.loads(options.drawn.read_text()), options.out)
        return 0
    rows = with_growth(curves(options.shape))
    own = about("cuda")
    options.out.write_text(json.dumps([row | own for row in rows], indent=1) + "\n")
    if options.plot is not None:
        draw(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
