"""Every kind of drafter in an engine: the tokens are those of an engine without one."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from purestep.pure.drafters.draft_model import draft_model
from purestep.pure.drafters.eagle import eagle
from purestep.pure.drafters.eagle3 import eagle3, tapped
from purestep.pure.drafters.medusa import medusa
from purestep.pure.drafters.ngram import ngram, ngram_on_host
from purestep.pure.drafters.suffix import suffix
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.models.model import Model
from purestep.pure.record import replace
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.drafter import Drafter, HostDrafter
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from tests.state.fake_graphs import FakeGraphs

CONFIG = tiny_config()
SMALL = replace(CONFIG, num_layers=1)
HIDDEN, VOCAB = CONFIG.hidden_size, CONFIG.vocab_size
MODEL, PARAMS = llama(CONFIG), random_params(CONFIG, seed=1, std=0.5)
TREE = random_params(SMALL, seed=2, std=0.5).tree
(LAYER,) = TREE["layers"]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
PROMPTS = [(5, 9, 2, 7, 30, 11), (1, 2, 1, 2, 1, 2, 1), (3,), (5, 9, 2, 7, 30, 11, 8)]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.5


def with_weights(kind: str) -> tuple[Drafter, Any]:
    """A drafter that has weights, and those."""
    match kind:
        case "draft model":
            return draft_model(MODEL, llama(SMALL), num_drafts=3), TREE
        case "drawing draft model":
            return draft_model(MODEL, llama(SMALL), num_drafts=3, draws=True), TREE
        case "eagle":
            return eagle(MODEL, SMALL, num_drafts=3), {"fc": noise(HIDDEN, 2 * HIDDEN), "layers": (LAYER,)}
        case "eagle-3":
            qkv = noise(LAYER["qkv"].shape[0], 2 * HIDDEN)
            layer = LAYER | {"hidden_norm": torch.ones(HIDDEN), "qkv": qkv}
            own = {"norm": torch.ones(HIDDEN), "head": noise(VOCAB, HIDDEN)}
            return eagle3(MODEL, SMALL, layers=(0, 1), num_drafts=3), own | {
                "fc": noise(HIDDEN, 2 * HIDDEN),
                "layer": layer,
            }
        case _:
            layers = ({"weight": noise(HIDDEN, HIDDEN), "bias": noise(HIDDEN)},)
            return medusa(num_drafts=2), ({"layers": layers, "out": noise(VOCAB, HIDDEN)},) * 2


WEIGHTED = ("draft model", "drawing draft model", "eagle", "eagle-3", "medusa")
BARE: dict[str, Callable[[], Drafter | HostDrafter]] = {
    "n-gram": lambda: ngram(num_drafts=3, min_n=1, max_n=3),
    "n-gram on the host": lambda: ngram_on_host(num_drafts=3, min_n=1, max_n=3),
    "suffix": lambda: suffix(num_drafts=3, corpus=[PROMPTS[0], PROMPTS[3]]),
}


def said(params: SamplingParams, kind: str | None = None, **changes: Any) -> list[tuple[int, ...]]:
    """The tokens of all requests, of which there are more than rows; blocks are few, so that some are preempted."""
    model: Model = tapped(MODEL, (0, 1)) if kind == "eagle-3" else MODEL
    drafter: Any = None
    weights = None
    if kind in WEIGHTED:
        drafter, tree = with_weights(kind)
        weights = Params(tree)
    elif kind is not None:
        drafter = BARE[kind]()
    sizes = {"kv_cache_bytes": 2**14, "block_size": 4, "max_model_len": 32, "max_num_reqs": 3}
    sizes |= {"max_num_batched_tokens": 12} | changes
    with Engine((model, PARAMS), drafter=drafter, draft_params=weights, **sizes) as engine:
        results = engine.generate(PROMPTS, params, progress=False)
        assert engine.num_free_blocks == engine.limits.num_blocks[0] - 1
        return [result.token_ids for result in results]


@pytest.mark.parametrize(("kind", "caching"), list(product([*WEIGHTED, *BARE], [True, False])))
def test_tokens_are_those_of_an_engine_without_drafter(kind: str, caching: bool) -> None:
    """Chunked prompts, shared prefixes, rows that other requests had before, preemption."""
    assert said(GREEDY, kind, enable_prefix_caching=caching) == said(GREEDY)


@pytest.mark.parametrize("kind", BARE)
def test_prompts_may_be_much_longer_than_a_chunk(kind: str) -> None:
    """Of hundreds of tokens, in chunks of sixteen, beside a request that decodes."""
    model = llama(replace(MODEL.config, max_position_embeddings=512))
    prompts = [[i * 7 % VOCAB for i in range(300)], [1, 2, 3]]
    sizes: dict[str, Any] = {"kv_cache_bytes": 2**20, "max_num_batched_tokens": 16}
    found = []
    for drafter in (None, BARE[kind]()):
        with Engine((model, PARAMS), drafter=drafter, **sizes) as engine:
            results = engine.generate(prompts, GREEDY, progress=False)
        found.append([result.token_ids for result in results])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", WEIGHTED)
def test_steps_may_be_begun_before_drafts_are_known(kind: str) -> None:
    sizes = {"steps_ahead": 2, "max_num_reqs": 4, "kv_cache_bytes": 2**18}
    assert said(GREEDY, kind, **sizes) == said(GREEDY)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY])
@pytest.mark.parametrize("kind", [*WEIGHTED, "n-gram"])
def test_captured_steps_draft_alike(kind: str, mode: CUDAGraphMode) -> None:
    """Padded to the shapes of graphs, which bind what the drafter keeps and its layers' keys and values."""
    graphs = FakeGraphs()
    sizes = {"graph_api": graphs, "kv_cache_bytes": 2**18, "capture_sizes": (4, 8, 12)}
    modes = {"cudagraph_mode": mode, "capture_progress": False}
    assert said(GREEDY, kind, **sizes, **modes) == said(GREEDY)
    assert graphs.num_replays > 10
