"""Decode steps on this GPU: the fused kernels checked, their tiles tried within the captured step, the step timed.

    PYTHONPATH=.ci/src:.ci/test python -P tests/bench/gpu_gemm.py OUT.json [--shapes 1B] [--batches 1 8 64 256]
        [--no-checks] [--tune] [--profile] [--seconds 200]

A bare step is what the engine captures: `step` with greedy sampling, all requests at 1120 tokens, weights random and
bfloat16. Times are medians over replays of its graph. `--tune` tries tiles one site after the other, each in a step of
six layers, so that what is hidden behind a neighbour's end counts as hidden. The exit status is 1 if a check fails.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
import triton
from torch import Tensor

import purestep.kernels.triton.attention as attention_module
import purestep.kernels.triton.decode as decode_module
import purestep.kernels.triton.linear as linear_module
import purestep.kernels.triton.shared as shared_module
from purestep.kernels.triton.gemv import GemvTile, Norm, gemv
from purestep.kernels.triton.skinny import SkinnyTile, skinny
from purestep.kernels.triton.softmax import Tile
from purestep.kernels.triton.thin import ThinTile, thin
from purestep.pure.models.config import ModelConfig
from purestep.pure.models.initialize import random_params
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.pure.records.params import Params
from purestep.state.bench.shapes import SHAPES
from tests.kernels.triton.bare import BareStep
from tests.kernels.triton.gpu_checks import compile_in_parallel, normal
from tests.kernels.triton.gpu_fused_checks import all_checks

BF16 = torch.bfloat16
Site = tuple[int, int, bool]  # results, width, gated
TUNED_LAYERS = 6
ONE_ROW = [  # rows, columns, warps
    *((rows, 2048, 4) for rows in (1, 2, 4)),
    *((rows, 1024, 4) for rows in (2, 4, 8)),
    *((8, 512, 4), (16, 256, 4), (4, 2048, 8), (8, 2048, 8), (8, 1024, 8)),
]
SLICED = [  # rows, columns, warps, stages, slices
    *((64, 64, 4, 8, 2), (64, 64, 4, 8, 4), (64, 128, 4, 5, 4), (64, 128, 4, 4, 4), (64, 128, 4, 5, 8)),
    *((128, 64, 8, 6, 4), (128, 64, 4, 6, 8), (64, 64, 4, 5, 4), (64, 64, 4, 5, 2), (64, 128, 4, 4, 2)),
]
A_FEW_ROWS = [  # rows, columns, warps, stages
    *((64, 64, 4, 4), (64, 64, 4, 5), (64, 64, 4, 6), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 8, 5)),
]
SOME_ROWS = [
    (64, 64, 4, 4),
    (64, 64, 4, 5),
    (64, 64, 4, 6),
    (64, 128, 4, 3),
    (128, 64, 4, 4),
    (128, 64, 8, 4),
]
# fmt: off
THIN = [  # rows, slices, first columns, columns, stages
    (16, 4, 256, 128, 4), (16, 4, 128, 128, 5), (16, 4, 256, 256, 3), (16, 4, 128, 128, 4), (16, 4, 128, 64, 6),
    (16, 8, 256, 128, 3), (16, 8, 128, 128, 3), (32, 4, 256, 128, 3), (16, 2, 256, 128, 4), (16, 2, 128, 64, 6),
]
THIN_GATED = [
    (16, 1, 128, 128, 4), (16, 1, 128, 128, 3), (16, 1, 256, 128, 4), (16, 1, 256, 256, 2), (16, 1, 64, 64, 6),
    (16, 2, 128, 128, 3), (16, 2, 256, 128, 3), (16, 4, 128, 128, 2), (16, 4, 256, 128, 2), (16, 4, 128, 64, 4),
]
# fmt: on
FEW_REQUESTS = [  # keys, warps, stages, whether the first tile is fetched first, programs
    *((64, 4, 3, True, 528), (64, 8, 3, True, 528), (64, 4, 3, False, 528), (64, 4, 3, True, 264)),
    *((64, 4, 2, True, 528), (64, 2, 3, True, 528), (32, 1, 5, True, 528)),
    *((128, 4, 2, True, 528), (128, 8, 3, True, 264), (64, 4, 2, False, 528), (32, 4, 3, True, 528)),
    *((64, 2, 3, False, 528), (32, 2, 3, False, 528)),
]
MANY_REQUESTS = [
    *((64, 2, 5, False, 528), (64, 2, 3, False, 528), (64, 4, 2, False, 528), (64, 4, 3, False, 528)),
    *((32, 1, 3, False, 528), (32, 1, 5, False, 528), (32, 2, 5, False, 528)),
]


@attrs.define
class Choice:
    """Tiles that take the place of the kernels' own; None as a tile: torch's product."""

    tiles: dict[Site, Any] = attrs.Factory(dict)
    attention: tuple[int, int, int, bool, int] | None = None

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        own, own_tile = linear_module.tile_for, attention_module.decode_tile

        def tile_for(
            tokens: int, outs: int, width: int, *others: Any, gated: bool = False, **more: Any
        ) -> Any:
            site = (outs, width, gated)
            return (
                self.tiles[site]
                if site in self.tiles
                else own(tokens, outs, width, *others, gated=gated, **more)
            )

        def decode_tile(*arguments: Any, **more: Any) -> Tile:
            tile = own_tile(*arguments, **more)
            return tile if self.attention is None else Tile(tile.rows, *self.attention[:4])

        programs = decode_module.PROGRAMS if self.attention is None else self.attention[4]
        with (
            mock.patch.object(linear_module, "tile_for", tile_for),
            mock.patch.object(attention_module, "decode_tile", decode_tile),
            mock.patch.object(decode_module, "PROGRAMS", programs),
        ):
            yield


@contextlib.contextmanager
def late_launches() -> Iterator[None]:
    """Every kernel begins when the one before it has ended."""
    with mock.patch.object(shared_module, "is_hopper_or_later", lambda: False):
        yield


def sites(config: ModelConfig) -> dict[str, Site]:
    shape, hidden = config.attention, config.hidden_size
    heads = shape.num_heads * shape.head_dim
    return {
        "qkv": (heads + 2 * shape.num_kv_heads * shape.head_dim, hidden, False),
        "o": (hidden, heads, False),
        "gate_up": (config.intermediate_size, hidden, True),
        "down": (hidden, config.intermediate_size, False),
        "head": (config.vocab_size, hidden, False),
    }


def tiles_of(site: Site, batch: int) -> list[Any]:
    """What to try for a product."""
    outs, width, gated = site
    if batch == 1:
        tiles = [
            GemvTile(max(rows // 2, 1) if gated else rows, columns, warps) for rows, columns, warps in ONE_ROW
        ]
        return [*dict.fromkeys(tiles), None]
    few = batch <= 32
    tokens = (16 if batch <= 16 else 32) if few else 64
    found = [SkinnyTile(tokens, *tile) for tile in (A_FEW_ROWS if few else SOME_ROWS)]
    if few and outs < 20_000:
        found += [SkinnyTile(8 if batch <= 8 else tokens, *tile) for tile in SLICED]
    if gated:
        found = [t for t in found if t.rows * t.columns * t.num_stages <= 64 * 256 * 3]
    thin_tiles = [ThinTile(8, *tile) for tile in (THIN_GATED if gated else THIN) if batch <= 8]
    return [
        *(t for t in found if 60 * t.rows <= outs * t.slices <= 600 * t.rows or outs > 20_000),
        *(t for t in thin_tiles if t.divides(width)),
        None,
    ]


def compilations(names: dict[str, Site], batch: int) -> list[Callable[[], Any]]:
    """Calls that launch what trying those tiles will launch."""
    calls: list[Callable[[], Any]] = []
    for name, site in names.items():
        _, width, gated = site
        x, weight = normal(batch, width, dtype=BF16), normal(128 * (2 if gated else 1), width, dtype=BF16)
        for tile in tiles_of(site, batch):
            out_dtype = torch.float32 if name == "head" else None
            if isinstance(tile, SkinnyTile | ThinTile):
                kernel: Callable[..., Tensor] = thin if isinstance(tile, ThinTile) else skinny
                calls.append(
                    lambda k=kernel, x=x, w=weight, t=tile, g=gated, d=out_dtype: k(
                        x, w, gated=g, out_dtype=d, tile=t
                    )
                )
            elif isinstance(tile, GemvTile):
                norm = Norm(x[0], 1e-5) if name in ("qkv", "gate_up") else None
                for residual in {"qkv": (None, x[0]), "gate_up": (x[0],)}.get(name, (None,)):
                    calls.append(
                        lambda x=x, w=weight, t=tile, g=gated, n=norm, r=residual, d=out_dtype: gemv(
                            x[0], w, residual=r, norm=n, gated=g, out_dtype=d, tile=t
                        )
                    )
    return calls


def milliseconds(bare: BareStep, replays: int) -> float:
    """Median time of a replay of the captured step."""
    graph = bare.captured()
    bare.reset()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(3):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def tuned(name: str, batch: int, params: Params, deadline: float) -> tuple[Choice, list[dict[str, Any]]]:
    """The best tile of every site in turn, and all that was tried."""
    config = replace(SHAPES[name], num_layers=TUNED_LAYERS)
    few = Params(params.tree | {"layers": params.tree["layers"][:TUNED_LAYERS]}, params.version)
    bare, choice, lines = BareStep(llama(config), few, batch), Choice(), []
    names = sites(config)

    def attempt(site: str, trial: Choice, tile: Any) -> float:
        try:
            with trial.made():
                us = milliseconds(bare, 25) * 1e3
        except torch.AcceleratorError:
            raise
        except Exception as error:
            lines.append({"site": site, "tile": str(tile), "error": f"{type(error).__name__}: {error}"[:200]})
            torch.cuda.synchronize()
            return float("inf")
        lines.append({"shape": name, "batch": batch, "site": site, "tile": str(tile), "us": us})
        return us

    def best(site: str, trials: list[tuple[Choice, Any]]) -> Choice:
        nonlocal choice
        times = []
        for trial, tile in trials:
            if time.monotonic() > deadline:
                break
            times.append((attempt(site, trial, tile), len(times)))
        if times:
            _, place = min(times)
            choice = trials[place][0]
            ranking = [f"{us:.1f} {trials[i][1]}" for us, i in sorted(times)]
            print(f"{name} x {batch} {site}: " + " | ".join(ranking[:5]) + f" ... {ranking[-1]}", flush=True)
        return choice

    attempt("own", choice, None)
    for site, key in names.items():
        if time.monotonic() < deadline:
            tiles = tiles_of(key, batch) if batch <= 64 else []
            best(site, [(attrs.evolve(choice, tiles=choice.tiles | {key: tile}), tile) for tile in tiles])
    tries = FEW_REQUESTS if batch <= 16 else MANY_REQUESTS
    best("attention", [(attrs.evolve(choice, attention=tile), tile) for tile in tries])
    return choice, lines


def attention_calls(name: str, batch: int, params: Params) -> list[Callable[[], Any]]:
    config = replace(SHAPES[name], num_layers=1)
    few = Params(params.tree | {"layers": params.tree["layers"][:1]}, params.version)
    bare = BareStep(llama(config), few, batch)

    def call(tile: tuple[int, int, int, bool, int]) -> Callable[[], Any]:
        def run() -> None:
            with Choice(attention=tile).made():
                bare.run()

        return run

    return [call(tile) for tile in (FEW_REQUESTS if batch <= 16 else MANY_REQUESTS)]


def profile(bare: BareStep, replays: int = 10) -> list[tuple[str, float, float]]:
    """Kernels of a step, the longest first: name, times a step, microseconds a step."""
    graph = bare.captured()
    bare.reset()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    rows = [(e.key[:60], e.count / replays, e.device_time_total / replays) for e in recorded.key_averages()]
    return sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])


def measured(name: str, batch: int, params: Params, choice: Choice, with_profile: bool) -> dict[str, Any]:
    """The whole step, launched early and late."""
    bare = BareStep(llama(SHAPES[name]), params, batch)
    line: dict[str, Any] = {"bench": "bare step", "shape": name, "batch": batch}
    with choice.made():
        line["ms"] = milliseconds(bare, 40)
        with late_launches():
            line["ms_late"] = milliseconds(bare, 40)
            if with_profile:
                line["kernels"] = profile(bare)
    print(f"{name} x {batch}: {line['ms']:.4f} ms, with late launches {line['ms_late']:.4f}", flush=True)
    for kernel, count, us in line.get("kernels", [])[:24]:
        print(f"    {kernel:<60} {count:6.1f} x {us / max(count, 1):8.2f} us = {us:8.1f} us")
    return line


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="*", default=["1B"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="no further tile is tried after this long"
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    options = parser.parse_args()
    begun, failed = time.monotonic(), 0
    versions = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name(),
    }
    report: dict[str, Any] = {"date": datetime.date.today().isoformat(), "versions": versions, "lines": []}

    def save() -> None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")

    if not options.no_checks:
        report["checks"] = []
        for label, holds, detail in all_checks(options.seed):
            report["checks"].append({"check": label, "holds": holds, "detail": detail})
            failed += not holds
            print(f"{'ok  ' if holds else 'FAIL'} {label}: {detail}", flush=True)
        print(f"checks took {time.monotonic() - begun:.0f} s, {failed} failed", flush=True)
        save()
    for name in options.shapes:
        if options.tune and time.monotonic() - begun > options.seconds:
            break
        params = random_params(SHAPES[name], seed=0, dtype=BF16, device="cuda")
        if options.tune:
            calls: list[Callable[[], Any]] = []
            for batch in options.batches:
                calls += compilations(sites(SHAPES[name]), batch) if batch <= 64 else []
                calls += attention_calls(name, batch, params)
            start = time.monotonic()
            compile_in_parallel(calls)
            print(f"{name}: {len(calls)} calls compiled in {time.monotonic() - start:.0f} s", flush=True)
        for batch in options.batches:
            choice = Choice()
            if options.tune and time.monotonic() - begun > options.seconds + 20:
                break
            if options.tune:
                choice, lines = tuned(name, batch, params, begun + options.seconds)
                report["lines"] += lines
            line = measured(name, batch, params, choice, options.profile and name == options.shapes[0])
            tiles = {site: str(choice.tiles.get(key, "own")) for site, key in sites(SHAPES[name]).items()}
            report["lines"].append(line | {"tiles": tiles, "attention": choice.attention})
            save()
        del params
        torch.cuda.empty_cache()
    print(f"took {time.monotonic() - begun:.0f} s", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
