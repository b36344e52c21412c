"""Batch bookkeeping against what upstream's own functions gave for the same inputs: integers, compared exactly."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from purestep.pure.absorb import absorb
from purestep.pure.initial import initial_state
from purestep.pure.inputs import prepare_inputs
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.kv_config import kernel_block_ids
from purestep.pure.records.state import Ledger, StepState
from purestep.pure.split import split_decodes_and_prefills
from purestep.pure.update import update_states
from tests.tiny import cached_requests, new_request, scheduled, settled, tiny_llama

Case = dict[str, Any]


@cache
def cases_of(folder: Path, name: str) -> list[Case]:
    cases: list[Case] = json.loads((folder / f"{name}.json").read_text())
    return cases


def case(folder: Path, name: str, index: int, num_cases: int) -> Case:
    cases = cases_of(folder, name)
    assert len(cases) == num_cases, f"{name} holds {len(cases)} cases, this test names {num_cases}"
    return cases[index]


@pytest.mark.parametrize("index", range(120))
def test_split_decodes_and_prefills(oracle_dir: Path, index: int) -> None:
    """The counts of decodes and prefills, and of their tokens."""
    recorded = case(oracle_dir, "split_decodes_prefills", index, 120)
    is_prefilling = np.array(recorded["is_prefilling"])
    split = split_decodes_and_prefills(
        np.cumsum([0, *recorded["query_lens"]]),
        decode_threshold=recorded["decode_threshold"],
        require_uniform=recorded["require_uniform"],
        is_prefilling=None if recorded["treat_short_extends_as_decodes"] else is_prefilling,
    )
    counts = [split.num_decodes, split.num_prefills, split.num_decode_tokens, split.num_prefill_tokens]
    assert counts == recorded["out"]


class Tables:
    """Requests whose block tables grow on the device; nothing is computed but where their tokens go."""

    def __init__(self, limits: BatchLimits) -> None:
        model, _ = tiny_llama(groups=(0,))
        self.batch = self.absorbed = InputBatch.make_empty(limits)
        self.state: StepState = initial_state(model, replace(limits, num_blocks=(1,)))

    def slots(self, output: Any) -> list[list[int]]:
        """The slots that each request's tokens of this step are given."""
        self.batch = update_states(self.batch, output)
        inbox = plan_step(self.batch, self.absorbed).inbox.to("cpu")
        self.state = absorb(replace(self.state, inbox=inbox), kernels=reference)
        self.absorbed, self.batch = self.batch, settled(self.batch, token=1)
        inputs = prepare_inputs(self.state, kernels=reference)
        ledger = self.state.ledger.table.clone()
        ledger[0, self.state.layout.row_of_index] = inputs.seq_lens  # as if the tokens had been computed
        self.state = replace(self.state, ledger=Ledger(ledger))
        sizes = inputs.query_start_loc.diff().tolist()
        return [part.tolist() for part in torch.split(inputs.slot_mapping[0], sizes)]


@pytest.mark.parametrize("index", range(36))
def test_block_tables_and_slots(oracle_dir: Path, index: int) -> None:
    """Rows written and appended to, as blocks of the kernel, and the slot of every recorded position.

    Recorded rows name some blocks twice, which no scheduler does: each mention stands for a block of its own here.
    """
    recorded = case(oracle_dir, "block_table", index, 36)
    size, kernel_size = recorded["block_size"], recorded["kernel_block_size"]
    meant = [0]  # the recorded block that each of ours stands for

    def expanded(ids: list[int]) -> tuple[tuple[int, ...], ...]:
        first = len(meant)
        meant.extend(
            kernel_block_ids(np.array(ids, np.int32), block_size=size, kernel_block_size=kernel_size)
        )
        return (tuple(range(first, len(meant))),)

    starts, positions = recorded["query_start_loc"], recorded["positions"]
    places = [positions[a:b] for a, b in pairwise(starts)]
    names = [f"r{i}" for i in range(len(places))]
    limits = BatchLimits(len(names), 2048, 4, (kernel_size,), (10_000,))
    tables = Tables(limits)
    new = [
        new_request(name, (1,) * (own[-1] + 1), expanded(ids))
        for name, own, ids in zip(names, places, recorded["rows"], strict=True)
    ]
    slots = tables.slots(scheduled(*new, counts=dict.fromkeys(names, 1)))
    grown = {name: expanded(ids) for name, ids in zip(names, recorded["appended"], strict=True) if ids}
    rest = {name: own[-1] for name, own in zip(names, places, strict=True) if own[-1]}
    cached = cached_requests(tables.batch, *rest, new_block_ids=grown)
    more = dict(zip(rest, tables.slots(scheduled(cached=cached, counts=rest)), strict=True))
    ours = [first + more.get(name, []) for name, first in zip(names, slots, strict=True)]
    found = [divmod(ours[i][p], kernel_size) for i, own in enumerate(places) for p in own]
    assert [meant[block] * kernel_size + offset for block, offset in found] == recorded["slot_mapping"]
    for name, row in zip(names, recorded["table_rows"], strict=True):
        table = tables.state.block_tables[0][names.index(name), : len(row)]
        assert [meant[block] for block in table.tolist()] == row


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 4), st.booleans())
def test_a_split_partitions_the_batch(lengths: list[int], threshold: int, uniform: bool) -> None:
    """Decodes come before prefills, no decode is longer than the threshold, and all requests and tokens are counted."""
    starts = np.cumsum([0, *lengths])
    split = split_decodes_and_prefills(starts, decode_threshold=threshold, require_uniform=uniform)
    assert split.num_decodes + split.num_prefills == len(lengths)
    assert split.num_decode_tokens + split.num_prefill_tokens == sum(lengths)
    decodes = lengths[: split.num_decodes]
    assert split.num_decode_tokens == sum(decodes)
    assert all(n <= threshold for n in decodes)
    assert not uniform or len(set(decodes)) <= 1
    assert split.num_prefills == 0 or lengths[split.num_decodes] > threshold or uniform
