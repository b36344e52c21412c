"""What the host does between two steps: `update_states` and `plan_step`, from the columnar SchedulerOutput.

    python -P tests/bench/bench_plan.py [--steps 300] [--out tests/bench/results/plan.json]

Every request decodes. In each step no, one, sixteen or all of them change: they get another block, or they finish and
others come in their place. Times are medians over steps, in microseconds; settling lies outside. `conversion_us` is
what it costs to make the same SchedulerOutput from vLLM's dicts and lists. Importing is measured in fresh processes,
next to what importing torch alone takes there. The exit status is 1 if steady decode misses its target.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from purestep.pure.interop import scheduler_output_from_vllm
from purestep.pure.plan import plan_step
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from purestep.pure.settle import settle
from purestep.pure.update import update_states

BLOCK, PROMPT, NUM_BLOCKS = 16, 100, 40
TARGETS = {256: 40.0, 1024: 80.0}  # microseconds, steady decode
PARAMS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
OUT = Path(__file__).parent / "results" / "plan.json"


class Traffic:
    """A scheduler for a full batch that decodes for ever. Blocks are dealt out in turn: nobody reads them."""

    def __init__(self, num_rows: int, num_changed: int, change: str, max_model_len: int) -> None:
        self.num_rows, self.num_changed, self.change = num_rows, num_changed, change
        self.limits = BatchLimits(num_rows, max_model_len, 32_000, (BLOCK,), (1 << 20,))
        self.num_arrived = self.num_blocks = 0
        self.prompt = tuple(range(PROMPT))
        self.ids: tuple[str, ...] = ()
        self.ones = np.ones(num_rows, np.int32)

    def arrivals(self, count: int) -> tuple[NewRequestData, ...]:
        """New requests, with blocks for as long as they run."""
        numbers = range(self.num_arrived, self.num_arrived + count)
        self.num_arrived += count
        return tuple(
            NewRequestData(f"request-{i}", self.prompt, PARAMS, self.blocks(NUM_BLOCKS)) for i in numbers
        )

    def blocks(self, count: int) -> tuple[tuple[int, ...]]:
        """The next blocks; it takes longer to come round to them again than any request stays."""
        first = 1 + self.num_blocks % (self.limits.num_blocks[0] - NUM_BLOCKS)
        self.num_blocks += count
        return (tuple(range(first, first + count)),)

    def first(self) -> SchedulerOutput:
        """All prefills at once."""
        new = self.arrivals(self.num_rows)
        self.ids = tuple(request.req_id for request in new)
        return SchedulerOutput(new, CachedRequestData.make_empty(), self.ids, self.ones * PROMPT)

    def next(self, batch: InputBatch) -> SchedulerOutput:
        """Everybody runs a token, or its prefill if it has just come."""
        leaving = self.num_changed if self.change == "requests" else 0
        gone, new = self.ids[:leaving], self.arrivals(leaving)
        staying = self.ids[leaving:] if leaving else self.ids
        rows = np.fromiter(map(batch.row_of.__getitem__, staying), np.intp, len(staying))
        columns = batch.columns
        growing = self.ids[: self.num_changed if self.change == "blocks" else 0]
        cached = CachedRequestData(
            req_ids=staying,
            num_computed_tokens=columns.num_computed_tokens_settled[rows],
            num_output_tokens=columns.num_tokens[rows] - columns.num_prompt_tokens[rows],
            new_block_ids={req_id: self.blocks(1) for req_id in growing},
        )
        counts = self.ones
        if leaving:
            self.ids = staying + tuple(request.req_id for request in new)
            counts = np.concatenate([self.ones[leaving:], self.ones[:leaving] * PROMPT])
        return SchedulerOutput(new, cached, self.ids, counts, frozenset(gone))


def as_vllm(output: SchedulerOutput) -> dict[str, Any]:
    """The same step in upstream's form."""
    cached = output.scheduled_cached_reqs
    new = [
        {
            "req_id": request.req_id,
            "prompt_token_ids": list(request.prompt_token_ids),
            "sampling_params": {"temperature": 0.0, "max_tokens": None, "ignore_eos": True},
            "block_ids": tuple(map(list, request.block_ids)),
            "num_computed_tokens": 0,
        }
        for request in output.scheduled_new_reqs
    ]
    return {
        "scheduled_new_reqs": new,
        "scheduled_cached_reqs": {
            "req_ids": list(cached.req_ids),
            "new_block_ids": [cached.new_block_ids.get(r) for r in cached.req_ids],
            "num_computed_tokens": cached.num_computed_tokens.tolist(),
            "num_output_tokens": cached.num_output_tokens.tolist(),
        },
        "num_scheduled_tokens": output.num_scheduled_tokens_by_id,
        "total_num_scheduled_tokens": output.total_num_scheduled_tokens,
        "finished_req_ids": set(output.finished_req_ids),
    }


def known(batch: InputBatch) -> InputBatch:
    """The batch once its step is settled: everybody got a token."""
    rows = batch.layout.row_of_index
    yes = np.ones(len(rows), np.bool_)
    tokens = np.full((len(rows), 1), 5, np.int32)
    output = StepOutput(tokens, batch.columns.num_computed_tokens_bound[rows], yes, ~yes)
    return settle(batch, batch, output)


def measure(rows: int, changed: int, change: str, max_model_len: int, num_steps: int) -> dict[str, Any]:
    """Median and 90th percentile over steps, and the median of converting every tenth of them."""
    traffic = Traffic(rows, changed, change, max_model_len)
    absorbed = update_states(InputBatch.make_empty(traffic.limits), traffic.first())
    batch, times, conversions = known(absorbed), [], []
    for step in range(num_steps):
        output = traffic.next(batch)
        start = time.perf_counter()
        new = update_states(batch, output)
        plan = plan_step(new, absorbed)
        times.append((time.perf_counter() - start) * 1e6)
        if step % 10 == 0:
            theirs = as_vllm(output)
            start = time.perf_counter()
            scheduler_output_from_vllm(theirs)
            conversions.append((time.perf_counter() - start) * 1e6)
        batch, absorbed = known(new), new
        del plan  # what it holds is given back here, not while the clock runs
    times.sort()
    return {
        "bench": "plan",
        "rows": rows,
        "changed": "all" if changed == rows else changed,
        "change": change if changed else None,
        "us": round(statistics.median(times), 1),
        "us_p90": round(times[len(times) * 9 // 10], 1),
        "conversion_us": round(statistics.median(conversions), 1),
        "max_model_len": max_model_len,
    }


def measure_imports(num_runs: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of an import in a fresh process, and of torch's part of it."""
    code = "import time; start = time.perf_counter(); import {0}; print(1e3 * (time.perf_counter() - start))"
    medians = {}
    for module in ("torch", "purestep.pure", "purestep.pure.step"):
        runs = [
            float(subprocess.check_output([sys.executable, "-P", "-c", code.format(module)], text=True))
            for _ in range(num_runs)
        ]
        medians[module] = statistics.median(runs)
    for module in ("purestep.pure", "purestep.pure.step"):
        milliseconds, torch = round(medians[module], 2), round(medians["torch"], 1)
        yield {"bench": "import", "module": module, "ms": milliseconds, "torch_alone_ms": torch}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=OUT, help="rows are appended here (default: %(default)s)")
    arguments = parser.parse_args()
    if not 10 <= arguments.steps <= NUM_BLOCKS * BLOCK - PROMPT:
        parser.error(
            f"--steps must be 10 to {NUM_BLOCKS * BLOCK - PROMPT}: requests have {NUM_BLOCKS} blocks"
        )
    about = {
        "versions": {name: version(name) for name in ("torch", "numpy", "attrs")}
        | {"python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    rows = []
    for max_model_len in (2048, 131_072):
        for num_rows in TARGETS:
            for changed, change in (
                (0, "blocks"),
                *((n, change) for change in ("blocks", "requests") for n in (1, 16, num_rows)),
            ):
                steps = arguments.steps if changed < num_rows else arguments.steps // 10
                rows.append(measure(num_rows, changed, change, max_model_len, max(steps, 10)) | about)
                print(json.dumps(rows[-1]), flush=True)
    for row in measure_imports(5):
        rows.append(row | about)
        print(json.dumps(rows[-1]), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return int(any(row.get("changed") == 0 and row["us"] > TARGETS[row["rows"]] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
