"""The engine on this GPU: captured steps against eager ones and the CPU's, then decode through `generate`.

    PYTHONPATH=.ci/src:.ci/test python -P tests/bench/gpu_engine.py OUT.json [--shapes 1B 8B] [--batches 1 8 64 256]

Decode: distinct random prompts of 1024 tokens whose KV is cached; the time of 160 greedy tokens less that of 32, over
128; median of 3. Random weights, bfloat16. The exit status is 1 if tokens differ.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.models.model import Model
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine


def shape(
    hidden: int,
    layers: int,
    heads: int,
    head_dim: int,
    inner: int,
    vocab: int,
    tied: bool,
    qk_norm: bool = False,
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        attention=AttentionConfig(num_heads=heads, num_kv_heads=8, head_dim=head_dim, qk_norm=qk_norm),
        rope=RopeConfig(theta=500000.0),
        rms_norm_eps=1e-5,
        tied_embeddings=tied,
        max_position_embeddings=131072,
    )


SHAPES = {
    "0.6B": shape(1024, 28, 16, 128, 3072, 151936, True, qk_norm=True),
    "1B": shape(2048, 16, 32, 64, 8192, 128256, True),
    "8B": shape(4096, 32, 32, 128, 14336, 128256, False),
}
PROMPT_LEN, BANDWIDTH = 1024, 4.48e12
TARGETS = {  # milliseconds a step
    "0.6B": {1: 0.70, 8: 0.90, 64: 2.80, 256: 8.70},
    "1B": {1: 0.78, 8: 0.90, 64: 1.50, 256: 3.50},
    "8B": {1: 4.00, 8: 4.30, 64: 6.60, 256: 15.9},
}
PREFILL = {  # tokens per second: what the matrix products allow, and the target
    "0.6B": (640_000, 380_000),
    "1B": (343_000, 280_000),
    "8B": (46_000, 42_100),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "decode": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 1},
}


def check_equal() -> list[dict[str, Any]]:
    """Tokens of a small float32 model: on the CPU, eagerly on the GPU, captured, and captured one step ahead."""
    config = tiny_config(vocab_size=512, hidden_size=128, num_layers=4, max_position_embeddings=512)
    model, params = llama(config), random_params(config, seed=1, std=0.3)
    there = Params(torch.utils._pytree.tree_map(lambda leaf: leaf.cuda(), params.tree))
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
        "captured": {"steps_ahead": 0},
        "captured, one ahead": {"steps_ahead": 1},
        "captured, two ahead": {"steps_ahead": 2},
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


def _tokens(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    return [[o.token_ids for o in r.outputs] for r in engine.generate(prompts, params, progress=False)]


def decode_rows(name: str, model: Model, params: Params, batches: list[int]) -> list[dict[str, Any]]:
    config = SHAPES[name]
    weights = sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(params.tree))
    if not config.tied_embeddings:
        weights -= config.vocab_size * config.hidden_size * 2
    per_token = sum(2 * k.num_kv_heads * k.head_dim * 2 for k in model.kv_layers)
    rows = []
    biggest = max(batches)
    begun = time.monotonic()
    engine = Engine(
        (model, params),
        dtype=torch.bfloat16,
        device="cuda",
        kv_cache_bytes=int(per_token * (biggest * 1216 + 4096)),
        max_model_len=1280,
        max_num_reqs=biggest,
        max_num_batched_tokens=8192,
        block_horizon=128,
    )
    rows.append(
        {"bench": "startup", "shape": name, "s": time.monotonic() - begun, "capture": _capture(engine)}
    )
    print(rows[-1], flush=True)
    with engine:
        generator = torch.Generator().manual_seed(0)
        for batch in batches:
            prompts = torch.randint(config.vocab_size, (batch, PROMPT_LEN), generator=generator).tolist()
            floor = (weights + batch * per_token * 1120) / BANDWIDTH * 1e3
            for what, extra in SAMPLING.items():
                ms = decode_ms(engine, prompts, extra)
                row = {
                    "bench": what,
                    "shape": name,
                    "batch": batch,
                    "ms": ms,
                    "level": "engine",
                    "floor": floor,
                }
                rows.append(row | {"target": TARGETS[name].get(batch) if what == "decode" else None})
                print(
                    f"{what:8} {name:5} x {batch:<4} {ms:8.3f} ms  floor {floor:7.3f} {floor / ms:6.1%}",
                    flush=True,
                )
    return rows


def prefill_row(name: str, model: Model, params: Params) -> dict[str, Any]:
    """Prompt tokens per second of 16 prompts of 2048 tokens, one output token each, nothing cached; median of 5."""
    config, batch, length = SHAPES[name], 16, 2048
    per_token = sum(2 * k.num_kv_heads * k.head_dim * 2 for k in model.kv_layers)
    engine = Engine(
        (model, params),
        dtype=torch.bfloat16,
        device="cuda",
        kv_cache_bytes=per_token * (batch * (length + 64) + 4096),
        max_model_len=length + 64,
        max_num_reqs=batch,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        capture_sizes=(batch,),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    generator, times = torch.Generator().manual_seed(0), []
    with engine:
        for _ in range(6):
            prompts = torch.randint(config.vocab_size, (batch, length), generator=generator).tolist()
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.generate(prompts, sampling, progress=False)
            times.append(time.perf_counter() - start)
    tok_s = batch * length / statistics.median(times[1:])
    row = {"bench": "prefill", "shape": name, "batch": batch, "tok_s": tok_s, "level": "engine"}
    row |= {"ceiling": PREFILL[name][0], "target": PREFILL[name][1]}
    print(f"prefill  {name:5} x {batch:<4} {tok_s:10,.0f} tokens/s  target {row['target']:,}", flush=True)
    return row


def decode_ms(engine: Engine, prompts: list[list[int]], sampling: dict[str, Any]) -> float:
    """Milliseconds of one decode step, scheduling and output processing included."""
    times: dict[int, list[float]] = {32: [], 160: []}
    for num_tokens in (32, 160) * 4:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False, **sampling)
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.generate(prompts, params, progress=False)
        times[num_tokens].append(time.perf_counter() - start)
    # The first of each warms up: kernels are compiled, prompts cached.
    return (statistics.median(times[160][1:]) - statistics.median(times[32][1:])) / 128 * 1e3


def _capture(engine: Engine) -> dict[str, Any] | None:
    report = engine.capture_report
    return (
        None
        if report is None
        else {"graphs": report.num_graphs, "s": report.seconds, "bytes": report.num_bytes}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="*", default=["1B"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64, 256])
    options = parser.parse_args()
    import triton

    rows = check_equal()
    for name in options.shapes:
        model = llama(SHAPES[name])
        params = random_params(SHAPES[name], seed=0, dtype=torch.bfloat16, device="cuda")
        rows.append(prefill_row(name, model, params))
        rows += decode_rows(name, model, params, options.batches)
        del params
        torch.cuda.empty_cache()
    versions = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name(),
    }
    date = datetime.date.today().isoformat()
    options.out.write_text(
        json.dumps([row | {"versions": versions, "date": date} for row in rows], indent=1) + "\n"
    )
    return int(any(row.get("equal") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
