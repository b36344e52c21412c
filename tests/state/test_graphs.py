"""Captured steps, with a stand-in for CUDA graphs: the same tokens, nothing left behind, nothing uploaded in vain."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import purestep.state.run
from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.pure.drafters.ngram import ngram, ngram_on_host
from purestep.pure.errors import CaptureError
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.drafter import HostDrafter
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import SamplerShape
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.buffers import PersistentBuffers, leaves
from purestep.state.engine import Engine
from purestep.state.graphs import CapturedSteps, GraphKey, covers
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs

CONFIG = tiny_config()
MODEL = llama(CONFIG)
PARAMS = random_params(CONFIG, seed=1, std=0.5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [(5, 9, 2, 7), (1, 1, 3), (40, 8, 22, 17, 5, 6, 30, 2, 9), (5, 9, 2, 8)]


def engine(**changes: Any) -> Engine:
    sizes = {"kv_cache_bytes": 40 * 1024, "block_size": 4, "max_model_len": 48, "max_num_reqs": 8}
    return Engine((MODEL, PARAMS), **(sizes | changes))


def tokens(prompts: Any, params: Any, **changes: Any) -> list[list[tuple[int, ...]]]:
    with engine(**changes) as own:
        results = own.generate(prompts, params, progress=False)
    return [[output.token_ids for output in result.outputs] for result in results]


PARAMETERS = st.builds(
    SamplingParams,
    n=st.integers(1, 2),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 1, 8]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (3, 17)]),
    seed=st.integers(0, 5),
    max_tokens=st.integers(3, 12),
)


@examples(0.06)
@given(
    st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=20), min_size=1, max_size=5),
    PARAMETERS,
    st.integers(0, 2),
    st.booleans(),
    st.integers(4, 32),
    st.sampled_from([14, 40]),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_captured_steps_and_steps_ahead_give_the_tokens_of_plain_ones(
    prompts: list[list[int]],
    params: SamplingParams,
    steps_ahead: int,
    captured: bool,
    budget: int,
    num_blocks: int,
    unroll: int,
    num_drafts: int,
) -> None:
    """With drafts too, of the host (no steps ahead) or the device, of which some requests have fewer than others."""
    api = FakeGraphs() if captured else None
    how: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "kv_cache_bytes": num_blocks * 1024,
        "steps_ahead": steps_ahead,
    }
    how["unroll"] = unroll if captured and not num_drafts else 1
    if num_drafts:
        how["drafter"] = (ngram if steps_ahead else ngram_on_host)(num_drafts=num_drafts, min_n=1, max_n=2)

    assert tokens(prompts, params, graph_api=api, **how) == tokens(prompts, params)


def test_decode_batches_are_replayed_and_padded_to_what_was_captured() -> None:
    api = FakeGraphs()

    assert tokens(PROMPTS[:3], GREEDY, graph_api=api, capture_sizes=(4, 8)) == tokens(PROMPTS[:3], GREEDY)
    assert len(api.captured) == 8  # two sizes, four kinds of sampling
    assert api.num_replays == 11  # one prefill step, then one replay a token


def says(count: Callable[[int], int]) -> HostDrafter:
    """A drafter on the host with up to 3 guesses: so many as the length of the history says."""

    def propose(kept: None, histories: Any, budgets: Any) -> Any:
        return kept, tuple([(7,) * count(len(own)) for own in histories])

    return HostDrafter(3, propose)


@pytest.mark.parametrize(
    "count",
    [lambda n: 3, lambda n: 2, lambda n: 0, lambda n: n % 4, lambda n: 3 * (n % 5 == 0)],
    ids=["all", "two each", "none", "from none to all", "few have any"],
)
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_every_step_that_verifies_the_drafts_of_a_host_is_replayed(
    count: Callable[[int], int], mode: CUDAGraphMode
) -> None:
    """In the graph of batches where all requests have all drafts, near the limits of requests too."""
    api, sizes = FakeGraphs(), {"cudagraph_mode": mode, "capture_sizes": (8, 16, 32)}
    with engine(graph_api=api, drafter=says(count), **sizes) as own:
        for i, prompt in enumerate(PROMPTS[:1] + PROMPTS[2:]):
            own.add_request(str(i), (*prompt, 3), replace(GREEDY, max_tokens=8 + 2 * i))
        own.step()  # the prompts
        full, results = (
            api.captured[-12:],
            dict[str, tuple[int, ...]](),
        )  # three sizes, four kinds of sampling
        before = sum(graph.num_replays for graph in full)
        while own.has_unfinished():
            results |= {result.req_id: result.token_ids for result in own.step()}
        steps = own._turns.now.batch.clock.num_begun - 1
        assert sum(graph.num_replays for graph in full) - before == steps
    for i, prompt in enumerate(PROMPTS[:1] + PROMPTS[2:]):
        plain = tokens([(*prompt, 3)], replace(GREEDY, max_tokens=8 + 2 * i))
        assert results[str(i)] == plain[0][0]


def test_steps_of_drafts_that_stay_on_the_device_are_replayed_to_the_end() -> None:
    """Where some requests may say fewer tokens than others verify too."""
    api, drafter = FakeGraphs(), ngram(num_drafts=3, min_n=1, max_n=2)
    with engine(graph_api=api, drafter=drafter) as own:
        for i, prompt in enumerate(PROMPTS):
            own.add_request(str(i), (*prompt, 3, 3), replace(GREEDY, max_tokens=6 + 3 * i))
        while own.has_unfinished():
            own.step()
        assert api.num_replays == own._turns.now.batch.clock.num_begun - 1


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 0},
        {"temperature": 0.7, "logprobs": 0},
        {"presence_penalty": 0.5},
        {"temperature": 0.7, "repetition_penalty": 1.2, "min_tokens": 3},
    ],
)
def test_what_rollouts_ask_for_is_replayed_too(asked: dict[str, Any]) -> None:
    api, params = FakeGraphs(), replace(GREEDY, **asked)

    assert tokens(PROMPTS[:3], params, graph_api=api) == tokens(PROMPTS[:3], params)
    assert api.num_replays == 11


def test_the_largest_shapes_are_captured_first() -> None:
    api = FakeGraphs()
    with engine(graph_api=api) as own:
        keys = own._turns.bound.captured.keys

    sizes = [key.descriptor.num_tokens for key in keys]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 8


def test_capturing_leaves_no_trace() -> None:
    limits = BatchLimits(max_num_reqs=4, max_model_len=16, vocab_size=64, block_sizes=(4,), num_blocks=(8,))
    buffers = PersistentBuffers(MODEL, limits)
    state = buffers.lease().value
    for kv in state.kv:
        kv.normal_()
    state.ledger.table.random_(0, 3)
    state.token_ids.random_(0, 64)
    before = [leaf.clone() for _, leaf in leaves(state)]
    steps = CapturedSteps(MODEL, PARAMS, buffers, donating, FakeGraphs())

    steps.capture(
        [GraphKey(BatchDescriptor(n, n, uniform=True), SamplerShape(random=True)) for n in (4, 2, 1)]
    )

    for (name, leaf), old in zip(leaves(state), before, strict=True):
        if name.startswith("kv"):
            assert torch.equal(leaf[1:], old[1:])  # block 0 takes what padding writes
        elif name == "token_ids":
            assert torch.equal(leaf[:-1], old[:-1])  # so does the null row
        else:
            assert torch.equal(leaf, old)


def test_a_step_that_returns_fresh_memory_is_refused_with_its_size() -> None:
    limits = BatchLimits(max_num_reqs=4, max_model_len=16, vocab_size=64, block_sizes=(4,), num_blocks=(8,))
    wrong = replace(donating, attend=reference.attend)
    steps = CapturedSteps(MODEL, PARAMS, PersistentBuffers(MODEL, limits), wrong, FakeGraphs())

    with pytest.raises(CaptureError, match=r"kv\[0\] came back in fresh storage \(4,096 bytes\)"):
        steps.capture([GraphKey(BatchDescriptor(4, 4, uniform=True), SamplerShape())])


def test_steady_decode_uploads_once_in_a_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = []

    def counted(inbox: Any, device: torch.device) -> Any:
        staged.append(inbox.data.nbytes)
        return stage(inbox, device)

    stage = purestep.state.run.stage
    monkeypatch.setattr(purestep.state.run, "stage", counted)
    horizon, api = 16, FakeGraphs()
    params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    with engine(graph_api=api, block_horizon=horizon, kv_cache_bytes=2**18) as own:
        own.generate([[1, 2, 3, 4]] * 8, params, progress=False)

    assert api.num_replays == 32
    # Admission, the layout of decoding, and one growth for each further 16 tokens.
    assert len(staged) <= 2 + 2


def test_new_weights_in_the_same_memory_keep_the_graphs_and_others_are_captured_anew() -> None:
    api = FakeGraphs()
    other = random_params(CONFIG, seed=2, std=0.5)
    with engine(graph_api=api) as own:
        own.generate(PROMPTS, GREEDY, progress=False)
        num_graphs = len(api.captured)
        own.update_weights(other)

        assert len(api.captured) == 2 * num_graphs
        results = [r.token_ids for r in own.generate(PROMPTS, GREEDY, progress=False)]
    with Engine((MODEL, other), kv_cache_bytes=2**20, max_model_len=48) as fresh:
        assert results == [r.token_ids for r in fresh.generate(PROMPTS, GREEDY, progress=False)]


def test_closing_the_engine_drops_its_graphs() -> None:
    api = FakeGraphs()
    own = engine(graph_api=api)
    graphs = [weakref.ref(graph) for graph in api.captured]
    api.captured.clear()

    own.close()
    gc.collect()

    assert [ref() for ref in graphs] == [None] * len(graphs)


@pytest.mark.parametrize(
    ("captured", "wanted", "covered"),
    [
        (SamplerShape(), SamplerShape(), True),
        (SamplerShape(), SamplerShape(random=True), False),
        (SamplerShape(random=True, truncated=True), SamplerShape(random=True), True),
        (SamplerShape(random=True, truncated=True), SamplerShape(penalties=True), False),
        (SamplerShape(random=True), SamplerShape(constraints=True), False),
        (SamplerShape(), SamplerShape(extras=True), False),
        (SamplerShape(extras=True), SamplerShape(extras=True), False),
        (SamplerShape(), SamplerShape(prompt_logprobs=True), True),
        (SamplerShape(), SamplerShape(kept_mass=True), False),
        (SamplerShape(kept_mass=True), SamplerShape(), True),
        (SamplerShape(num_logprobs=5, logprobs_modes=("raw_logprobs",)), SamplerShape(), False),
        (
            SamplerShape(num_logprobs=5, logprobs_modes=("raw_logprobs",)),
            SamplerShape(num_logprobs=2, logprobs_modes=("raw_logprobs",)),
            True,
        ),
        (
            SamplerShape(num_logprobs=5, logprobs_modes=("raw_logprobs",)),
            SamplerShape(num_logprobs=2, logprobs_modes=("raw_logits",)),
            False,
        ),
    ],
)
def test_a_captured_sampler_covers_what_it_computes(
    captured: SamplerShape, wanted: SamplerShape, covered: bool
) -> None:
    assert covers(captured, wanted) is covered
