"""Buffers and graphs on this GPU: what must hold, and what it costs.

    PYTHONPATH=.ci/src:.ci/test python -P tests/bench/gpu_graphs.py OUT.json [--device cpu]

Every graph mode gives the CPU's tokens; unrolled steps are single steps, bit by bit; a kernel that returns fresh KV is
refused at capture; a steady step uploads nothing and waits for nothing, as a profiler counts; closing the engine
returns its memory. With `--device cpu` all but what only a GPU has runs on a stand-in. The exit status is 1 if
something does not hold.
"""

import argparse
import datetime
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.kernels.types import Kernels
from purestep.pure.errors import CaptureError
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.scheduler import schedule
from purestep.pure.update import update_states
from purestep.state.bare import plans_ahead
from purestep.state.engine import Engine
from purestep.state.graph_api import CudaGraphs, GraphApi
from purestep.state.launch import whole_step
from purestep.state.run import run
from purestep.state.setup import cuda_kernels
from tests.state.fake_graphs import FakeGraphs

CONFIG = tiny_config(vocab_size=512, hidden_size=128, num_layers=4, max_position_embeddings=512)
MODEL, PARAMS = llama(CONFIG), random_params(CONFIG, seed=1, std=0.3)
SIZES: dict[str, Any] = {
    "kv_cache_bytes": 2**24,
    "max_model_len": 400,
    "max_num_reqs": 16,
    "max_num_batched_tokens": 96,
    "capture_progress": False,
}
NUM_FORKS = 13  # as a search makes them of one request, one behind the other
LENGTHS = (1, 7, 33, 64, 100, 129, 5, 16, 250, 3, 3)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40),
    "random": SamplingParams(seed=5, top_k=20, top_p=0.9, n=2, max_tokens=40),
    "penalties": SamplingParams(
        seed=5, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=40, logprobs=3
    ),
}
MODES: dict[str, dict[str, Any]] = {
    "none": {"cudagraph_mode": CUDAGraphMode.NONE},
    "full decode only": {"cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY, "unroll": 1},
    "full decode only, 4 steps at once": {"cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY, "unroll": 4},
    "full": {"cudagraph_mode": CUDAGraphMode.FULL, "capture_sizes": (1, 4, 8, 16, 32, 64, 96)},
    "piecewise": {"cudagraph_mode": CUDAGraphMode.PIECEWISE, "capture_sizes": (1, 4, 8, 16, 32, 64, 96)},
    "full and piecewise": {
        "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE,
        "capture_sizes": (1, 2, 4, 8, 16, 32, 64, 96),
    },
}
Row = dict[str, Any]


class Device:
    """Where everything runs, and what stands in for it."""

    def __init__(self, name: str) -> None:
        self.name, self.is_gpu = name, name == "cuda"
        self.params = Params(pytree.tree_map(lambda leaf: leaf.to(name), PARAMS.tree))
        self.kernels: Kernels = cuda_kernels() if self.is_gpu else donating

    def graph_api(self) -> GraphApi:
        return CudaGraphs(torch.device(self.name)) if self.is_gpu else FakeGraphs()

    def engine(self, **changes: Any) -> Engine:
        settings = {"device": self.name, "kernels": self.kernels, "graph_api": self.graph_api()} | SIZES
        return Engine((MODEL, self.params), **(settings | changes))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in LENGTHS]


def tokens(engine: Engine, params: SamplingParams) -> list[Any]:
    return [[o.token_ids for o in r.outputs] for r in engine.generate(prompts(), params, progress=False)]


def modes(device: Device) -> Iterator[Row]:
    """Tokens of every graph mode, 0 to 2 steps ahead, against the CPU's."""
    for name, params in SAMPLINGS.items():
        with Engine((MODEL, PARAMS), **SIZES) as engine:
            expected = tokens(engine, params)
        for mode, settings in MODES.items():
            for ahead in (0, 1, 2):
                with device.engine(steps_ahead=ahead, **settings) as engine:
                    holds = tokens(engine, params) == expected
                yield {"what": f"{name}, {mode}, {ahead} ahead: the tokens of the CPU", "holds": holds}


def decoding(device: Device, params: SamplingParams, num_reqs: int = 8) -> Engine:
    """An engine whose requests are behind their prefill."""
    engine = device.engine(steps_ahead=1, block_horizon=64, unroll=1)
    for i in range(num_reqs):
        engine.add_request(str(i), prompts()[i], params)
    for _ in range(8):
        engine.step()
    return engine


def begun(engine: Engine, num_steps: int, *, at_once: bool) -> list[Any]:
    """Steps begun one after another on the engine's buffers, or as one, behind its back."""
    turns = engine.turns
    now, pending = turns.now, []
    leased, plans = now.leased, plans_ahead(turns, num_steps)
    if at_once:
        _, scheduled = schedule(now.queue, num_steps)
        batch = update_states(now.batch, scheduled)
        padded, key = whole_step(turns.bound, turns.dispatch_keys, batch, leased.absorbed)
        assert key is not None and key.num_steps == num_steps
        plans = [(plan_step(padded, leased.absorbed), key)]
    for plan, own in plans:
        assert own is not None
        leased, result = run(turns.bound, leased, plan, key=own)
        pending.append(result)
    state = leased.value
    leaves = (state.ledger.table, state.token_ids[:-1], *(kv[1:] for kv in state.kv))
    tokens = np.concatenate([own.result().sampled_token_ids for own in pending], axis=1)
    return [tokens.tolist(), [leaf.cpu().clone() for leaf in leaves]]


def unrolled(device: Device) -> Iterator[Row]:
    """Eight steps in one graph against eight replays: outputs and every leaf of the state, bit by bit."""
    for name in ("greedy", "random"):
        params = replace(SAMPLINGS[name], max_tokens=40, n=1)
        results = []
        for num_steps in (1, 8):
            engine = decoding(device, params)
            turns = engine.turns
            ((_, key),) = plans_ahead(turns, 1)
            assert key is not None
            if num_steps > 1:
                turns.bound.captured.capture([replace(key, num_steps=num_steps)])
            results.append(begun(engine, 8, at_once=num_steps > 1))
            engine.close()
        (one, leaves), (many, others) = results
        holds = one == many and all(torch.equal(a, b) for a, b in zip(leaves, others, strict=True))
        yield {"what": f"{name}: 8 unrolled steps are 8 steps, bit by bit", "holds": holds}


def refusal(device: Device) -> Iterator[Row]:
    """A kernel that returns fresh KV."""
    try:
        device.engine(kernels=replace(device.kernels, attend=reference.attend)).close()
        message = ""
    except CaptureError as error:
        message = str(error)
    yield {
        "what": "fresh KV is refused at capture with its size",
        "holds": "bytes" in message,
        "says": message,
    }


def uploads(device: Device, num_steps: int = 128, horizon: int = 64) -> Iterator[Row]:
    """Copies to the device and waits in steady decode, as the profiler counts them."""
    if not device.is_gpu:
        return
    from torch.profiler import ProfilerActivity, profile, record_function

    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    with device.engine(
        steps_ahead=1, block_horizon=horizon, max_num_reqs=256, kv_cache_bytes=2**28
    ) as engine:
        for i in range(256):
            engine.add_request(str(i), [1, 2, 3, i], params)
        for _ in range(40):
            engine.step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            with record_function("steps"):
                for _ in range(num_steps):
                    engine.step()
            torch.cuda.synchronize()
    events = recorded.events()
    span = next(event.time_range for event in events if event.name == "steps")
    names = [e.name for e in events if span.start <= e.time_range.start < span.end]
    up = sum("HtoD" in event.name for event in events)
    down = sum("DtoH" in event.name for event in events)
    syncs = sum(name in ("cudaDeviceSynchronize", "cudaStreamSynchronize") for name in names)
    waits = sum(name == "cudaEventSynchronize" for name in names)
    yield {
        "what": f"{num_steps} steady steps at 256 rows, horizon {horizon}",
        "uploads": up,
        "downloads": down,
        "stream_or_device_synchronizations": syncs,
        "event_waits_for_the_step_before": waits,
        "holds": up <= -(-num_steps // horizon) and syncs == 0,
    }


def memory(device: Device) -> Iterator[Row]:
    """What the allocator holds before an engine and after it, closed or only dropped."""
    if not device.is_gpu:
        return

    def used() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    ends: dict[str, Callable[[Engine], None]] = {
        "closing": lambda engine: engine.close(),
        "dropping": lambda _: None,
    }
    with device.engine() as engine:
        for params in SAMPLINGS.values():  # handles and workspaces of libraries
            engine.generate(prompts(), params, progress=False)
    del engine
    for name, end in ends.items():
        for mode, settings in MODES.items():
            before = used()
            engine = device.engine(**settings)
            engine.generate(prompts(), SAMPLINGS["random"], progress=False)
            between = used()
            end(engine)
            if name == "dropping":
                del engine
            after = used()
            yield {
                "what": f"{name} the engine returns its memory ({mode})",
                "allocated": [before[0], between[0], after[0]],
                "reserved": [before[1], between[1], after[1]],
                "holds": after[0] <= before[0] and after[1] <= before[1],
            }


def moments(device: Device) -> Iterator[Row]:
    """A fork in the midst of decoding, its cost, and a rewind after 64 steps on the same blocks: the same again."""
    params = SamplingParams(seed=7, temperature=1.0, max_tokens=600, ignore_eos=True)
    settings: dict[str, Any] = {
        "max_model_len": 5120,
        "kv_cache_bytes": 2**28,
        "max_num_batched_tokens": 4096,
    }
    config = tiny_config(vocab_size=512, hidden_size=128, num_layers=4, max_position_embeddings=8192)
    model, weights = llama(config), random_params(config, seed=1, std=0.3)
    there = Params(pytree.tree_map(lambda leaf: leaf.to(device.name), weights.tree))
    common = {"device": device.name, "kernels": device.kernels, "graph_api": device.graph_api()}
    with Engine((model, there), **(common | SIZES | settings)) as engine:
        prompt = torch.randint(512, (4097,), generator=torch.Generator().manual_seed(1)).tolist()
        engine.add_request("long", prompt, params)
        for _ in range(6):
            engine.step()
        times = []
        for i in range(NUM_FORKS):
            begun = time.perf_counter()
            engine.fork("long", f"twin{i}")
            times.append((time.perf_counter() - begun) * 1e6)
        yield {
            "what": "fork of a request of more than 4,097 tokens, with a block in part",
            "us": sorted(times)[len(times) // 2],
            "all_us": times,
            "holds": sorted(times)[len(times) // 2] < 200,
        }
        for i in range(NUM_FORKS):
            engine.abort(f"twin{i}")
        here = engine.remember()
        histories = []
        for _ in range(2):
            engine.rewind(here)
            tokens = [[(o.req_id, o.outputs[0].token_ids) for o in engine.step()] for _ in range(64)]
            histories.append((tokens, engine.turns.now.leased.value.ledger.table.cpu().clone()))
        (one, ledger), (two, other) = histories
        yield {
            "what": "rewound after 64 steps on the same blocks, 64 steps give the same, the ledger bit by bit",
            "holds": one == two and torch.equal(ledger, other),
        }


CHECKS = (modes, unrolled, refusal, moments, uploads, memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    names = [check.__name__ for check in CHECKS]
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    options = parser.parse_args()
    device = Device(options.device)
    rows = []
    for check in [check for check in CHECKS if check.__name__ in options.only]:
        for row in check(device):
            rows.append({"bench": "graphs"} | row)
            print("ok  " if row["holds"] else "BAD ", row, flush=True)
    about: Row = {"versions": {"torch": torch.__version__}, "date": datetime.date.today().isoformat()}
    if device.is_gpu:
        import triton

        about["versions"] |= {"triton": triton.__version__, "device": torch.cuda.get_device_name()}
    options.out.write_text(json.dumps([row | about for row in rows], indent=1) + "\n")
    return int(not all(row["holds"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
