"""The batch-invariant kernels on this GPU: the same bits in every batch, and what that costs.

    PYTHONPATH=.ci/src:.ci/test python -P tests/bench/gpu_invariant.py OUT.json [--shape 1B] [--batch 64]

One request's tokens and the logits of each (its largest 20, raw) are compared bit by bit: alone, in batches of 8 and
64, its prompt whole and in chunks, eagerly and in graphs. Then decode of a batch is timed with both sets of kernels, by
the method of `purestep bench`. Random weights, bfloat16. The exit status is 1 if a bit differs.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from purestep.kernels.triton import cuda_donating, cuda_invariant
from purestep.kernels.types import Kernels
from purestep.pure.models.config import ModelConfig
from purestep.pure.models.initialize import random_params
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.layout import SamplerShape
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.bench.clocks import clock_of
from purestep.state.bench.engines import decode_engine, generator_of
from purestep.state.bench.methods import GPU_METHOD, SAMPLINGS, decode_ms, random_prompts
from purestep.state.bench.rows import about
from purestep.state.bench.shapes import SHAPES, Subject, load
from purestep.state.engine import Engine

LAYERS = 4  # of the model whose bits are compared
PROMPT, TOKENS = 700, 24
Bits = tuple[list[int], bytes]


def worlds() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """A name, how many other requests there are, and settings of the engine."""
    eager, graphs = (
        {"cudagraph_mode": CUDAGraphMode.NONE},
        {"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE},
    )
    yield "alone, eager", 0, eager
    yield "alone, in graphs", 0, graphs
    yield "alone, in chunks of 100", 0, eager | {"max_num_batched_tokens": 100}
    yield "alone, in chunks of 37, in graphs", 0, graphs | {"max_num_batched_tokens": 37}
    for others in (7, 63):
        yield f"among {others}, eager", others, eager
        yield f"among {others}, in graphs", others, graphs
        yield f"among {others}, in chunks of 257", others, graphs | {"max_num_batched_tokens": 257}


def bits_of(
    config: ModelConfig, params: Any, kernels: Kernels, others: int, settings: dict[str, Any]
) -> Bits:
    """Tokens of the first request, and the bits of the logits that each was chosen from."""
    prompts = random_prompts(config.vocab_size, 1 + others, PROMPT, seed=0)
    prompts = [prompt[: PROMPT - 9 * (i % 64)] for i, prompt in enumerate(prompts)]
    wanted = SamplingParams(
        temperature=0.0,
        max_tokens=TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=20,
        logprobs_mode="raw_logits",
    )
    sizes: dict[str, Any] = {
        "kv_cache_bytes": 2**30,
        "max_model_len": PROMPT + 2 * TOKENS,
        "max_num_reqs": 64,
        "enable_prefix_caching": False,
        "capture_progress": False,
        "dtype": torch.bfloat16,
        "device": "cuda",
    }
    with Engine((llama(config), params), kernels=kernels, **(sizes | settings)) as engine:
        captured = engine.turns.bound.captured
        if captured is not None:  # by default no graph tells logits
            told = SamplerShape(num_logprobs=20, logprobs_modes=("raw_logits",))
            captured.capture([replace(key, sampler=told) for key in captured.keys if key.sampler is not None])
        output = engine.generate(prompts, wanted, progress=False)[0].outputs[0]
    assert output.logprobs is not None
    return list(output.token_ids), output.logprobs.logprobs.tobytes()


def checks(shape: str) -> list[dict[str, Any]]:
    config = replace(SHAPES[shape], num_layers=LAYERS)
    params = random_params(config, seed=0, dtype=torch.bfloat16, device="cuda")
    rows, expected = [], None
    for name, others, settings in worlds():
        found = bits_of(config, params, cuda_invariant(), others, settings)
        expected = expected or found
        rows.append(
            {"bench": "invariant", "shape": shape, "layers": LAYERS, "what": name, "equal": found == expected}
        )
        print("ok  " if rows[-1]["equal"] else "BAD ", name, flush=True)
    usual = [bits_of(config, params, cuda_donating(), others, settings) for _, others, settings in worlds()]
    num_differing = sum(bits != usual[0] for bits in usual)
    what = "worlds in which the usual kernels differ"
    rows.append(
        {"bench": "invariant", "shape": shape, "what": what, "of": len(usual), "count": num_differing}
    )
    print(f"the usual kernels differ in {num_differing} of {len(usual)} worlds", flush=True)
    return rows


def cost(shape: str, batch: int) -> list[dict[str, Any]]:
    """Decode with both sets, by turns."""
    subject, clock = Subject(shape=shape, device="cuda", dtype="bfloat16"), clock_of("cuda")
    loaded = load(subject)
    prompts = random_prompts(loaded.model.vocab_size, batch, GPU_METHOD.context, seed=0)
    times = {}
    for name, kernels in (("usual", cuda_donating()), ("invariant", cuda_invariant())):
        with decode_engine(loaded, subject, GPU_METHOD, (batch,), kernels=kernels) as engine:
            times[name] = decode_ms(generator_of(engine), prompts, SAMPLINGS["decode"], GPU_METHOD, clock)
    ratio = times["invariant"] / times["usual"]
    print(f"{shape} x {batch}: {times}, ratio {ratio:.3f}", flush=True)
    row = {"shape": shape, "batch": batch}
    timed = row | {"bench": "decode", "level": "engine", "context": GPU_METHOD.context}
    return [
        *(timed | {"kernels": name, "ms": ms} for name, ms in times.items()),
        row | {"bench": "invariant", "what": "cost of a decode step", "ratio": ratio, "target": 1.15},
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="1B", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    rows = checks(options.shape) + cost(options.shape, options.batch)
    own = about("cuda")
    options.out.write_text(json.dumps([row | own for row in rows], indent=1) + "\n")
    return int(any(row.get("equal") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
