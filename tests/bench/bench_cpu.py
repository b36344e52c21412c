"""SmolLM2 on the CPU in float32: the engine against transformers, in alternating pairs on the same machine.

    python -P tests/bench/bench_cpu.py [--threads 2] [--pairs 5] [--out tests/bench/results/cpu.json]

The engine is measured through `step`, scheduling and output processing included. transformers runs static shapes (a
static cache of just the length it needs, sdpa) and computes the logits of last tokens only; picking the largest is
its whole sampling. Both are given the same random prompts and the same weights. On a machine that does other things
only the ratios mean something. The exit status is 1 if one of them is below its target.
"""

import argparse
import datetime
import gc
import inspect
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from purestep.pure.models.names import to_hf_views
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.bench.rows import processor
from purestep.state.engine import Engine
from purestep.state.loading.load import default_model, load_model
from purestep.state.loading.loaded import LoadedModel

CONTEXT, NUM_STEPS = 128, 32  # decode: tokens of each prompt, and steps that are timed
NUM_WARM = 3  # steps before that
PROMPT = 512  # prefill: tokens of the prompt
CASES = (("decode", 1, 1.5), ("decode", 8, 1.7), ("prefill", 1, 1.2))  # what, batch, target
OUT = Path(__file__).parent / "results" / "cpu.json"


class Ours:
    """The engine."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.engine = Engine(loaded, max_model_len=1024, enable_prefix_caching=False)

    def _add(self, ids: Tensor, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for i, prompt in enumerate(ids.tolist()):
            self.engine.add_request(str(i), prompt, params)

    def decode(self, ids: Tensor) -> float:
        """Tokens per second of NUM_STEPS steps in which every request decodes."""
        self._add(ids, 1 + NUM_WARM + NUM_STEPS)
        for _ in range(1 + NUM_WARM):
            self.engine.step()
        seconds = timed(lambda: [self.engine.step() for _ in range(NUM_STEPS)])
        assert not self.engine.has_unfinished()
        return len(ids) * NUM_STEPS / seconds

    def prefill(self, ids: Tensor) -> float:
        """Prompt tokens per second up to the first output token."""
        seconds = timed(lambda: (self._add(ids, 1), self.engine.step()))
        assert not self.engine.has_unfinished()
        return ids.numel() / seconds


class Peer:
    """transformers, with a loop of no more than it needs."""

    def __init__(self, loaded: LoadedModel) -> None:
        config = loaded.model.config
        shape = config.attention
        self.model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                tie_word_embeddings=config.tied_embeddings,
                attn_implementation="sdpa",
            )
        ).eval()
        views = to_hf_views(config, loaded.params.tree)
        self.model.load_state_dict({"lm_head.weight": views["model.embed_tokens.weight"]} | views)
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    @torch.inference_mode()
    def _start(self, ids: Tensor, num_outputs: int) -> None:
        """An empty cache for so many tokens, its memory allocated and touched."""
        self.cache = transformers.StaticCache(self.model.config, max_cache_len=ids.shape[1] + num_outputs)
        self._forward(ids)  # allocates
        self.cache.reset()

    @torch.inference_mode()
    def _forward(self, ids: Tensor) -> Tensor:
        """The next token of each row."""
        cache = {self.cache_name: self.cache}
        return self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache).logits[:, -1].argmax(-1)

    def decode(self, ids: Tensor) -> float:
        """Tokens per second of NUM_STEPS steps in which every row decodes."""
        self._start(ids, 1 + NUM_WARM + NUM_STEPS)
        token = self._forward(ids)
        for _ in range(NUM_WARM):
            token = self._forward(token[:, None])

        def steps() -> None:
            nonlocal token
            for _ in range(NUM_STEPS):
                token = self._forward(token[:, None])

        return len(ids) * NUM_STEPS / timed(steps)

    def prefill(self, ids: Tensor) -> float:
        """Prompt tokens per second up to the first output token."""
        self._start(ids, 1)
        return ids.numel() / timed(lambda: self._forward(ids).tolist())


def timed(work: Callable[[], Any]) -> float:
    """Seconds, without a garbage collection in between."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds


def measure(
    ours: Ours, peer: Peer, what: str, batch: int, target: float, *, num_pairs: int
) -> dict[str, Any]:
    """Medians of alternating pairs; the ratio is the median of the pairs' ratios."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for pair in range(num_pairs + 1):
        length = CONTEXT if what == "decode" else PROMPT
        ids = torch.randint(ours.engine.limits.vocab_size, (batch, length), generator=generator)
        result = getattr(ours, what)(ids), getattr(peer, what)(ids)
        if pair:  # the first one warms up
            pairs.append(result)
    mine, theirs = zip(*pairs, strict=True)
    ratios = [a / b for a, b in pairs]
    return {
        "bench": "cpu",
        "shape": "SmolLM2-135M float32",
        "batch": batch,
        "what": what,
        "tok_s": round(statistics.median(mine), 1),
        "peer_tok_s": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "target": target,
        "threads": torch.get_num_threads(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT, help="rows are appended here (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(default_model())
    ours, peer = Ours(loaded), Peer(loaded)
    about = {
        "versions": {name: version(name) for name in ("purestep", "torch", "transformers")}
        | {"python": platform.python_version()},
        "processor": processor(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    rows = []
    for what, batch, target in CASES:
        rows.append(measure(ours, peer, what, batch, target, num_pairs=arguments.pairs) | about)
        print(json.dumps(rows[-1]), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return int(any(row["ratio"] < row["target"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
