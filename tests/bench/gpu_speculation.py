"""Speculation on this GPU: what it wins where drafts stand, and what verifying them costs where they do not.

    PYTHONPATH=.ci/src:.ci/test python -P tests/bench/gpu_speculation.py OUT.json [--target 8B] [--draft 0.6B]
        [--what ngram verify draft]

Captured steps on one device, without a host between them: drafts are made, verified and kept by the step itself. The
target has random weights of a named shape, but says a cycle of tokens over and over: so it is known which drafts are
right, and what an n-gram drafter finds. A draft model runs for what it costs; a coin then says which of its drafts are
the right ones. `--device cpu --target tiny --draft tiny` tries it without a GPU. The exit status is 1 if tokens differ
from those of plain steps.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.kernels.donating import donating
from purestep.kernels.triton import attention
from purestep.kernels.types import Kernels
from purestep.pure.drafters.draft_model import draft_model
from purestep.pure.drafters.joined import with_draft_params, with_drafter
from purestep.pure.drafters.ngram import ngram
from purestep.pure.initial import initial_state
from purestep.pure.models.config import ModelConfig
from purestep.pure.models.initialize import random_params
from purestep.pure.models.llama import llama
from purestep.pure.models.model import Model, prepare_params
from purestep.pure.propose import equip
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.drafter import Drafter, Proposal
from purestep.pure.records.layout import Layout, LayoutBounds, bucket
from purestep.pure.records.noise import PROPOSE
from purestep.pure.records.params import Params
from purestep.pure.records.state import LEDGER_COLUMNS, Ledger, StepState
from purestep.pure.step import step
from purestep.state.bench.clocks import clock_of
from purestep.state.bench.floors import measure_rates, weight_bytes
from purestep.state.bench.rows import about
from purestep.state.bench.shapes import SHAPES
from purestep.state.graph_api import CudaGraphs
from purestep.state.setup import cuda_kernels

BLOCK_SIZE = 16
WHAT = ("ngram", "verify", "draft")
CYCLE = 37  # tokens that the target says over and over
Row = dict[str, Any]


@attrs.frozen
class Bench:
    """Where steps run, and how many are timed."""

    device: str
    context: int
    num_steps: int
    num_rounds: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def kernels(self) -> Kernels:
        return cuda_kernels() if self.device == "cuda" else donating


def cyclic(config: ModelConfig, bench: Bench) -> tuple[Model, Params]:
    """Random weights; the next token is the last one's successor, since layers add next to nothing to embeddings."""
    config = replace(config, tied_embeddings=False)
    params = random_params(config, dtype=bench.dtype, device=bench.device)
    tree = params.tree
    layers = tuple(layer | {name: layer[name] * 1e-3 for name in ("o", "down")} for layer in tree["layers"])
    head = torch.cat(
        [tree["embed"][CYCLE - 1 : CYCLE], tree["embed"][: CYCLE - 1], tree["embed"][CYCLE:] * 0]
    )
    return llama(config), Params(tree | {"layers": layers, "head": head * 50}, params.version)


def knowing(num_drafts: int) -> Drafter:
    """A drafter that costs next to nothing and is always right."""
    return Drafter(num_drafts, partial(_known, num_drafts=num_drafts))


def _known(*given: Any, kernels: Kernels, num_drafts: int) -> Proposal:
    _, _, state, _ = given
    rows = state.layout.row_of_index
    last = state.ledger.num_known_tokens.index_select(0, rows) - 1  # the token at place p is p % CYCLE
    place = torch.arange(1, num_drafts + 1, device=rows.device)
    return Proposal(((last[:, None] + place) % CYCLE).to(torch.int32))


def coin(drafter: Drafter, acceptance: float) -> Drafter:
    """The drafter at its own cost, with right drafts in the place of its own for a share of places, else wrong ones."""
    return replace(drafter, propose=partial(_tossed, inner=drafter, acceptance=acceptance))


def _tossed(*given: Any, kernels: Kernels, inner: Drafter, acceptance: float) -> Proposal:
    proposal, right = (
        inner.propose(*given, kernels=kernels),
        _known(*given, kernels=kernels, num_drafts=inner.num_drafts).drafts,
    )
    rows = given[2].layout.row_of_index.long()
    known = given[2].ledger.num_known_tokens.index_select(0, rows)
    chance = kernels.uniforms(rows * 0, rows, known, purpose=PROPOSE, width=inner.num_drafts)
    drafts = torch.where(chance < acceptance, right, (right + 1) % CYCLE)
    return replace(proposal, drafts=torch.where(proposal.drafts >= 0, drafts, -1))


class Loop:
    """One layout of decoding requests on one device, run again and again."""

    def __init__(
        self,
        bench: Bench,
        model: Model,
        params: Params,
        batch: int,
        drafter: Drafter | None,
        *,
        num_drafts: int = 0,
    ) -> None:
        num_drafts = num_drafts if drafter is None else drafter.num_drafts
        self.bench, self.batch, self.num_drafts = bench, batch, num_drafts
        longest = bench.context + (1 + num_drafts) * (bench.num_steps + 2) + num_drafts
        each = -(-longest // BLOCK_SIZE)
        limits = BatchLimits(
            max_num_reqs=batch,
            max_model_len=each * BLOCK_SIZE,
            vocab_size=model.vocab_size,
            block_sizes=(BLOCK_SIZE,),
            num_blocks=(1 + batch * each,),
            num_drafts=num_drafts,
        )
        state = initial_state(model, limits, dtype=bench.dtype, device=bench.device)
        if drafter is not None:
            state = equip(state, drafter, vocab_size=model.vocab_size)
        self.state = self._begun(state, each, limits)
        self.first = (self.state.ledger.table.clone(), self.state.token_ids.clone())
        run = partial(
            step,
            model,
            prepare_params(model, params, kernels=bench.kernels),
            kernels=bench.kernels,
            drafter=drafter,
        )
        self.replay = self._captured(torch.no_grad()(run))

    def _begun(self, state: StepState, each: int, limits: BatchLimits) -> StepState:
        """Requests in the midst of their cycles, with all blocks they will need; what is in their caches is zero."""
        device, batch, bench = self.bench.device, self.batch, self.bench
        tokens = state.token_ids.clone()
        tokens[:-1, : bench.context] = torch.arange(bench.context, device=device) % CYCLE
        table = state.ledger.table.clone()
        told = {"num_computed_tokens": bench.context - 1, "num_known_tokens": bench.context, "active": 1}
        for name, value in (told | {"length_limit": limits.max_model_len}).items():
            table[LEDGER_COLUMNS.index(name), :-1] = value
        blocks = torch.zeros_like(state.block_tables[0])
        blocks[:-1] = 1 + torch.arange(batch * each, device=device, dtype=torch.int32).view(batch, each)
        width = 1 + self.num_drafts
        bounds = LayoutBounds(
            num_reqs=batch,
            num_tokens=batch * width,
            max_query_len=width,
            max_seq_len=bucket(limits.max_model_len),
            num_drafts=self.num_drafts,
        )
        starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * width
        return replace(
            state,
            ledger=Ledger(table, state.ledger.drafts),
            token_ids=tokens,
            block_tables=(blocks,),
            room=torch.full_like(state.room, limits.max_model_len),
            layout=Layout(torch.arange(batch, device=device, dtype=torch.int32), starts, bounds),
        )

    def _captured(self, run: Callable[[StepState], tuple[StepState, Any]]) -> Callable[[], object]:
        before = [leaf.data_ptr() for leaf in pytree.tree_leaves(self.state)]

        def one() -> Any:
            after, output = run(self.state)
            assert [leaf.data_ptr() for leaf in pytree.tree_leaves(after)] == before, "a leaf moved"
            return output

        one()
        return (
            one
            if self.bench.device == "cpu"
            else CudaGraphs(torch.device(self.bench.device)).capture(one).replay
        )

    def reset(self) -> None:
        """As it was before the first step; without drafts."""
        table, tokens = self.first
        self.state.ledger.table.copy_(table)
        self.state.token_ids.copy_(tokens)
        if self.state.ledger.drafts is not None:
            self.state.ledger.drafts.fill_(-1)

    def timed(self) -> tuple[float, float]:
        """Milliseconds of a step, the median of the rounds, and tokens of a request and step."""
        clock, seconds, tokens = clock_of(self.bench.device), list[float](), 0.0
        for _ in range(1 + self.bench.num_rounds):  # the first one warms up
            self.reset()
            for _ in range(2):
                self.replay()
            known = self._known()
            begun = clock.idle()
            for _ in range(self.bench.num_steps):
                self.replay()
            seconds.append((clock.idle() - begun) / self.bench.num_steps)
            tokens = (self._known() - known) / self.bench.num_steps / self.batch
        return statistics.median(seconds[1:]) * 1e3, tokens

    def is_cycle(self) -> bool:
        """Whether what was said is what plain steps say."""
        known = self.state.ledger.num_known_tokens[:-1, None]
        place = torch.arange(self.state.token_ids.shape[1], device=self.bench.device)
        right: Tensor = (self.state.token_ids[:-1] == place % CYCLE) | (place >= known)
        return bool(right.all())

    def _known(self) -> int:
        return int(self.state.ledger.num_known_tokens[:-1].sum())


def rows_of(
    bench: Bench,
    target: tuple[Model, Params],
    draft: tuple[Model, Params],
    names: tuple[str, str],
    read: float,
    wanted: Sequence[str],
) -> Iterator[Row]:
    """Every measurement that is wanted, one by one."""
    plain: dict[int, float] = {}

    def measured(what: str, batch: int, drafter: Drafter | None, **facts: Any) -> Row:
        model, params = target
        if drafter is not None and drafter.kv_layers:
            model, params = with_drafter(model, drafter), with_draft_params(params, draft[1])
        loop = Loop(bench, model, params, batch, drafter, num_drafts=facts.get("num_drafts", 0))
        ms, tokens = loop.timed()
        plain.setdefault(batch, ms)
        return {
            "bench": what,
            "batch": batch,
            "ms": ms,
            "tokens_per_step": tokens,
            "tok_s": batch * tokens / ms * 1e3,
            "speedup": tokens * plain[batch] / ms,
            "equal": loop.is_cycle(),
            **facts,
        }

    for batch in (1, 64):
        yield measured("plain", batch, None)
        for num_drafts in (2, 4, 7) if "ngram" in wanted else ():
            drafter = ngram(num_drafts=num_drafts, min_n=1, max_n=3)
            yield measured("ngram", batch, drafter, num_drafts=num_drafts)
        if "verify" not in wanted:
            continue
        yield measured("verify without drafts", batch, None, num_drafts=4)
        yield measured("verify", batch, knowing(4), num_drafts=4)
        with mock.patch.object(attention, "is_short", lambda *shape: False):
            yield measured("verify", batch, knowing(4), num_drafts=4, attention="one pass over the keys")
    if "draft" not in wanted:
        return
    small = Loop(bench, *draft, 1, None)
    draft_ms, _ = small.timed()
    yield {"bench": "draft model alone", "batch": 1, "ms": draft_ms, "shape": names[1], "equal": True}
    target_bytes, draft_bytes = (
        weight_bytes(model.config, bench.dtype.itemsize) for model, _ in (target, draft)
    )
    for num_drafts in (1, 2, 3, 4, 5):
        for acceptance in (0.7, 0.9) if num_drafts == 4 else (0.7,):
            drafter = coin(draft_model(target[0], draft[0], num_drafts=num_drafts), acceptance)
            tokens = sum(acceptance**place for place in range(num_drafts + 1))
            floor = target_bytes + num_drafts * draft_bytes
            yield measured(
                "draft model",
                1,
                drafter,
                num_drafts=num_drafts,
                acceptance=acceptance,
                expected_tokens_per_step=tokens,
                bound_speedup=tokens
                * target_bytes
                / floor,  # weights are read once a pass, and nothing else costs
                bound_of_passes=tokens
                * plain[1]
                / (plain[1] + num_drafts * draft_ms),  # a pass costs as a plain step
                floor_ms=floor / read * 1e3,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--target", default="8B", choices=list(SHAPES))
    parser.add_argument("--draft", default="0.6B", choices=list(SHAPES))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--what", nargs="*", default=WHAT, choices=WHAT)
    options = parser.parse_args()

    bench = Bench(options.device, options.context, options.steps, options.rounds)
    read = measure_rates(options.device, bench.dtype, clock_of(options.device)).read
    target_config = SHAPES[options.target]
    draft_config = replace(SHAPES[options.draft], vocab_size=target_config.vocab_size)
    target = cyclic(target_config, bench)
    draft = cyclic(draft_config, bench) if "draft" in options.what else target
    rows = []
    for row in rows_of(bench, target, draft, (options.target, options.draft), read, options.what):
        facts = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
        print("    ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
        rows.append(row | {"target": options.target, "draft": options.draft})
    own = about(options.device)
    options.out.write_text(json.dumps([row | own for row in rows], indent=1) + "\n")
    return int(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
