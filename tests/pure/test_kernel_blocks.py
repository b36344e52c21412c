"""Kernels with smaller blocks than the scheduler's: other entries in block tables, the same slots, the same tokens."""

import itertools
from random import Random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.kernels.types import Kernels
from purestep.pure.absorb import absorb
from purestep.pure.initial import initial_state
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.kv_config import kernel_block_ids
from purestep.pure.records.queue import Request, SchedulerConfig
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.state import StepState
from purestep.pure.scheduler import add, make_queue, schedule, update
from purestep.pure.settle import settle
from purestep.pure.step import step
from purestep.pure.update import update_states
from tests.profiles import examples
from tests.schedules import LIMITS, Schedule, drive, seeds
from tests.tiny import tiny_llama

MODEL, PARAMS = tiny_llama(groups=(0, 1))
KERNEL_SIZES = st.sampled_from([(2, 1), (1, 2), (4, 1)])  # where the scheduler's blocks have 4 and 2 tokens
TEXT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)


def taken_in(state: StepState, batch: InputBatch, base: InputBatch) -> StepState:
    """The state after absorbing the plan."""
    inbox = plan_step(batch, base).inbox.to("cpu")
    return absorb(replace(state, inbox=inbox), kernels=reference)


def by_slot(kv: torch.Tensor) -> torch.Tensor:
    """[slots, keys and values, kv_heads, dim]"""
    return kv.transpose(1, 2).flatten(0, 1)


def with_slots(state: StepState, seed: int) -> StepState:
    """The state with the same numbers in the same slots, whatever the size of its blocks."""
    caches = []
    for kv in state.kv:
        numbers = torch.randn(by_slot(kv).shape, generator=torch.Generator().manual_seed(seed))
        caches.append(numbers.unflatten(0, (kv.shape[0], kv.shape[2])).transpose(1, 2).contiguous())
    return replace(state, kv=tuple(caches))


@examples(0.5)
@given(seeds, st.integers(0, 2), KERNEL_SIZES)
def test_block_tables_hold_the_kernels_blocks(rng: Random, lag: int, sizes: tuple[int, int]) -> None:
    """From any batch to any other, each row's table lists the kernel blocks of its blocks, as far as it reaches."""
    limits = replace(LIMITS, kernel_block_sizes=sizes)
    batches = [InputBatch.make_empty(limits)]
    batches += [moment.after for moment in drive(Schedule(rng, limits), 10, max_unsettled=lag)]
    a, b = rng.choice(batches), rng.choice(batches)
    state = taken_in(taken_in(initial_state(MODEL, limits), a, batches[0]), b, a)
    assert state.block_sizes == sizes
    for group, (table, size) in enumerate(zip(state.block_tables, sizes, strict=True)):
        assert table.shape[1] == -(-limits.max_model_len // size)
        for row in b.row_of.values():
            ids = b.rows.block_ids[group][row]
            assert ids is not None
            wanted = kernel_block_ids(
                ids.array, block_size=limits.block_sizes[group], kernel_block_size=size
            ).tolist()
            assert table[row].tolist()[: len(wanted)] == wanted[: table.shape[1]]


@given(st.permutations(range(1, 8)), st.integers(0, 3), st.integers(0, 3), KERNEL_SIZES)
def test_blocks_are_copied_and_zeroed_whole(
    ids: list[int], num_copies: int, num_zeros: int, sizes: tuple[int, int]
) -> None:
    """The same slots change as with blocks of the scheduler's size."""
    pairs = tuple(itertools.pairwise(ids[: num_copies + 1]))
    zeros = tuple(ids[num_copies + 1 :][:num_zeros])
    states = []
    for kernel_sizes in ((), sizes):
        limits = replace(LIMITS, kernel_block_sizes=kernel_sizes)
        empty = InputBatch.make_empty(limits)
        batch = replace(empty, block_copies=(pairs, pairs[:1]), blocks_to_zero=((), zeros))
        states.append(taken_in(with_slots(initial_state(MODEL, limits), seed=1), batch, empty))
    for whole, parts in zip(states[0].kv, states[1].kv, strict=True):
        assert torch.equal(by_slot(whole), by_slot(parts))


def tokens(
    limits: BatchLimits, budget: int, prompts: list[int], params: SamplingParams, kernels: Kernels
) -> dict[str, tuple[int, ...]]:
    """What requests get that share their beginnings, and forks of them, in a cache that is too small for all."""
    config = SchedulerConfig(
        num_blocks=limits.num_blocks,
        block_sizes=limits.block_sizes,
        max_num_reqs=limits.max_num_reqs,
        max_num_batched_tokens=budget,
        max_model_len=limits.max_model_len,
    )
    queue, batch, state = make_queue(config), InputBatch.make_empty(limits), None
    for i, length in enumerate(prompts):
        for fork in range(2):
            origin = {"fork_of": f"{i}.0"} if fork else {}
            request = Request(f"{i}.{fork}", TEXT[:length], params, arrival=2 * i, stream=fork, **origin)
            queue = add(queue, request, vocab_size=limits.vocab_size)
    state, absorbed, results = initial_state(MODEL, limits, dtype=torch.float64), batch, {}
    while len(results) < 2 * len(prompts):
        queue, output = schedule(queue)
        batch = update_states(batch, output)
        state = replace(state, inbox=plan_step(batch, absorbed).inbox.to("cpu"))
        with torch.no_grad():
            state, device = step(MODEL, PARAMS, state, kernels=kernels)
        host = torch.utils._pytree.tree_map(
            lambda leaf: None if leaf is None else leaf.numpy().copy(), device
        )
        queue, finished = update(queue, output.req_ids, host)
        absorbed, batch = batch, settle(batch, batch, host)
        results |= {done.req_id: done.token_ids for done in finished}
    return results


@examples(0.1)
@given(
    st.integers(2, 9),
    st.lists(st.integers(1, len(TEXT)), min_size=1, max_size=3),
    st.sampled_from([(2, 1), (4, 1)]),
    st.sampled_from([reference, donating]),
)
def test_tokens_are_those_of_the_schedulers_own_blocks(
    budget: int, prompts: list[int], sizes: tuple[int, int], kernels: Kernels
) -> None:
    """With chunks, prefix hits, forks whose blocks are copied, and preemption."""
    limits = BatchLimits(4, 24, 16, (4, 2), (9, 17))
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=7, ignore_eos=True)
    expected = tokens(limits, budget, prompts, params, kernels)
    halves = replace(limits, kernel_block_sizes=sizes)
    assert tokens(halves, budget, prompts, params, kernels) == expected
    assert {len(ids) for ids in expected.values()} == {7}


def test_a_plan_is_the_same_where_kernels_take_the_schedulers_blocks() -> None:
    """To name their size changes no word of it."""
    for seed in range(5):
        plans = []
        for limits in (LIMITS, replace(LIMITS, kernel_block_sizes=LIMITS.block_sizes)):
            *_, moment = drive(Schedule(Random(seed), limits), 5)
            plans.append(plan_step(moment.after, InputBatch.make_empty(limits)).inbox)
        assert np.array_equal(plans[0].data, plans[1].data)
        assert plans[0].shape == plans[1].shape
