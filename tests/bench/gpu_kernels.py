"""Every Triton kernel on this GPU: checked against float64, then timed in CUDA graphs.

    PYTHONPATH=.ci/src:.ci/test python -P tests/bench/gpu_kernels.py OUT.json [--only SUBSTRING] [--no-checks] [--tune]

Prints a table: microseconds (median over replays), bytes or flops that the work needs at least, and the share of what
the device does at best, measured first (reading, writing, matrix product). Inputs rotate through more memory than the
L2 holds. `--tune` tries other tiles for attention. The exit status is 1 if a check fails.
"""

import argparse
import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import triton
from torch import Tensor

from purestep.kernels.triton import cuda_donating
from purestep.kernels.triton.mixed import FEW_QUERIES, mixed, mixed_tile
from purestep.kernels.triton.softmax import Tile, score_form
from purestep.state.bench.shapes import SHAPES as MODELS
from tests.kernels.triton.cases import AttentionCase, attention_case
from tests.kernels.triton.gpu_checks import SHAPES, VOCAB, all_checks, compile_in_parallel, integers, normal

L2_BYTES = 120e6  # of inputs that replays rotate through: twice the L2 of an H200
BF16 = torch.bfloat16
Call = Callable[[], Any]


@attrs.frozen
class Bench:
    """One row of the table: the same work on several sets of inputs."""

    name: str
    calls: list[Call]
    num_bytes: float = 0.0
    flops: float = 0.0


def rotating(name: str, make: Callable[[int], Call], *, num_bytes: float = 0.0, flops: float = 0.0) -> Bench:
    """A row whose inputs are made anew for each set; sets that fit into the L2 together are rotated, up to 8."""
    count = 1 if flops else int(min(8, max(1, L2_BYTES // num_bytes)))
    return Bench(name, [make(i) for i in range(count)], num_bytes, flops)


# ---------------------------------------------------------------- rows


def rows() -> Iterator[Callable[[], list[Bench]]]:
    """Groups of rows, each made when its turn comes, so that memory is free again between them."""
    for name in ("1B", "8B", "0.6B"):
        for batch in (1, 8, 64, 256):
            yield lambda name=name, batch=batch: [
                attention_row(name, f"x {batch} at 1120", [(1120, 1)] * batch)
            ]
        yield lambda name=name: [attention_row(name, "prefill 16 x 2048", [(2048, 2048)] * 16)]
    yield lambda: [attention_row("1B", "x 1 at 131072", [(131072, 1)])]
    yield lambda: [attention_row("1B", "x 16 at 16384", [(16384, 1)] * 16)]
    yield lambda: [attention_row("8B", "prefill 1 x 8192", [(8192, 8192)])]
    yield lambda: [attention_row("1B", "64 decodes and a chunk", [(1120, 1)] * 64 + [(4096, 2048)])]
    for tokens in (1, 64, 256, 8192):
        yield lambda tokens=tokens: dense_rows(tokens)
    for name in ("1B", "8B", "0.6B"):
        for tokens in (1, 8, 64, 256):
            yield lambda name=name, tokens=tokens: product_rows(name, tokens)
    for reqs in (1, 8, 64, 256):
        yield lambda reqs=reqs: sampling_rows(reqs)
    yield layout_rows


def attention_row(name: str, label: str, requests: list[tuple[int, int]]) -> Bench:
    heads, kv_heads, dim = SHAPES[name]
    attend = cuda_donating().attend
    num_bytes, flops = attention_work(requests, heads, kv_heads, dim)

    def make(i: int) -> Call:
        case = attention_case(
            requests, heads=heads, kv_heads=kv_heads, dim=dim, dtype=BF16, device="cuda", seed=i
        )
        return lambda: attend(**case.tensors, **case.static)

    is_prefill = any(queries > 1 for _, queries in requests)
    work = {"flops": flops} if is_prefill else {"num_bytes": num_bytes}
    return rotating(f"attend {name} {label}", make, **work)


def attention_work(
    requests: list[tuple[int, int]], heads: int, kv_heads: int, dim: int
) -> tuple[float, float]:
    """Bytes of keys and values, and multiply-adds of both products times two."""
    pairs = sum(queries * length - queries * (queries - 1) / 2 for length, queries in requests)
    return sum(length for length, _ in requests) * kv_heads * dim * 4.0, 4.0 * pairs * heads * dim


def dense_rows(tokens: int) -> list[Bench]:
    kernels, hidden, inner = cuda_donating(), 2048, 8192
    gain = normal(hidden, dtype=BF16)

    def norm(_: int) -> Call:
        x, residual = normal(tokens, hidden, dtype=BF16), normal(tokens, hidden, dtype=BF16)
        return lambda: kernels.add_rms_norm(x, residual, gain, 1e-5)

    def rotate(_: int) -> Call:
        qkv, angle = normal(tokens, 48, 64, dtype=BF16), normal(tokens, 32, dtype=BF16)
        return lambda: kernels.rotate(qkv[:, :32], qkv[:, 32:40], angle, angle)

    def activation(_: int) -> Call:
        x = normal(tokens, 2 * inner, dtype=BF16)
        return lambda: kernels.silu_and_mul(x)

    weight = normal(VOCAB, hidden, dtype=BF16)

    def embed(_: int) -> Call:
        ids = integers(tokens, high=VOCAB)
        return lambda: kernels.embed(weight, ids)

    return [
        rotating(f"add_rms_norm {tokens} x {hidden}", norm, num_bytes=8.0 * tokens * hidden),
        rotating(f"rotate {tokens} x (32 + 8) x 64", rotate, num_bytes=4.0 * tokens * 40 * 64),
        rotating(f"silu_and_mul {tokens} x {inner}", activation, num_bytes=6.0 * tokens * inner),
        rotating(f"embed {tokens} x {hidden}", embed, num_bytes=4.0 * tokens * hidden),
    ]


def product_rows(name: str, tokens: int) -> list[Bench]:
    """The products of a layer and of the head, gate and up with their norm and activation; weights count as bytes."""
    config, kernels = MODELS[name], cuda_donating()
    hidden, inner, shape = config.hidden_size, config.intermediate_size, config.attention
    heads = shape.num_heads * shape.head_dim

    def row(label: str, outs: int, width: int) -> Bench:
        def make(_: int) -> Call:
            x, weight = normal(tokens, width, dtype=BF16), normal(outs, width, dtype=BF16) * width**-0.5
            if label == "gate_up":
                return lambda: kernels.norm_gate_up(kernels, x, x, weight[0], 1e-5, weight)
            if label == "head":
                return lambda: kernels.logits(kernels, x, weight)
            return lambda: kernels.linear(x, weight, None)

        return rotating(f"{label} {name} x {tokens}", make, num_bytes=2.0 * outs * width)

    return [
        row("qkv", heads + 2 * shape.num_kv_heads * shape.head_dim, hidden),
        row("o", hidden, heads),
        row("gate_up", 2 * inner, hidden),
        row("down", hidden, inner),
        row("head", config.vocab_size, hidden),
    ]


def sampling_rows(reqs: int) -> list[Bench]:
    kernels, logit_bytes = cuda_donating(), 4.0 * reqs * VOCAB
    half, some = torch.full((reqs,), 0.5, device="cuda"), torch.arange(reqs, device="cuda")
    p = torch.full((reqs,), 0.95, device="cuda")
    fifty, off = (
        torch.full((reqs,), 50, dtype=torch.int32, device="cuda"),
        torch.zeros(reqs, dtype=torch.int32, device="cuda"),
    )
    history = integers(reqs, 2000, high=VOCAB)

    def row(name: str, work: Callable[[Tensor], Any], passes: float, sharpness: float = 1.0) -> Bench:
        def make(_: int) -> Call:
            logits = normal(reqs, VOCAB, dtype=torch.float32) * sharpness
            return lambda: work(logits)

        return rotating(f"{name} x {reqs}", make, num_bytes=passes * logit_bytes)

    def truncate(top_k: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda logits: kernels.truncate(logits, top_k, p, half * 0)

    def penalize(logits: Tensor) -> Tensor:
        return kernels.penalize(logits, history, fifty, fifty * 40, half, half, half)

    return [
        row("greedy", kernels.greedy, 1),
        row("scale_by_temperature", lambda x: kernels.scale_by_temperature(x, half), 2),
        row("uniforms", lambda _: kernels.uniforms(some, some, off, purpose=0, width=VOCAB), 1),
        row("draw", lambda x: kernels.draw(x, x), 2),
        row("truncate top-k 50, top-p 0.95", truncate(fifty), 2),
        row("truncate top-p 0.95, peaked", truncate(off), 2, sharpness=6.0),
        row("truncate top-p 0.95, flat", truncate(off), 2, sharpness=0.5),
        row("gather_logprobs 5", lambda x: kernels.gather_logprobs(x, some, 5), 1),
        row("penalize", penalize, 2),
    ]


def layout_rows() -> list[Bench]:
    kernels = cuda_donating()
    starts = torch.arange(257, dtype=torch.int32, device="cuda")
    table, changed = integers(7, 257), integers(6, 256)
    columns, order = torch.arange(6, device="cuda")[:, None], torch.randperm(256, device="cuda")[None]
    kv = normal(4000, 2, 16, 8, 64, dtype=BF16)
    blocks = torch.randperm(4000, device="cuda").int()
    block_bytes = 2.0 * kv[0].numel()
    return [
        Bench("ragged_index 256", [lambda: kernels.ragged_index(starts, 256)], 16.0 * 256),
        Bench(
            "write ledger 6 x 256",
            [lambda: kernels.write(table, (columns, order), changed)],
            8.0 * changed.numel(),
        ),
        Bench("copy_blocks 1", [lambda: kernels.copy_blocks(kv, blocks[:1], blocks[1:2])], 2 * block_bytes),
        Bench(
            "copy_blocks 1000",
            [lambda: kernels.copy_blocks(kv, blocks[:1000], blocks[1000:2000])],
            2000 * block_bytes,
        ),
        Bench("zero_blocks 1000", [lambda: kernels.zero_blocks(kv, blocks[:1000])], 1000 * block_bytes),
    ]


# ---------------------------------------------------------------- tiles


def tile_rows() -> Iterator[Callable[[], list[Bench]]]:
    """Attention of several queries with other tiles; those of decodes are tried by gpu_gemm.py, within steps."""
    for name in ("1B", "8B", "0.6B"):
        for label, requests in (("prefill", [(2048, 2048)] * 4), ("5 queries x 64", [(1120, 5)] * 64)):
            yield lambda name=name, label=label, requests=requests: mixed_tiles(name, label, requests)


def read_only(case: AttentionCase) -> tuple[Tensor, ...]:
    return tuple(case.tensors[name] for name in ("q", "kv", "query_start_loc", "seq_lens", "block_table"))


def mixed_tiles(name: str, label: str, requests: list[tuple[int, int]]) -> list[Bench]:
    heads, kv_heads, dim = SHAPES[name]
    num_bytes, flops = attention_work(requests, heads, kv_heads, dim)
    case = attention_case(requests, heads=heads, kv_heads=kv_heads, dim=dim, dtype=BF16, device="cuda")
    form = score_form(case.static["scale"], None, None)
    queries, group = requests[0][1], heads // kv_heads
    cuts = [
        (32, 128, 4, 3),
        (64, 32, 4, 5),
        (64, 64, 4, 3),
        (64, 128, 4, 3),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
    ]
    cuts += [(128, 128, 8, 3), (256, 64, 8, 3), (16, 64, 4, 3), (16, 128, 4, 3)]
    tiles = [mixed_tile(BF16, dim, group, queries), *(Tile(*cut) for cut in cuts)]
    work = {"flops": flops} if queries > FEW_QUERIES else {"num_bytes": num_bytes}
    return [
        Bench(
            f"mixed {name} {label} {attrs.astuple(tile)[:4]}",
            [lambda tile=tile: mixed(*read_only(case), form=form, tile=tile)],
            **work,
        )
        for tile in dict.fromkeys(tiles)
        if tile.rows >= group * min(queries, FEW_QUERIES)
    ]


# ---------------------------------------------------------------- measuring


def microseconds(bench: Bench, replays: int = 15) -> float:
    """Median time of one call, from replays of a graph that makes them in turn."""
    for call in bench.calls:
        call()
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), max(1, 16 // len(bench.calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in bench.calls:
                call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(3):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return statistics.median(times) * 1e3 / (rounds * len(bench.calls))


def ceilings() -> dict[str, float]:
    """Bytes a second that a large array is read with, or read and written if that is more; operations a second of a
    large bf16 product.

    Arrays are added up and negated: a copy would be a node of another kind in a graph, and slower than kernels are.
    """
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    read_us = microseconds(Bench("read", [lambda: source.sum()]))
    negate_us = microseconds(Bench("read and write", [lambda: torch.neg(source, out=target)]))
    a, b = normal(8192, 8192, dtype=BF16), normal(8192, 8192, dtype=BF16)
    product_us = microseconds(Bench("product", [lambda: a @ b]))
    bytes_s = 1e6 * source.nbytes * max(1 / read_us, 2 / negate_us)
    return {"bytes_s": bytes_s, "flops_s": 2e6 * 8192**3 / product_us}


def measure(bench: Bench, ceiling: dict[str, float]) -> dict[str, Any]:
    line: dict[str, Any] = {"kernel": bench.name}
    try:
        us = microseconds(bench)
    except Exception as error:
        return line | {"error": f"{type(error).__name__}: {error}"[:300]}
    kind, work = ("flops", bench.flops) if bench.flops else ("bytes", bench.num_bytes)
    return line | {"us": us, kind: work, "share": work / us * 1e6 / ceiling[f"{kind}_s"]}


def show(line: dict[str, Any]) -> None:
    if "error" in line:
        print(f"{line['kernel']:<66} {line['error']}", flush=True)
        return
    kind = "flops" if "flops" in line else "bytes"
    rate = line[kind] / line["us"] / 1e6
    print(
        f"{line['kernel']:<66} {line['us']:>10.2f} us {rate:>8.3f} T{kind}/s {line['share']:>7.1%}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--tune", action="store_true", help="time tiles of attention instead of all kernels")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "seed": arguments.seed,
    }
    print(report, flush=True)
    failed = 0
    if not arguments.no_checks:
        checks = []
        for name, holds, detail in all_checks(arguments.seed):
            checks.append({"check": name, "holds": holds, "detail": detail})
            failed += not holds
            print(f"{'ok  ' if holds else 'FAIL'} {name}: {detail}", flush=True)
        report["checks"] = checks
        print(f"{len(checks)} checks, {failed} failed", flush=True)
    report["ceilings"] = ceilings()
    print(report["ceilings"], flush=True)
    lines: list[dict[str, Any]] = []
    for group in tile_rows() if arguments.tune else rows():
        benches = [bench for bench in group() if arguments.only in bench.name]
        compile_in_parallel([bench.calls[0] for bench in benches])
        for bench in benches:
            lines.append(measure(bench, report["ceilings"]))
            show(lines[-1])
    report["rows"] = lines
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
