"""Steps in flight: what the host says next, and what it pads with, changes nothing of what was said before."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.kernels.types import Kernels
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.plan import StepPlan
from purestep.pure.records.queue import Request, SchedulerConfig
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import CachedRequestData
from purestep.pure.scheduler import add, make_queue, schedule, update
from purestep.pure.settle import settle
from purestep.pure.update import update_states
from purestep.state import staging
from purestep.state.buffers import PersistentBuffers
from purestep.state.engine import Engine
from purestep.state.run import BoundStep, run
from tests.state.fake_graphs import FakeGraphs
from tests.tiny import Loop, column, decode, new_request, scheduled, tiny_llama
from tests.toy_model import VOCAB, foretold, toy_model

MODEL, PARAMS = toy_model()
TEXT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)
MAX_LEN = 48
# Of every request: prompt tokens and outputs. They end at different steps, the first one not being the first to.
REQUESTS = ((4, 7), (7, 3), (1, 12), (9, 5), (3, 9), (12, 2), (2, 6))


def request(i: int) -> Request:
    num_prompt, num_outputs = REQUESTS[i]
    params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    return Request(str(i), TEXT[:num_prompt], params, arrival=i)


EXPECTED = {str(i): foretold(request(i), MAX_LEN)[0] for i in range(len(REQUESTS))}


def test_dummies_among_decodes_never_shift_the_token_that_a_request_goes_on_from() -> None:
    """Three requests padded to four, however many steps ahead: one leaves, another joins, each has its own tokens."""
    for steps_ahead in (0, 1, 2):
        api, results, waiting = FakeGraphs(), {}, deque(range(len(REQUESTS)))
        with Engine(
            (MODEL, PARAMS), dtype=torch.float64, kv_cache_bytes=64 * 100, block_size=4, max_model_len=MAX_LEN,
            max_num_reqs=4, graph_api=api, capture_sizes=(4,), capture_progress=False, steps_ahead=steps_ahead,
        ) as own:  # fmt: skip
            while waiting or own.has_unfinished():
                while waiting and len(own._turns.now.book.numbers) < 3:
                    new = request(waiting.popleft())
                    own.add_request(new.req_id, new.prompt_token_ids, new.sampling_params)
                results |= {output.req_id: output.token_ids for output in own.step()}
        assert results == EXPECTED
        assert api.num_replays > 10, "these batches were not padded"


def test_a_plan_says_what_it_said_however_late_it_is_read() -> None:
    """The host makes up to two more plans before the device reads one; their words differ in nearly every place."""
    for lag in (0, 1, 2):
        limits = BatchLimits(3, MAX_LEN, VOCAB, (4,), (40,))
        config = SchedulerConfig(limits.num_blocks, limits.block_sizes, 3, 10, MAX_LEN, async_scheduling=True)
        queue, batch = make_queue(config), InputBatch.make_empty(limits)
        for i in range(len(REQUESTS)):
            queue = add(queue, request(i), vocab_size=VOCAB)
        bound = BoundStep(PersistentBuffers(MODEL, limits, dtype=torch.float64), MODEL, PARAMS, donating)
        leased = bound.buffers.lease()
        absorbed, results, begun = leased.absorbed, {}, deque[StepPlan]()
        while len(results) < len(REQUESTS):
            queue, output = schedule(queue)
            batch = update_states(batch, output)
            if output.req_ids:
                begun.append(plan_step(batch, absorbed))
                absorbed = batch
            if begun and (len(begun) > lag or not output.req_ids):
                plan = begun.popleft()
                leased, pending = run(bound, leased, plan)
                queue, finished = update(queue, plan.batch.req_ids, pending.result())
                batch = settle(batch, plan.batch, pending.result())
                results |= {done.req_id: done.token_ids for done in finished}
        assert results == EXPECTED


class SlowCopies:
    """Copies to a device that read their pinned memory when `arrive` is called, and not before."""

    def __init__(self) -> None:
        self._begun: list[tuple[Tensor, Tensor]] = []

    def empty(self, shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> "Pinned":
        assert pin_memory
        return Pinned(torch.zeros(shape, dtype=dtype), self)

    def begin(self, source: Tensor) -> Tensor:
        target = torch.full_like(source, -1)
        self._begun.append((target, source))
        return target

    def arrive(self) -> None:
        for target, source in self._begun:
            target.copy_(source)


class Pinned:
    """A host tensor as far as `stage` knows it."""

    def __init__(self, tensor: Tensor, copies: SlowCopies) -> None:
        self._tensor, self._copies = tensor, copies

    def __getitem__(self, key: slice) -> "Pinned":
        return Pinned(self._tensor[key], self._copies)

    def numpy(self) -> Any:
        return self._tensor.numpy()

    def to(self, device: torch.device, *, non_blocking: bool) -> Tensor:
        assert non_blocking
        return self._copies.begin(self._tensor)


def test_plans_are_staged_through_memory_that_nobody_writes_while_it_is_copied() -> None:
    """Three plans in a row, all of them on their way at once."""
    limits = BatchLimits(3, MAX_LEN, VOCAB, (4,), (40,))
    first = update_states(
        InputBatch.make_empty(limits), scheduled(new_request("a", TEXT[:5], ((1, 2),)), counts={"a": 5})
    )
    second = decode(first, "a")
    third = update_states(second, scheduled(new_request("b", TEXT[5:], ((7, 8),)), counts={"b": 7}))
    plans = [
        plan_step(third, second),
        plan_step(first, InputBatch.make_empty(limits)),
        plan_step(second, first),
    ]
    copies = SlowCopies()
    with pytest.MonkeyPatch.context() as patch:
        types = {"int32": torch.int32, "float32": torch.float32}
        patch.setattr(staging, "torch", SimpleNamespace(empty=copies.empty, **types))
        staged = [staging.stage(plan.inbox, torch.device("cuda")) for plan in plans]
        copies.arrive()
    assert len({tuple(inbox.data.tolist()) for inbox in staged}) == 3
    for inbox, plan in zip(staged, plans, strict=True):
        assert inbox.data.tolist() == plan.inbox.data.tolist()
        assert inbox.shape == plan.inbox.shape


def test_a_pending_token_is_read_as_it_was_whatever_padded_steps_were_begun_since() -> None:
    """Up to five begun since, mixed ones and prefills, all of them by one graph, whose result lies in one place."""
    for steps_ahead in (0, 2, 5):
        api = FakeGraphs()
        with Engine(
            (MODEL, PARAMS), dtype=torch.float64, kv_cache_bytes=64 * 100, block_size=4, max_model_len=MAX_LEN,
            max_num_reqs=8, max_num_batched_tokens=8, graph_api=api, cudagraph_mode=CUDAGraphMode.FULL,
            capture_sizes=(8,), capture_progress=False, steps_ahead=steps_ahead,
        ) as own:  # fmt: skip
            results = {}
            for i in range(len(REQUESTS)):
                new = request(i)
                own.add_request(new.req_id, new.prompt_token_ids, new.sampling_params)
                results |= {output.req_id: output.token_ids for output in own.step()}
            while own.has_unfinished():
                results |= {output.req_id: output.token_ids for output in own.step()}
        assert results == EXPECTED
        assert api.num_replays > 10, "these batches were not padded"


def test_steps_that_are_taken_back_leave_nothing_behind() -> None:
    """The scheduler rewinds a request to fewer outputs and fewer computed tokens: it draws the same tokens again.

    They depend on penalties, which count outputs, and on the index of a draw.
    """
    model, params = tiny_llama()
    limits = BatchLimits(2, 24, 16, (4,), (8,))
    sampling = SamplingParams(
        seed=5, temperature=0.9, repetition_penalty=1.6, frequency_penalty=0.7, max_tokens=None
    )
    new = new_request("r", TEXT[:5], ((1, 2, 3, 4),), replace(sampling, ignore_eos=True))

    def begun(kernels: Kernels) -> Loop:
        loop = Loop(model, params, limits, kernels=kernels)
        loop.step(scheduled(new, counts={"r": 5}))
        for _ in range(5):
            loop.decode("r")
        return loop

    expected = begun(reference).tokens("r")
    for kernels in (reference, donating):
        for num_outputs, num_computed in ((4, 8), (3, 5), (1, 5), (1, 2), (0, 0), (5, 3)):
            loop = begun(kernels)
            again = CachedRequestData(("r",), column(num_computed), column(num_outputs))
            loop.step(scheduled(cached=again, counts={"r": 5 + num_outputs - num_computed}))
            for _ in range(5 - num_outputs):
                loop.decode("r")
            assert loop.tokens("r") == expected
