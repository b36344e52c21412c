"""Many random steps on this GPU beside the reference on the CPU: arrivals, chunks, preemption, ends, forks, rewinds.

    PYTHONPATH=.ci/src:.ci/test python -P tests/bench/gpu_soak.py OUT.json [--steps 10000] [--seed 0] [--device cpu]

One scheduler drives both. Batches are dispatched to captured graphs (whole decode steps, pieces for the rest) and
padded. The ledgers must be equal after every step, and every 100th step all that is read: tokens, block tables,
sampling rows, keys and values (float32, so up to rounding), and that no slot changed but those that were written.
Device memory must not grow. The exit status is 1 if something differs.
"""

import argparse
import datetime
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.pure.dispatch import determine_batch_execution_and_padding, dispatch_keys
from purestep.pure.errors import OutOfBlocksError, OutOfRowsError
from purestep.pure.fork import fork_request, keep_blocks
from purestep.pure.initial import initial_state
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.padding import pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig
from purestep.pure.records.params import Params
from purestep.pure.records.queue import Request, SchedulerConfig
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.state import StepState
from purestep.pure.rows import drop, free_rows
from purestep.pure.scheduler import abort, add, check_invariants, make_queue, schedule, update
from purestep.pure.scheduler.branches import fork, go_back, hold, let_go
from purestep.pure.settle import settle
from purestep.pure.step import execute, sample
from purestep.pure.update import update_states
from purestep.state.buffers import PersistentBuffers
from purestep.state.captures import graph_keys
from purestep.state.graph_api import CudaGraphs
from purestep.state.moments import remember, rewind
from purestep.state.run import BoundStep, run
from purestep.state.setup import cuda_kernels
from tests import laws
from tests.state.fake_graphs import FakeGraphs
from tests.worlds import is_held, targets

CONFIG = tiny_config(vocab_size=128, hidden_size=64, num_layers=2, max_position_embeddings=256)
MODEL, PARAMS = llama(CONFIG), random_params(CONFIG, seed=1, std=0.5)
EOS = (0,)
SCHEDULER = SchedulerConfig(
    num_blocks=(40,),
    block_sizes=(16,),
    max_num_reqs=12,
    max_num_batched_tokens=64,
    max_model_len=160,
    block_horizon=32,
    async_scheduling=True,
)
LIMITS = BatchLimits(12, 160, 128, (16,), (40,), EOS)
KEYS = dispatch_keys(DispatchConfig((1, 2, 4, 8, 12, 16, 32, 64), 12), CUDAGraphMode.FULL_AND_PIECEWISE)
KINDS = (
    SamplingParams(temperature=0.0, max_tokens=60),
    SamplingParams(temperature=0.0, max_tokens=30, min_tokens=4, stop_token_ids=(5, 9, 77)),
    SamplingParams(seed=3, temperature=0.8, top_k=20, top_p=0.9, max_tokens=40),
    SamplingParams(seed=4, temperature=1.0, max_tokens=100),
    SamplingParams(seed=5, repetition_penalty=1.2, logprobs=2, max_tokens=25),
    SamplingParams(seed=6, logit_bias={7: 3.0}, max_tokens=20),
)


class Soak:
    """A scheduler, the state as a value on the CPU, and buffers on the device."""

    def __init__(self, device: str, seed: int) -> None:
        self.rng, self.device = np.random.default_rng(seed), torch.device(device)
        is_gpu = self.device.type == "cuda"
        tree = torch.utils._pytree.tree_map(lambda leaf: leaf.to(device), PARAMS.tree)
        self.bound = BoundStep(
            PersistentBuffers(MODEL, LIMITS, device=device),
            MODEL,
            Params(tree),
            cuda_kernels() if is_gpu else donating,
            CudaGraphs(self.device) if is_gpu else FakeGraphs(),
        )
        assert self.bound.captured is not None
        self.captured = self.bound.captured
        self.captured.capture(graph_keys(KEYS))
        self.queue, self.batch = make_queue(SCHEDULER), InputBatch.make_empty(LIMITS)
        self.leased = self.bound.buffers.lease()
        self.state = laws.with_canary(initial_state(MODEL, LIMITS), 1e9)
        for kv in self.leased.value.kv:
            kv.fill_(1e9)
        self.absorbed = self.batch
        self.begun: list[Any] = []
        self.moments: list[Any] = []
        self.counts: Counter[str] = Counter()
        self.prompts = [self.rng.integers(1, 128, 100).tolist() for _ in range(4)]

    def disturb(self) -> None:
        """What callers do between steps, now and then."""
        rng, num_live = self.rng, len(self.queue.live)
        if num_live < 20 and rng.random() < 0.4:
            self.counts["arrivals"] += 1
            number = self.counts["arrivals"]
            prompt = self.prompts[rng.integers(4)][: rng.integers(1, 100)]
            request = Request(
                f"r{number}", tuple(prompt), KINDS[rng.integers(len(KINDS))], arrival=number, stream=number,
                eos_token_ids=EOS,
            )  # fmt: skip
            self.queue = add(self.queue, request, vocab_size=128)
        names = sorted(req_id for req_id, _ in self.queue.live.items())
        if names and rng.random() < 0.02:
            self.counts["aborts"] += 1
            self.queue = abort(self.queue, [names[rng.integers(len(names))]])
        elif names and rng.random() < 0.05:
            self._fork(names[rng.integers(len(names))])
        if len(self.moments) < 3 and rng.random() < 0.02:
            self._remember()
        elif self.moments and rng.random() < 0.02:
            self._rewind(self.moments[rng.integers(len(self.moments))])
        elif self.moments and rng.random() < 0.02:
            self.queue = let_go(self.queue, self.moments.pop(rng.integers(len(self.moments)))[0])

    def _fork(self, parent: str) -> None:
        self.counts["arrivals"] += 1
        number = self.counts["arrivals"]
        req_id, stream = f"r{number}", number
        has_row = parent in self.batch.row_of and bool(free_rows(drop(self.batch, [req_id])))
        try:
            forked = fork(self.queue, parent, req_id, arrival=number, stream=stream, has_row=has_row)
        except (OutOfRowsError, OutOfBlocksError):
            return
        self.counts["forks"] += 1
        self.queue, self.batch = forked.queue, keep_blocks(self.batch, forked.kept)
        if forked.has_run:
            self.batch = fork_request(self.batch, parent, req_id, stream=stream, goes_on=forked.goes_on)

    def _remember(self) -> None:
        self.counts["moments"] += 1
        name = self.counts["moments"]
        shareable = hold(self.queue, name)
        self.queue, self.batch = shareable.queue, keep_blocks(self.batch, shareable.kept)
        device = remember(self.leased, self.batch)
        moment = (name, self.queue, self.batch, self.absorbed, self.state, device, list(self.begun))
        self.moments.append(moment)

    def _rewind(self, moment: Any) -> None:
        self.counts["rewinds"] += 1
        _, queue, self.batch, self.absorbed, state, device, begun = moment
        self.queue = go_back(self.queue, queue)
        self.state, self.begun = replace(state, kv=self.state.kv), list(begun)
        self.leased = rewind(device, self.leased)

    def step(self, *, check: bool) -> bool:
        """Settle what is two steps old, then one step in both worlds; whether anything ran."""
        while len(self.begun) > 1 or (self.begun and self.rng.random() < 0.3):
            self._settle()
        self.queue, output = schedule(self.queue)
        self.batch = update_states(self.batch, output)
        self.counts["preemptions"] += len(output.preempted_req_ids)
        if not output.req_ids:
            while self.begun:
                self._settle()
            return False
        old, old_absorbed, plan = self.state, self.absorbed, plan_step(self.batch, self.absorbed)
        with torch.no_grad():
            start = replace(old, inbox=plan.inbox.to("cpu"))
            executed = execute(MODEL, PARAMS, start, kernels=reference)
            self.state, expected = sample(executed, kernels=reference)
        self.absorbed = self.batch
        absorbed, key = self.leased.absorbed, None
        bounds = self.batch.layout.bounds
        execution = determine_batch_execution_and_padding(KEYS, bounds)
        if execution.cudagraph_mode is not CUDAGraphMode.NONE:
            key = self.captured.covering(execution, bounds.sampler)
        padded = (
            self.batch if key is None else pad_batch(self.batch, execution.descriptor, before=absorbed.layout)
        )
        mode = "eager" if key is None else execution.cudagraph_mode.name.lower()
        self.counts[f"{mode} steps"] += 1
        before = self._on_host(self.leased.clone()) if check else None
        self.leased, pending = run(self.bound, self.leased, plan_step(padded, absorbed), key=key)
        ours, theirs = self.leased.value.ledger.table.cpu(), self.state.ledger.table
        assert laws.digest(ours[:, :-1]) == laws.digest(theirs[:, :-1]), "the ledgers differ"
        num_reqs = bounds.num_reqs
        assert (pending.result().sampled_token_ids[:num_reqs] == expected.sampled_token_ids.numpy()).all()
        self.counts["tokens"] += int((expected.sampled_token_ids >= 0).sum())
        self.begun.append((self.batch, pending))
        if before is not None:
            slots = laws.written_slots(self.state, executed.inputs)
            held = [row for row in self.batch.row_of.values() if is_held(row, old_absorbed, self.batch)]
            self._check_everything(before, slots, output, held)
        return True

    def _settle(self) -> None:
        batch, pending = self.begun.pop(0)
        result = pending.result()
        self.queue, finished = update(self.queue, batch.req_ids, result)
        self.batch = settle(self.batch, batch, result)
        self.counts["finished"] += len(finished)

    def _on_host(self, state: StepState) -> StepState:
        moved: StepState = torch.utils._pytree.tree_map(
            lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, state
        )
        return moved

    def _check_everything(self, before: StepState, slots: Any, output: Any, held: list[int]) -> None:
        self.counts["whole comparisons"] += 1
        check_invariants(self.queue)
        laws.assert_rows_are_a_partition(self.batch)
        after = self._on_host(self.leased.clone())
        laws.assert_frame(before, after, slots, targets(output))
        laws.assert_prefix_kept(before, after, held)
        rows = sorted(self.batch.row_of.values())
        laws.assert_same_rows(self.state, after, rows)
        for row in rows:
            position = torch.arange(int(after.ledger.num_computed_tokens[row]))
            block = after.block_tables[0][row, position // 16].long()
            for ours, theirs in zip(after.kv, self.state.kv, strict=True):
                torch.testing.assert_close(
                    ours[block, :, position % 16], theirs[block, :, position % 16], rtol=1e-3, atol=1e-4
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.set_num_threads(1)
    soak, begun, memory = Soak(options.device, options.seed), time.monotonic(), list[int]()
    row: dict[str, Any] = {"bench": "soak", "seed": options.seed, "holds": True}
    number = 0
    try:
        while number < options.steps:
            soak.disturb()
            if not soak.step(check=number % 100 == 99):
                continue
            number += 1
            if number % 1000 == 0:
                used = torch.cuda.memory_allocated() if soak.device.type == "cuda" else 0
                memory.append(used - sum(moment[-2].nbytes for moment in soak.moments))
                print(
                    f"step {number}, {time.monotonic() - begun:.0f} s, {dict(soak.counts)}, {memory[-1]:,} bytes",
                    flush=True,
                )
    except AssertionError as error:
        row |= {"holds": False, "why": f"step {number}: {error}"}
    row["holds"] &= (
        max(memory, default=0) - min(memory, default=0) < 2**20
    )  # outputs on their way come and go
    row |= {"steps": number, "counts": dict(soak.counts), "bytes": memory, "s": time.monotonic() - begun}
    row |= {"versions": {"torch": torch.__version__}, "date": datetime.date.today().isoformat()}
    if soak.device.type == "cuda":
        import triton

        row["versions"] |= {"triton": triton.__version__, "device": torch.cuda.get_device_name()}
    print(row, flush=True)
    options.out.write_text(json.dumps([row], indent=1) + "\n")
    return int(not row["holds"])


if __name__ == "__main__":
    sys.exit(main())
