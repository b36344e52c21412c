"""Captured pieces: the same tokens as plain steps, in every mode; few graphs; inputs where they are read."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.pure.errors import CUDAGraphModeError
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.padding import capture_layout
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import SamplerShape
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.buffers import PersistentBuffers
from purestep.state.engine import Engine
from purestep.state.graphs import CapturedSteps, GraphKey
from purestep.state.pieces import Places, capture_pieces
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs

CONFIG = tiny_config()
MODEL = llama(CONFIG)
PARAMS = random_params(CONFIG, seed=1, std=0.5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [(5, 9, 2, 7), (1, 1, 3), (40, 8, 22, 17, 5, 6, 30, 2, 9), (5, 9, 2, 8)]
LIMITS = BatchLimits(max_num_reqs=4, max_model_len=16, vocab_size=64, block_sizes=(4,), num_blocks=(8,))
MODES = [
    CUDAGraphMode.PIECEWISE,
    CUDAGraphMode.FULL,
    CUDAGraphMode.FULL_AND_PIECEWISE,
    CUDAGraphMode.FULL_DECODE_ONLY,
]


def tokens(prompts: Any, params: Any, **changes: Any) -> list[Any]:
    sizes = {"kv_cache_bytes": 40 * 1024, "block_size": 4, "max_model_len": 48, "max_num_reqs": 8}
    with Engine((MODEL, PARAMS), **(sizes | changes)) as engine:
        results = engine.generate(prompts, params, progress=False)
    return [[output.token_ids for output in result.outputs] for result in results]


@examples(0.1)
@given(
    prompts=st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=20), min_size=1, max_size=5),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8]),
        repetition_penalty=st.sampled_from([1.0, 1.2]),
        logit_bias=st.sampled_from([None, {5: 2.0}]),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 8),
    ),
    mode=st.sampled_from(MODES),
    capture_sizes=st.sets(st.integers(1, 24), min_size=1, max_size=4).map(lambda s: tuple(sorted(s))),
    steps_ahead=st.integers(0, 1),
    budget=st.integers(3, 24),
)
def test_every_mode_gives_the_tokens_of_plain_steps(
    prompts: list[list[int]],
    params: SamplingParams,
    mode: CUDAGraphMode,
    capture_sizes: tuple[int, ...],
    steps_ahead: int,
    budget: int,
) -> None:
    settings = {"max_num_batched_tokens": budget}

    captured = tokens(
        prompts,
        params,
        graph_api=FakeGraphs(),
        cudagraph_mode=mode,
        capture_sizes=capture_sizes,
        steps_ahead=steps_ahead,
        **settings,
    )

    assert captured == tokens(prompts, params, **settings)


def test_pieces_between_two_attentions_are_one_graph() -> None:
    api = FakeGraphs()
    tokens(PROMPTS, GREEDY, graph_api=api, cudagraph_mode=CUDAGraphMode.PIECEWISE, capture_sizes=(32,))

    assert len(api.captured) == CONFIG.num_layers + 1
    assert {graph.num_replays for graph in api.captured} == {12}  # one mixed step, then a decode step a token


def test_mixed_batches_are_replayed_in_full_mode() -> None:
    api = FakeGraphs()
    tokens(PROMPTS, GREEDY, graph_api=api, cudagraph_mode=CUDAGraphMode.FULL, capture_sizes=(8, 32))

    assert api.num_replays == 12


def test_a_model_of_one_piece_is_refused_with_the_reason() -> None:
    model = replace(MODEL, pieces=tuple(piece for piece in MODEL.pieces if piece.is_attention))

    with pytest.raises(CUDAGraphModeError, match="one piece with attention inside"):
        Engine((model, PARAMS), graph_api=FakeGraphs(), cudagraph_mode=CUDAGraphMode.PIECEWISE)


def test_places_are_shared_by_layers_and_by_smaller_batches() -> None:
    places, addresses = Places(), set()
    buffers = PersistentBuffers(MODEL, LIMITS)
    for num_tokens in (8, 4):
        layout = capture_layout(BatchDescriptor(num_tokens), LIMITS, sampler=SamplerShape())
        pieces = capture_pieces(
            MODEL, PARAMS, buffers.laid_out(layout), kernels=donating, api=FakeGraphs(), places=places
        )
        for segment in pieces._segments.values():
            addresses |= {place.data_ptr() for place in segment.places if place is not None}

    assert len(addresses) == 1  # what attention gives, and nothing else, is copied


def test_capturing_pieces_leaves_no_trace() -> None:
    buffers = PersistentBuffers(MODEL, LIMITS)
    state = buffers.lease().value
    for kv in state.kv:
        kv.normal_()
    state.ledger.table.random_(0, 3)
    kv_before, ledger_before = [kv.clone() for kv in state.kv], state.ledger.table.clone()
    steps = CapturedSteps(MODEL, PARAMS, buffers, donating, FakeGraphs())

    steps.capture([GraphKey(BatchDescriptor(n), None) for n in (8, 3)])

    assert torch.equal(state.ledger.table, ledger_before)
    assert all(torch.equal(kv[1:], old[1:]) for kv, old in zip(state.kv, kv_before, strict=True))
