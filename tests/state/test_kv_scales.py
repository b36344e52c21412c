"""Caches of eight bits in engine and runner, and scales that the first real step calculates."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.pure.dispatch import dispatch_keys
from purestep.pure.drafters.draft_model import draft_model
from purestep.pure.errors import InvalidParameterError, KVCacheConfigError
from purestep.pure.initial import initial_state
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.buffers import PersistentBuffers, leaves
from purestep.state.captures import graph_keys
from purestep.state.engine import Engine
from purestep.state.profile import dummy_run, dummy_sampler, profile_run
from purestep.state.run import BoundStep
from purestep.state.runner import GPUModelRunner
from purestep.state.setup import check_fp8
from purestep.state.sizes import Sizes
from tests.laws import equal
from tests.profiles import examples
from tests.pure.models.test_module import toy
from tests.state.fake_graphs import FakeGraphs
from tests.tiny import Loop, cached_requests, new_request, scheduled, tiny_llama

FP8 = torch.float8_e4m3fn
VOCAB, LONGEST, BLOCK_SIZE = 16, 32, 4
MODEL, PARAMS = tiny_llama(vocab_size=VOCAB)
LIMITS = BatchLimits(4, LONGEST, VOCAB, (BLOCK_SIZE,), (64,))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12).map(tuple)
FIRST = (3, 1, 4, 1, 5, 9, 2)
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 4  # of two layers with one head of 4, at a byte a number
Tokens = tuple[int, ...]


def engine(**changes: Any) -> Engine:
    sizes = {
        "dtype": torch.float64,
        "kv_cache_bytes": 64 * BLOCK_BYTES,
        "kv_cache_dtype": "fp8",
        "block_size": BLOCK_SIZE,
        "max_model_len": LONGEST,
        "max_num_reqs": 4,
        "capture_progress": False,
    }
    return Engine((MODEL, PARAMS), **(sizes | changes))


def tokens(own: Engine, prompts: Sequence[Tokens], params: SamplingParams = GREEDY) -> list[Tokens]:
    return [result.token_ids for result in own.generate(prompts, params, progress=False)]


def scales(own: Engine) -> Tensor:
    found = own.turns.now.leased.value.kv_scales
    assert found is not None
    return found.clone()


def loop_of(kv_scales: Tensor | None = None, **how: Any) -> Loop:
    """The stages on a cache of eight bits, with the kernels that define them."""
    loop = Loop(MODEL, PARAMS, LIMITS, **how)
    loop.state = initial_state(MODEL, LIMITS, dtype=FP8)
    if kv_scales is not None:
        loop.state = replace(loop.state, kv_scales=kv_scales)
    return loop


@cache
def alone(prompt: Tokens, num_tokens: int = 6) -> Tokens:
    """What a request gets that has such a device for itself, with scales of 1."""
    loop, blocks = loop_of(), (tuple(range(1, 1 + LONGEST // BLOCK_SIZE)),)
    loop.step(scheduled(new_request("r", prompt, blocks), counts={"r": len(prompt)}))
    for _ in range(num_tokens - 1):
        loop.decode("r")
    return tuple(loop.tokens("r")[len(prompt) :])


@examples(0.2)
@given(
    st.lists(PROMPT, min_size=1, max_size=4),
    st.integers(3, 20),
    st.sampled_from([14, 64]),
    st.booleans(),
    st.integers(0, 2),
)
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(
    prompts: list[Tokens], budget: int, num_blocks: int, captured: bool, steps_ahead: int
) -> None:
    """Batched, in chunks, preempted, captured, steps ahead: those of the stages by the kernels that define them."""
    sizes = {"max_num_batched_tokens": budget, "kv_cache_bytes": num_blocks * BLOCK_BYTES}
    with engine(graph_api=FakeGraphs() if captured else None, steps_ahead=steps_ahead, **sizes) as own:
        assert tokens(own, prompts) == [alone(prompt) for prompt in prompts]
        assert {kv.dtype for kv in own.turns.now.leased.value.kv} == {FP8}


def test_eight_bits_hold_other_tokens_than_all_of_them() -> None:
    """So the tests above would notice a cache of the model's own type."""
    prompts = [(*FIRST, i) for i in range(VOCAB)]
    with engine(kv_cache_dtype="auto", kv_cache_bytes=2**16) as own:
        assert tokens(own, prompts) != [alone(prompt) for prompt in prompts]


def test_twice_the_blocks_in_the_same_bytes() -> None:
    """Of a cache in bfloat16; a byte a number, wherever bytes are told of."""
    with engine(kv_cache_dtype="bfloat16") as two, engine() as one:
        assert one.limits.num_blocks[0] == 2 * two.limits.num_blocks[0] == 64
        for own, kind, blocks in ((two, "bfloat16", 32), (one, "float8_e4m3fn", 64)):
            kv = [leaf for name, leaf in leaves(own.turns.now.leased.value) if name.startswith("kv[")]
            assert sum(leaf.nbytes for leaf in kv) == 64 * BLOCK_BYTES
            assert f"{4 * blocks - 4} tokens in {64 * BLOCK_BYTES:,} bytes of {kind})" in repr(own)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", torch.float64),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("fp8", FP8),
        ("fp8_e4m3", FP8),
    ],
)
def test_the_cache_is_of_the_type_that_was_asked_for(name: str, dtype: torch.dtype) -> None:
    with engine(kv_cache_dtype=name) as own:
        state = own.turns.now.leased.value
        assert {kv.dtype for kv in state.kv} == {dtype}
        assert (state.kv_scales is None) == (dtype != FP8)
        assert len(tokens(own, [FIRST])[0]) == 6


def test_what_is_no_such_type_is_refused_by_name() -> None:
    for name in ("fp4", "int8", "fp8_e5m2", None, torch.float16):
        with pytest.raises(
            InvalidParameterError, match=r"kv_cache_dtype=.*: give one of auto, float32, .*fp8"
        ):
            Sizes(kv_cache_dtype=name)  # type: ignore[arg-type]
    for name in ("auto", "bfloat16"):
        with pytest.raises(
            InvalidParameterError, match=f"kv_cache_dtype='{name}': only 'fp8' is stored by scales"
        ):
            Sizes(kv_cache_dtype=name, calculate_kv_scales=True)
    with pytest.raises(KVCacheConfigError, match="only float8_e4m3fn is stored by scales"):
        PersistentBuffers(MODEL, LIMITS, dtype=torch.bfloat16, calculate_kv_scales=True)


def test_a_gpu_without_such_numbers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, is_refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=found: found)
        if is_refused:
            with pytest.raises(InvalidParameterError, match=r"a GPU of capability \(8, 0\)"):
                check_fp8(torch.device("cuda"))
        else:
            check_fp8(torch.device("cuda"))
    check_fp8(torch.device("cpu"))


def test_cached_prefixes_are_read_as_they_were_stored() -> None:
    prompt = (*FIRST, 6, 5, 3, 5)
    with engine() as own:
        first = own.generate([prompt], GREEDY, progress=False)[0]
        again, longer = own.generate([prompt, (*prompt, 7)], GREEDY, progress=False)
    assert (first.num_cached_tokens, again.num_cached_tokens, longer.num_cached_tokens) == (0, 8, 11)
    assert first.token_ids == again.token_ids == alone(prompt)
    assert longer.token_ids == alone((*prompt, 7))


def test_forks_and_rewound_requests_go_on_as_they_would() -> None:
    """From a block that is half full, which is copied; after others have written what they like."""
    with engine() as own:
        own.add_request("a", FIRST, GREEDY)
        own.step()
        own.step()
        here = own.remember()
        for _ in range(2):
            own.fork("a", "b")
            own.add_request("c", FIRST[:3], GREEDY)
            results = {}
            while own.has_unfinished():
                results |= {output.req_id: output.token_ids for output in own.step()}
            assert results == {"a": alone(FIRST), "b": alone(FIRST), "c": alone(FIRST[:3])}
            own.rewind(here)


# Scales that are calculated.


class Listener:
    """The reference's kernels, which note the keys and values of each layer's last call."""

    def __init__(self) -> None:
        self.heard: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(q: Tensor, k: Tensor, v: Tensor, *others: Tensor, kv_scales: Tensor, **how: Any) -> Any:
            self.heard[kv_scales.storage_offset() // 2] = k, v
            return reference.attend(q, k, v, *others, kv_scales=kv_scales, **how)

        self.kernels = replace(reference, attend=attend)


def by_hand(prompts: Sequence[Tokens], found: Tensor) -> Tensor:
    """The largest key and value of each layer, over 448, in a step that runs these prompts with the scales `found`."""
    listener = Listener()
    loop, per_request = loop_of(found, kernels=listener.kernels), LONGEST // BLOCK_SIZE
    new = [
        new_request(f"r{i}", prompt, (tuple(range(1 + i * per_request, 1 + (i + 1) * per_request)),))
        for i, prompt in enumerate(prompts)
    ]
    loop.step(scheduled(*new, counts={f"r{i}": len(prompt) for i, prompt in enumerate(prompts)}))
    largest = [[float(x.abs().max()) for x in listener.heard[layer]] for layer in range(len(found))]
    return torch.tensor(largest) / 448


@examples(0.2)
@given(st.lists(PROMPT, min_size=1, max_size=3), st.booleans(), st.lists(PROMPT, min_size=1, max_size=3))
def test_scales_are_made_of_the_first_step_and_stay(
    prompts: list[Tokens], captured: bool, others: list[Tokens]
) -> None:
    """Each layer's, by what it is given while layers before it read what they stored; of no padding."""
    graphs: dict[str, Any] = {}
    if captured:
        graphs = {
            "graph_api": FakeGraphs(),
            "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE,
            "capture_sizes": (4, 8, 64),
        }
    with engine(calculate_kv_scales=True, enable_prefix_caching=False, **graphs) as own:
        assert torch.equal(scales(own), torch.ones(2, 2))
        first = tokens(own, prompts)
        found = scales(own)
        torch.testing.assert_close(found, by_hand(prompts, found), rtol=1e-6, atol=0)
        tokens(own, others)
        assert tokens(own, prompts) == first
        assert equal(scales(own), found)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_the_first_step_runs_eagerly_once_on_the_padding_that_it_was_given(mode: CUDAGraphMode) -> None:
    """Every step of these engines has a graph; the one that calculates scales runs none, and pads as the other does."""
    replays, bounds = [], []
    for calculate in (False, True):
        api = FakeGraphs()
        how: Any = {"graph_api": api, "cudagraph_mode": mode, "capture_sizes": (1, 8)}
        with engine(calculate_kv_scales=calculate, **how) as own:
            own.add_request("a", FIRST[:5], GREEDY)
            counts, layouts = [], []
            for _ in range(4):
                before = api.num_replays
                own.step()
                counts.append(api.num_replays - before)
                layouts.append(own.turns.now.leased.absorbed.layout.bounds)
        replays.append(counts)
        bounds.append(layouts)
    assert bounds[0] == bounds[1]
    assert bounds[0][0].num_tokens == 8
    assert all(replays[0])
    assert replays[1] == [0, *replays[0][1:]]


def bound_step(**how: Any) -> BoundStep:
    buffers = PersistentBuffers(MODEL, LIMITS, dtype=FP8, calculate_kv_scales=True)
    return BoundStep(buffers, MODEL, PARAMS, **({"kernels": donating} | how))


def test_made_up_batches_and_captures_do_not_count() -> None:
    """However they run, the scales are 1 and due."""
    bound = bound_step(graph_api=FakeGraphs())
    config, mode = DispatchConfig((4, 8), 4), CUDAGraphMode.FULL_AND_PIECEWISE
    keys = dispatch_keys(config, mode)
    assert bound.captured is not None
    bound.captured.capture(graph_keys(keys))
    profile_run(bound, 16)
    for how in ({}, {"context": 5}, {"keys": keys}, {"keys": keys, "uniform_query_len": 1, "context": 3}):
        executed = dummy_run(bound, 4, **how)  # type: ignore[arg-type]
        if executed is not None:
            dummy_sampler(bound, executed)
    found = bound.buffers.lease().value.kv_scales
    assert found is not None and torch.equal(found, torch.ones(2, 2))
    assert bound.buffers.due_scales


def test_the_runner_calculates_in_execute_model_and_runs_its_graphs_from_the_second_step_on() -> None:
    api = FakeGraphs()
    bound = bound_step(graph_api=api)
    keys = dispatch_keys(DispatchConfig((1, 8), 4), CUDAGraphMode.FULL)
    assert bound.captured is not None
    bound.captured.capture(graph_keys(keys, two_phase=True))
    own = GPUModelRunner(bound, dispatch_keys=keys)
    own.execute_model(scheduled(new_request("r", FIRST, ((1, 2, 3, 4),)), counts={"r": 7}))
    assert own.execute_model_state is not None
    found = own.execute_model_state.state.kv_scales
    assert found is not None and not bound.buffers.due_scales
    torch.testing.assert_close(found, by_hand([FIRST], found.clone()), rtol=1e-6, atol=0)
    assert len(own.execute_model_state.inputs.input_ids) == 8
    before = found.clone()
    own.sample_tokens()
    assert api.num_replays == 0
    own.execute_model(scheduled(cached=cached_requests(own.input_batch, "r"), counts={"r": 1}))
    own.sample_tokens()
    assert api.num_replays == 2 and equal(found, before)


def failing_once(call: int) -> Any:
    """Kernels whose n-th attention fails."""
    calls = [0]

    def attend(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError("a failure in the midst of a step")
        return donating.attend(*args, **kwargs)

    return replace(donating, attend=attend)


@pytest.mark.parametrize("call", [1, 2])
def test_a_first_step_that_fails_does_not_count(call: int) -> None:
    """Whatever it has calculated by then, the next one does so anew, of its own tokens."""
    with engine(calculate_kv_scales=True, kernels=failing_once(call)) as own:
        own.add_request("gone", (15, 15, 15, 8), GREEDY)
        with pytest.raises(RuntimeError, match="a failure in the midst"):
            own.step()
        own.abort("gone")
        first = tokens(own, [FIRST])
        found = scales(own)
    torch.testing.assert_close(found, by_hand([FIRST], found), rtol=1e-6, atol=0)
    with engine(calculate_kv_scales=True) as other:
        assert tokens(other, [FIRST]) == first


def test_rewinding_and_other_weights_leave_the_scales() -> None:
    """What lies in the cache was stored by them: the same tokens come again."""
    with engine(calculate_kv_scales=True) as own:
        own.add_request("a", FIRST, GREEDY)
        before = own.remember()
        results, found = [], None
        for _ in range(2):
            while own.has_unfinished():
                (result,) = own.step()
            results.append(result.token_ids)
            found = scales(own) if found is None else found
            own.rewind(before)
        own.update_weights(own.params.tree)
        tokens(own, [(1, 2, 3)])
        assert results[0] == results[1]
        assert equal(scales(own), found)


def test_layers_of_a_drafter_have_scales_of_their_own_and_change_no_token() -> None:
    """They are calculated behind the model's in the same step, each once, though a step drafts in rounds."""
    draft, weights = tiny_llama(vocab_size=VOCAB, groups=(0,), seed=4)
    drafter = draft_model(MODEL, draft, num_drafts=3)
    sizes = {"calculate_kv_scales": True, "kv_cache_bytes": 64 * 3 * BLOCK_BYTES // 2}
    with engine(drafter=drafter, draft_params=weights, **sizes) as own, engine(**sizes) as plain:
        own.add_request("a", FIRST, GREEDY)
        own.step()
        found = scales(own)
        assert found.shape == (3, 2) and not (found == 1).any()
        assert not own.turns.bound.buffers.due_scales
        assert torch.equal(found[:2], by_hand([FIRST], found[:2]))
        while own.has_unfinished():
            (result,) = own.step()
        assert [result.token_ids] == tokens(plain, [FIRST])
        assert equal(scales(own), found)


def test_layers_of_a_torch_module_have_scales_too() -> None:
    """The first layer's are those of the module's own keys and values."""
    module, model, params = toy()
    prompt = (3, 14, 15, 9, 26)
    sizes: dict[str, Any] = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True, "kv_cache_bytes": 2**14}
    with Engine((model, params), dtype=torch.float64, block_size=4, max_model_len=32, **sizes) as own:
        tokens(own, [prompt])
        found = scales(own)
    x = module.embed(torch.tensor(prompt)) + module.place(torch.arange(len(prompt)))
    _, k, v = module.mix[0](x).chunk(3, -1)
    largest = torch.stack([k.abs().max(), v.abs().max()]).float()
    torch.testing.assert_close(found[0], largest / 448, rtol=1e-6, atol=0)
    assert not (found[1] == 1).any()


@pytest.mark.gpu
def test_graphs_read_the_scales_that_the_first_step_has_made() -> None:
    """They were captured before it: the tokens of steps without graphs, in kernels of the same bits in any batch."""
    from purestep.kernels.triton import cuda_invariant

    config = tiny_config(hidden_size=128)
    model, params = llama(config), random_params(config, seed=1, std=0.3)
    found, prompts = [], [FIRST, (1, 2, 3), (7, 7, 2, 9, 11)]
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY):
        with Engine(
            (model, params), dtype=torch.bfloat16, device="cuda", kernels=cuda_invariant(), cudagraph_mode=mode,
            kv_cache_bytes=2**20, kv_cache_dtype="fp8", calculate_kv_scales=True, max_num_reqs=4,
        ) as own:  # fmt: skip
            found.append((tokens(own, prompts), scales(own).tolist()))
    assert found[0] == found[1]
    assert all(scale not in (0.0, 1.0) for layer in found[0][1] for scale in layer)


def test_scales_lie_in_one_place_of_a_class_of_their_own() -> None:
    buffers = PersistentBuffers(MODEL, LIMITS, dtype=FP8)
    (own,) = [buffer for buffer in buffers.specification if buffer.kind == "once"]
    assert own.name == "kv_scales" and own.tensor is buffers.lease().value.kv_scales
    assert not buffers.due_scales
