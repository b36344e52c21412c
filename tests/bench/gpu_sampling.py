"""What sampling costs beside a decode step, and scoring a prompt beside its prefill, with targets.

    PYTHONPATH=.ci/src:.ci/test python -P tests/bench/gpu_sampling.py OUT.json [--shape 1B] [--batches 64 256]

Penalties of a whole batch, in a graph of their own; the masks of grammars for every second request, made before, sent
up and applied between captured halves of the step; log-probabilities of prompts. Random weights; bfloat16 on a GPU. How
things are timed is said in `purestep.state.bench.methods`. `--shape tiny --device cpu` tries it out where there is no
GPU. The exit status is 1 if masked requests were given a forbidden token.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from purestep.pure.grammar import GrammarMask
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.layout import SamplerShape
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.scheduler import schedule
from purestep.pure.update import update_states
from purestep.state.bare import Plans, put_back
from purestep.state.bench.clocks import Clock, clock_of
from purestep.state.bench.engines import SPARE_TOKENS, decode_engine, prefill_engine
from purestep.state.bench.methods import GPU_METHOD, PREFILL_SEED, TINY_METHOD, Method, random_prompts
from purestep.state.bench.rows import about
from purestep.state.bench.shapes import SHAPES, Subject, load
from purestep.state.bench.steady import step_ms, take_turn
from purestep.state.engine import Engine
from purestep.state.loading.loaded import LoadedModel
from purestep.state.moments import remember, rewind
from purestep.state.turns import Turns
from purestep.state.two_phase import dispatched, execute, sample

TARGETS = {"penalties": 1.10, "masks": 1.05, "prompt logprobs": 1.30}  # times the same without
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
PENALIZED = replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1)
PENALTIES = SamplerShape(penalties=True)


@contextmanager
def decoding(engine: Engine, batch: int, params: SamplingParams, method: Method) -> Iterator[Turns]:
    """The engine's turns, once all requests of a batch decode; in the end they are aborted."""
    turns, names = engine.turns, [f"bench-{i}" for i in range(batch)]
    prompts = random_prompts(engine.limits.vocab_size, batch, method.context, seed=batch)
    engine.generate(prompts, replace(params, max_tokens=1), progress=False)  # now all begin to decode at once
    try:
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, prompt, replace(params, max_tokens=method.long + SPARE_TOKENS // 2))
        while turns.now.queue.waiting.states.num_items or turns.now.batch.layout.bounds.max_query_len != 1:
            take_turn(turns)
        for _ in range(method.short):
            take_turn(turns)
        yield turns
    finally:
        engine.abort(names)


def plans_of_halves(turns: Turns, num_steps: int) -> Plans:
    """The plans of the next steps, each with the graphs of its halves."""
    now = turns.now
    queue, batch, absorbed = now.queue, now.batch, now.leased.absorbed
    queue, plans = replace(queue, config=replace(queue.config, async_scheduling=True)), Plans()
    for _ in range(num_steps):
        queue, scheduled = schedule(queue)
        batch = update_states(batch, scheduled)
        padded, key = dispatched(turns.bound, turns.dispatch_keys, batch, absorbed)
        plans.append((plan_step(padded, absorbed), key))
        absorbed = padded
    return plans


def halves_ms(turns: Turns, mask: GrammarMask | None, method: Method, clock: Clock) -> tuple[float, bool]:
    """Milliseconds of a step in two halves, masked or not; and whether the last tokens are those that masks allow."""
    num_steps, now, seconds = method.long - method.short, turns.now, list[float]()
    moment = remember(now.leased, now.batch)
    plans, leased = plans_of_halves(turns, num_steps), now.leased
    for _ in range(1 + method.repeats):
        leased = rewind(moment, leased)
        begun = clock.idle()
        for plan, key in plans:
            executed = execute(turns.bound, leased, plan, key=key)
            leased, pending = sample(turns.bound, executed, grammar=mask)
        seconds.append(clock.idle() - begun)
    tokens = pending.result().sampled_token_ids[:, 0]
    put_back(turns, moment, leased)
    return statistics.median(seconds[1:]) / num_steps * 1e3, mask is None or obeys(tokens, mask)


def half_masked(batch: int, vocab_size: int) -> GrammarMask:
    """A mask for every second request, each with a quarter of all tokens."""
    rows = np.arange(0, batch, 2)
    bits = np.random.default_rng(0).random((len(rows), -(-vocab_size // 32) * 32)) < 0.25
    mask_of_row = np.full(batch, -1, np.int32)
    mask_of_row[rows] = np.arange(len(rows))
    return GrammarMask(np.packbits(bits, axis=1, bitorder="little").view(np.int32), mask_of_row)


def obeys(tokens: np.ndarray, mask: GrammarMask) -> bool:
    """Whether each token's bit is set in its row's mask."""
    bits = np.unpackbits(np.ascontiguousarray(mask.bitmask).view(np.uint8), axis=1, bitorder="little")
    pairs = zip(tokens.tolist(), np.asarray(mask.mask_of_row).tolist(), strict=False)
    return all(own < 0 or bits[own, token] for token, own in pairs)


def prefills_s(engine: Engine, kinds: Sequence[SamplingParams], method: Method, clock: Clock) -> list[float]:
    """Seconds up to the first token of every prompt, by kind; kinds take turns, with prompts that none had before."""
    seconds = [list[float]() for _ in kinds]
    for repeat in range(1 + method.repeats):
        for number, (params, own) in enumerate(zip(kinds, seconds, strict=True)):
            seed = PREFILL_SEED + repeat * len(kinds) + number
            prompts = random_prompts(
                engine.limits.vocab_size, method.prefill_batch, method.prefill_length, seed=seed
            )
            begun = clock.idle()
            results = engine.generate(prompts, replace(params, max_tokens=1), progress=False)
            own.append(clock.idle() - begun)
            scored = params.prompt_logprobs is not None
            assert all((result.prompt_logprobs is not None) == scored for result in results)
    return [statistics.median(own[1:]) for own in seconds]


def measure(
    loaded: LoadedModel, subject: Subject, method: Method, batches: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A row for each cost: with, without, their ratio and its target."""
    clock = clock_of(subject.device)
    captured: dict[str, Any] = {"capture_samplers": (PENALTIES,), "capture_halves": True}
    with decode_engine(loaded, subject, method, batches, **captured) as engine:
        for batch in batches:
            with decoding(engine, batch, GREEDY, method) as turns:
                greedy = step_ms(turns, method, clock).ms
                halves, _ = halves_ms(turns, None, method, clock)
                masked, obeyed = halves_ms(turns, half_masked(batch, loaded.model.vocab_size), method, clock)
            with decoding(engine, batch, PENALIZED, method) as turns:
                penalized = step_ms(turns, method, clock).ms
            yield row("penalties", batch, penalized, greedy, "ms")
            yield row("masks", batch, masked, halves, "ms") | {"whole_ms": greedy, "obeyed": obeyed}
    with prefill_engine(loaded, subject, method) as engine:
        kinds = [GREEDY, *(replace(GREEDY, prompt_logprobs=wanted) for wanted in (0, 1))]
        plain, *others = prefills_s(engine, kinds, method, clock)
        for wanted, scored in enumerate(others):
            facts = {"length": method.prefill_length, "prompt_logprobs": wanted}
            yield row("prompt logprobs", method.prefill_batch, scored, plain, "s") | facts


def row(bench: str, batch: int, value: float, without: float, unit: str) -> dict[str, Any]:
    target = TARGETS[bench]
    print(
        f"{bench:16} batch {batch:4}  {value:10.4f} {unit} with, {without:10.4f} without: "
        f"{value / without:6.3f} times (target {target})",
        flush=True,
    )
    numbers = {unit: value, f"without_{unit}": without, "ratio": value / without, "target": target}
    return {"bench": bench, "batch": batch, **numbers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="1B", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", nargs="*", type=int, default=[64, 256])
    options = parser.parse_args()
    on_gpu = torch.device(options.device).type == "cuda"
    dtype = "bfloat16" if on_gpu else "float32"
    subject = Subject(shape=options.shape, device=options.device, dtype=dtype)
    method = GPU_METHOD if on_gpu else attrs.evolve(TINY_METHOD, repeats=1)
    own = {"shape": options.shape, **about(options.device)}
    rows = [found | own for found in measure(load(subject), subject, method, options.batches)]
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(not all(found.get("obeyed", True) for found in rows))


if __name__ == "__main__":
    sys.exit(main())
