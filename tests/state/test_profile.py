"""Made-up batches: of the shapes they should have, noticed by nobody, and a measure of the memory that is left."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.donating import donating
from purestep.kernels.types import Kernels
from purestep.pure.errors import DeviceMemoryError, DispatchError, InvalidParameterError, StaleStateError
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.layout import Layout
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.state import StepState
from purestep.state import setup
from purestep.state.buffers import PersistentBuffers
from purestep.state.engine import Engine
from purestep.state.loading.loaded import LoadedModel
from purestep.state.profile import determine_available_memory, dummy_run, dummy_sampler, profile_run
from purestep.state.run import BoundStep
from purestep.state.setup import DEFAULT_KV_CACHE_BYTES, kv_cache_of
from purestep.state.sizes import Sizes
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs

CONFIG = tiny_config()
MODEL = llama(CONFIG)
PARAMS = random_params(CONFIG, seed=1, std=0.5)
LIMITS = BatchLimits(max_num_reqs=4, max_model_len=16, vocab_size=64, block_sizes=(4,), num_blocks=(8,))
PER_BLOCK = 1024  # bytes of 4 tokens in both layers
PROMPTS = [(5, 9, 2, 7), (1, 1, 3), (40, 8, 22, 17, 5, 6, 30, 2, 9)]
NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


def bound_step(kernels: Kernels = donating, limits: BatchLimits = LIMITS) -> BoundStep:
    return BoundStep(PersistentBuffers(MODEL, limits), MODEL, PARAMS, kernels)


def seen(state: StepState) -> list[Tensor]:
    """All that a request could notice: everything but the null block and the null row of token ids."""
    sampling = state.sampling.floats, state.sampling.table
    parts = [state.ledger.table, state.token_ids[:-1], *sampling, state.room, *state.block_tables]
    layout = [state.layout.row_of_index, state.layout.query_start_loc]
    bits = [kv[1:].contiguous().view(torch.int32) for kv in state.kv]  # NaN is no equal of itself
    return [part.clone() for part in (*parts, *layout, *bits)]


SHAPES = st.sampled_from(
    [{}, {"mixed": True}, {"uniform_query_len": 1}, {"uniform_query_len": 3}, {"context": 0}, {"context": 5},
     {"uniform_query_len": 1, "context": 7}, {"mixed": True, "context": 3}]
)  # fmt: skip
DUMMIES = st.lists(st.tuples(st.integers(1, 4), SHAPES, st.booleans()), max_size=4)


@examples(0.15)
@given(
    dummies=st.lists(DUMMIES, min_size=12, max_size=12),
    mode=st.sampled_from([FULL, PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE]),
    seed=st.integers(0, 3),
    steps_ahead=st.integers(0, 2),
)
def test_made_up_batches_between_steps_leave_no_trace(
    dummies: list[list[tuple[int, dict[str, Any], bool]]], mode: CUDAGraphMode, seed: int, steps_ahead: int
) -> None:
    """Eager, in pieces or replayed, idle or attending, sampled or not, with steps in flight: no bit that is read
    changes, and requests draw the tokens they draw without them."""
    params = SamplingParams(temperature=0.9, seed=seed, max_tokens=8, repetition_penalty=1.2)
    settings: dict[str, Any] = {
        "kv_cache_bytes": 24 * PER_BLOCK, "block_size": 4, "max_model_len": 24, "max_num_reqs": 4,
        "capture_sizes": (2, 4), "steps_ahead": steps_ahead, "capture_progress": False,
    }  # fmt: skip
    with Engine((MODEL, PARAMS), **settings) as plain:
        expected = [r.token_ids for r in plain.generate(PROMPTS, params, progress=False)]
    with Engine((MODEL, PARAMS), graph_api=FakeGraphs(), cudagraph_mode=mode, **settings) as own:
        for kv in own._turns.now.leased.value.kv:
            kv.fill_(float("nan"))
        for i, prompt in enumerate(PROMPTS):
            own.add_request(str(i), prompt, params)
        results = {}
        for turn in range(1000):
            if not own.has_unfinished():
                break
            results |= {output.req_id: output.token_ids for output in own.step()}
            bound, before = own._turns.bound, seen(own._turns.now.leased.value)
            for num_tokens, shape, captured in dummies[turn] if turn < len(dummies) else ():
                keys = own._turns.dispatch_keys if captured else None
                executed = dummy_run(bound, num_tokens, keys=keys, **shape)
                if executed is not None:
                    dummy_sampler(bound, executed)
            after = seen(own._turns.now.leased.value)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [results[str(i)] for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize(
    ("shape", "lens"),
    [({}, [2, 2, 2, 4]), ({"uniform_query_len": 3}, [3, 3, 3, 1]), ({"mixed": True}, [1, 1, 1, 7])],
)
@pytest.mark.parametrize("context", [None, 3])
def test_the_batch_has_the_shape_asked_for(
    shape: dict[str, Any], lens: list[int], context: int | None
) -> None:
    """10 tokens in at most 4 requests; attending, each has its context before its tokens."""
    executed = dummy_run(bound_step(), 10, context=context, **shape)
    assert executed is not None and executed.logits is not None
    layout = executed.state.layout
    assert layout.query_start_loc.diff().tolist() == lens
    assert set(layout.row_of_index.tolist()) == {LIMITS.null_row}
    assert executed.inputs.seq_lens.tolist() == [0 if context is None else context + n for n in lens]
    assert executed.hidden_states.shape == (10, CONFIG.hidden_size)
    assert executed.logits.shape == (4, 64)
    assert layout.bounds.max_query_len == max(lens)
    sampled = dummy_sampler(bound_step(), executed)
    assert sampled.sampled_token_ids.tolist() == [[-1]] * 4  # nothing is kept


def test_the_sampler_truncates_penalizes_and_draws() -> None:
    """With the parameters that upstream warms up with."""
    called: dict[str, Any] = {}

    def noted(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            called[name] = arguments
            return getattr(donating, name)(*arguments, **options)

        return call

    names = ("penalize", "scale_by_temperature", "truncate", "draw")
    bound = bound_step(replace(donating, **{name: noted(name) for name in names}))
    executed = dummy_run(bound, 4)
    assert executed is not None
    dummy_sampler(bound, executed)
    assert called.keys() == set(names)
    assert called["scale_by_temperature"][1].tolist() == pytest.approx([0.5] * 4)
    assert called["truncate"][1].tolist() == [63] * 4
    assert called["truncate"][2].tolist() == pytest.approx([0.9] * 4)


def test_graphs_are_replayed_as_for_a_real_batch() -> None:
    """A uniform decode by the full graph, another batch in pieces, and one that is too large by none."""
    api = FakeGraphs()
    with Engine(
        (MODEL, PARAMS), graph_api=api, kv_cache_bytes=24 * PER_BLOCK, block_size=4, max_num_reqs=4,
        max_model_len=24, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, capture_sizes=(4,), capture_progress=False,
    ) as own:  # fmt: skip
        bound, keys = own._turns.bound, own._turns.dispatch_keys
        assert dummy_run(bound, 3, keys=keys, uniform_query_len=1) is None
        assert api.num_replays == 1
        executed = dummy_run(bound, 3, keys=keys, cudagraph_mode=PIECEWISE)
        assert executed is not None
        assert api.num_replays == 1 + CONFIG.num_layers + 1
        assert executed.hidden_states.shape[0] == 4  # padded
        for options in ({"cudagraph_mode": NONE}, {}):
            assert dummy_run(bound, 3 if options else 5, keys=keys, **options) is not None
        assert api.num_replays == 1 + CONFIG.num_layers + 1
        with pytest.raises(DispatchError, match="is dispatched to PIECEWISE and not to FULL"):
            dummy_run(bound, 3, keys=keys, cudagraph_mode=FULL)
        assert bound.captured is not None
        bound.captured.clear()
        with pytest.raises(DispatchError, match="is captured for FULL: capture it first"):
            dummy_run(bound, 3, keys=keys, uniform_query_len=1, cudagraph_mode=FULL)
        assert dummy_run(bound, 3, keys=keys, uniform_query_len=1) is not None


def test_shapes_that_can_not_be_are_refused() -> None:
    bound = bound_step()
    with pytest.raises(DispatchError, match="needs more than 4 requests"):
        dummy_run(bound, 13, uniform_query_len=3)
    for context in (13, -1):
        with pytest.raises(
            DispatchError, match=f"4 tokens behind {context} computed ones, .* context of 0 to 12"
        ):
            dummy_run(bound, 16, context=context)
    assert dummy_run(bound, 16, context=12) is not None
    bound.buffers.close()
    with pytest.raises(StaleStateError, match="closed"):
        dummy_run(bound, 4)


@pytest.mark.parametrize("where", ["silu_and_mul", "penalize"])
def test_running_out_of_memory_says_what_to_lower(where: str) -> None:
    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    bound = bound_step(replace(donating, **{where: exhausted}))
    with pytest.raises(
        DeviceMemoryError, match=r"4 requests with 10 tokens \(tried to allocate 2 GiB\): lower max_num"
    ):
        profile_run(bound, 10)


@attrs.define
class FakeMemory:
    """A device of which `others` hold something, and on which a step takes memory by its tokens and its logits."""

    size: int = 10**6
    others: int = 1000
    weights: int = 20_000
    token_bytes: int = 100
    logit_bytes: int = 10
    given_back: int = 0  # by others, while a step runs
    largest: int = 0  # what the largest step since the last reset took
    kept: int = 0

    def kernels(self) -> Kernels:
        """Kernels that are seen by this device."""

        def embed(weight: Tensor, ids: Tensor) -> Tensor:
            self._take(self.token_bytes * len(ids))
            return donating.embed(weight, ids)

        def truncate(logits: Tensor, *arguments: Tensor) -> Tensor:
            self._take(self.logit_bytes * logits.numel())
            return donating.truncate(logits, *arguments)

        return replace(donating, embed=embed, truncate=truncate)

    def _take(self, num_bytes: int) -> None:
        self.largest = max(self.largest, num_bytes)
        self.kept = self.largest
        self.others -= self.given_back
        self.given_back = 0

    def total(self) -> int:
        return self.size

    def free(self) -> int:
        return self.size - self.others - self.weights - self.kept

    def reserved(self) -> int:
        return self.weights + self.kept

    def peak(self) -> int:
        return self.weights + self.largest

    def reset_peak(self) -> None:
        self.largest = self.kept = 0


@given(
    st.integers(1, 40), st.floats(0.1, 1.0), st.integers(0, 10**4), st.integers(0, 10**4), st.integers(0, 300)
)
def test_what_is_available_is_a_share_less_what_is_in_use(
    num_tokens: int, share: float, others: int, weights: int, token_bytes: int
) -> None:
    """Weights, the largest step or its sampler, whichever takes more, and others; what torch only keeps is free."""
    memory = FakeMemory(others=others, weights=weights, token_bytes=token_bytes)
    memory.kept = 5000
    found = determine_available_memory(
        bound_step(memory.kernels()), num_tokens, memory=memory, gpu_memory_utilization=share
    )
    step = max(token_bytes * num_tokens, 10 * 64 * min(num_tokens, LIMITS.max_num_reqs))
    assert found == int(10**6 * share) - others - weights - step


def test_a_size_that_is_given_is_kept_after_a_trial_run() -> None:
    memory = FakeMemory()
    bound = bound_step(memory.kernels())
    options: dict[str, Any] = {"memory": memory, "gpu_memory_utilization": 0.01, "kv_cache_bytes": 123}
    assert determine_available_memory(bound, 30, **options) == 123


def test_a_device_with_nothing_left_is_refused_with_the_numbers() -> None:
    memory = FakeMemory(size=100_000)
    with pytest.raises(
        DeviceMemoryError, match=r"=0.2 of 100,000 bytes .* 30 tokens take 23,000, others 1,000. Raise"
    ):
        determine_available_memory(
            bound_step(memory.kernels()), 30, memory=memory, gpu_memory_utilization=0.2
        )


def test_memory_that_others_give_back_meanwhile_spoils_the_measure() -> None:
    memory = FakeMemory(given_back=500)
    with pytest.raises(
        DeviceMemoryError, match="979,500 bytes are free after a trial run, and 979,000 were before"
    ):
        determine_available_memory(
            bound_step(memory.kernels()), 30, memory=memory, gpu_memory_utilization=0.9
        )


def sized(memory: FakeMemory | None, *, captures: bool = False, **sizes: Any) -> Any:
    """The cache of an engine with these sizes, on the CPU but for what `memory` says."""
    settings = {
        "block_size": 4,
        "max_model_len": 48,
        "max_num_reqs": 8,
        "max_num_batched_tokens": 100,
    } | sizes
    return kv_cache_of(
        LoadedModel("tiny", MODEL, PARAMS),
        Sizes(**settings),
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=None if memory is None else memory.kernels(),
        memory=memory,
        captures=captures,
    )


def test_a_cache_takes_what_is_left_and_no_more_than_can_be_of_use() -> None:
    """Left: 0.9 of a million less 20,000, 1,000 and 100 tokens. Of use: 8 requests of 48 tokens, and the null block."""
    left = 900_000 - 20_000 - 1_000 - 100 * 100
    assert sized(FakeMemory(logit_bytes=0), max_num_reqs=1000).num_blocks == left // PER_BLOCK
    assert sized(FakeMemory(), max_num_reqs=8).num_blocks == 8 * 48 // 4 + 1
    assert sized(FakeMemory(), max_num_reqs=8, kv_cache_bytes=50 * PER_BLOCK).num_blocks == 50
    less = sized(FakeMemory(logit_bytes=0), max_num_reqs=1000, gpu_memory_utilization=0.5)
    assert less.num_blocks == (left - 400_000) // PER_BLOCK


@pytest.mark.parametrize("captures", [False, True])
def test_what_is_to_be_captured_is_compiled_with_what_the_trial_run_launches(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[Layout]()
    monkeypatch.setattr(setup, "compile_steps", lambda bound, layouts: compiled.extend(layouts))
    sized(FakeMemory(), captures=captures, capture_sizes=(1, 4, 8))
    trial = [(100, 8), (8, 8)]  # tokens and requests
    expected = trial + [(n, n) for n in (8, 4, 1) for _ in (1, 2, 3, 4)] * captures
    sizes = [(layout.bounds.num_tokens, layout.bounds.num_reqs) for layout in compiled]
    assert sizes == expected


def test_without_a_gpu_the_default_is_a_fixed_size() -> None:
    assert sized(None).num_blocks == DEFAULT_KV_CACHE_BYTES // PER_BLOCK


@pytest.mark.parametrize("share", [0.0, 1.1, -1.0, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(InvalidParameterError, match="gpu_memory_utilization"):
        Sizes(gpu_memory_utilization=share)
