"""Persistent buffers: what there is of them, who may change it, where it lies, and whether it fits."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.pure.errors import DeviceMemoryError, FreshStorageError
from purestep.pure.initial import initial_state
from purestep.pure.kv_config import kv_cache_config
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.layout import Layout
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from purestep.pure.update import update_states
from purestep.state.buffers import CLASSES, PersistentBuffers, leaves
from purestep.state.device_memory import available_bytes
from purestep.state.run import BoundStep, run
from tests.tiny import column

MODEL = llama(tiny_config())
LIMITS = BatchLimits(max_num_reqs=3, max_model_len=24, vocab_size=64, block_sizes=(4,), num_blocks=(12,))
TWO_GROUPS = llama(tiny_config(), groups=(0, 1))


def first_batch() -> InputBatch:
    """One prompt."""
    new = (NewRequestData("a", (5, 9, 2), SamplingParams(temperature=0.0), ((1, 2),)),)
    output = SchedulerOutput(new, CachedRequestData.make_empty(), ("a",), column(3))
    return update_states(InputBatch.make_empty(LIMITS), output)


def test_every_leaf_has_a_class() -> None:
    """That of the kinds of a state's leaves; none is left out."""
    buffers = PersistentBuffers(MODEL, replace(LIMITS, num_drafts=2), dtype=torch.float8_e4m3fn)
    found = {buffer.name: buffer.kind for buffer in buffers.specification}
    assert found == {
        "ledger": "overwrite",
        "drafts[0]": "overwrite",
        "token_ids": "append-only",
        "sampling.floats": "host-written",
        "sampling.table": "host-written",
        "block_tables[0]": "host-written",
        "room": "host-written",
        "kv[0]": "append-only",
        "kv[1]": "append-only",
        "kv_scales": "once",
        "layout.row_of_index": "host-written",
        "layout.query_start_loc": "host-written",
        "inbox": "inbox",
    }
    assert {name.split("[")[0].split(".")[0] for name in found} == CLASSES.keys()


def test_they_print_as_a_table_of_names_classes_shapes_and_bytes() -> None:
    buffers = PersistentBuffers(MODEL, LIMITS)
    first, header, *lines, total = repr(buffers).splitlines()
    assert first == "PersistentBuffers"
    assert header.split() == ["name", "class", "shape", "bytes"]
    assert lines[0].split() == ["ledger", "overwrite", "[7,", "4]", "112"]
    assert [line.split()[0] for line in lines] == [buffer.name for buffer in buffers.specification]
    assert total.split() == ["total", f"{buffers.nbytes:,}"]
    assert buffers.nbytes == sum(int(line.split()[-1].replace(",", "")) for line in lines)


def test_memory_that_layers_share_counts_once_and_is_shown_so() -> None:
    config = kv_cache_config(
        TWO_GROUPS.kv_layers, max_num_blocks=5, block_sizes=(4, 4), dtype=torch.float32, shared_pool=True
    )
    limits = replace(LIMITS, block_sizes=(4, 4), num_blocks=(5, 5))
    shared = PersistentBuffers(TWO_GROUPS, limits, kv_config=config)
    apart = PersistentBuffers(TWO_GROUPS, limits)
    assert apart.nbytes - shared.nbytes == config.num_bytes
    (line,) = [line for line in repr(shared).splitlines() if line.startswith("kv[1]")]
    assert line.endswith("in kv[0]")


@given(
    st.integers(1, 6),
    st.integers(2, 40),
    st.integers(2, 9),
    st.sampled_from([4, 2]),
    st.booleans(),
    st.integers(0, 3),
)
def test_what_does_not_fit_is_refused_before_anything_is_allocated(
    num_reqs: int, length: int, num_blocks: int, kernel_size: int, configured: bool, num_drafts: int
) -> None:
    """Exactly the bytes of the state's fixed leaves are asked for: one less is too few."""
    limits = replace(
        LIMITS,
        max_num_reqs=num_reqs,
        max_model_len=length,
        num_blocks=(num_blocks,),
        kernel_block_sizes=(kernel_size,),
        num_drafts=num_drafts,
    )
    config = None
    if configured:
        config = kv_cache_config(
            MODEL.kv_layers,
            max_num_blocks=num_blocks,
            block_sizes=(4,),
            dtype=torch.float32,
            supported=[(kernel_size,)],
        )
    asked = sum(leaf.nbytes for _, leaf in leaves(initial_state(MODEL, limits)))
    buffers = PersistentBuffers(MODEL, limits, kv_config=config, available=lambda device: asked)
    assert sum(leaf.nbytes for _, leaf in leaves(buffers.lease().value)) == asked
    with pytest.raises(DeviceMemoryError, match=rf"need {asked:,} bytes and {asked - 1:,} are there"):
        PersistentBuffers(MODEL, limits, kv_config=config, available=lambda device: asked - 1)


def test_a_refusal_says_what_takes_the_memory_and_what_to_lower() -> None:
    """Ten million rows of a million tokens: 40 TB, refused at once."""
    limits = replace(LIMITS, max_num_reqs=10**7, max_model_len=10**6)
    with pytest.raises(DeviceMemoryError) as caught:
        PersistentBuffers(MODEL, limits)
    message = str(caught.value)
    assert f"{4 * (10**7 + 1) * 10**6:,} for token ids of 10000001 rows x 1000000 tokens" in message
    assert re.search(r"Lower kv_cache_bytes, max_model_len or max_num_reqs$", message)


def test_the_memory_of_the_machine_is_what_can_be_freed() -> None:
    """On Linux the kernel's own estimate; never more than there is."""
    found = available_bytes(torch.device("cpu"))
    assert 0 < found
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        total = int(meminfo.read_text().split()[1]) * 1024
        assert found < total


def test_a_layout_elsewhere_than_graphs_read_it_is_refused() -> None:
    """Whoever absorbs a plan has to put it in place."""
    buffers = PersistentBuffers(MODEL, LIMITS)
    lease = buffers.lease()
    state = buffers.begin(lease.generation)
    arrays = (torch.zeros(count, dtype=torch.int32) for count in (0, 1))
    elsewhere = replace(state, layout=Layout(*arrays, state.layout.bounds))
    with pytest.raises(FreshStorageError, match=r"put it in place with buffers.place"):
        buffers.adopt(elsewhere, lease.absorbed)
    buffers.adopt(buffers.place(elsewhere), lease.absorbed)


def test_every_leaf_stays_where_it_was() -> None:
    """Over plans that bring a layout, and over those that bring nothing."""
    bound = BoundStep(
        PersistentBuffers(MODEL, LIMITS), MODEL, random_params(tiny_config(), std=0.5), donating
    )
    leased = bound.buffers.lease()
    before = {b.name: b.tensor.data_ptr() for b in bound.buffers.specification if b.kind != "inbox"}
    for batch in (first_batch(), None):
        leased, _ = run(bound, leased, plan_step(batch or leased.absorbed, leased.absorbed))
        state = leased.value
        assert {
            b.name: b.tensor.data_ptr() for b in bound.buffers.specification if b.kind != "inbox"
        } == before
        assert state.layout.row_of_index.data_ptr() == before["layout.row_of_index"]
        assert state.layout.query_start_loc.data_ptr() == before["layout.query_start_loc"]
