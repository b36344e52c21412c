"""The KV cache's memory: every layer in its place, whatever the order, the sharing and the kernels' block size."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.kernels.types import Kernels
from purestep.pure.errors import KVCacheConfigError
from purestep.pure.initial import initial_state
from purestep.pure.kv_config import HND, NHD, kv_cache_config, kv_cache_shape, kv_cache_strides
from purestep.pure.models.model import KVLayerSpec, Model, Piece
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.inputs import AttentionMetadata, ModelInputs
from purestep.pure.records.kv_config import KVCacheConfig
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from purestep.state.kv_cache import initialize_kv_cache
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs
from tests.tiny import GREEDY, Loop, cached_requests, new_request, scheduled, tiny_llama

NAN = float("nan")
OTHER_ORDERS = (HND, (0, 3, 1, 2, 4), (0, 2, 3, 1, 4))


def configured(
    groups: tuple[int, ...], block_sizes: tuple[int, ...], num_blocks: int, **options: Any
) -> KVCacheConfig:
    """The cache of a tiny Llama with a layer for each entry of `groups`."""
    model, _ = tiny_llama(groups=groups, num_kv_heads=2)
    known = {"block_sizes": block_sizes, "dtype": torch.float64, "max_num_blocks": num_blocks}
    return kv_cache_config(model.kv_layers, **(known | options))


@given(
    st.sampled_from([(0,), (0, 0, 0), (0, 1), (1, 0, 0, 1)]),
    st.integers(2, 5),
    st.booleans(),
    st.sampled_from([(), (2,), (1,)]),
    st.sampled_from((NHD, *OTHER_ORDERS)),
)
def test_layers_are_views_of_one_allocation_for_each_tensor(
    groups: tuple[int, ...], num_blocks: int, shared_pool: bool, kernel_sizes: tuple[int, ...], order: Any
) -> None:
    """Zeros in the shapes and strides of the configuration; the bytes are those it counts, and no more."""
    sizes = (4,) * (1 + max(groups))
    supported = [kernel_sizes] if kernel_sizes else []
    config = configured(groups, sizes, num_blocks, shared_pool=shared_pool, supported=supported)
    cache = initialize_kv_cache(config, order=order)
    assert len(cache) == len(groups)
    for layer, kv in enumerate(cache):
        assert tuple(kv.shape) == kv_cache_shape(config, layer)
        assert kv.stride() == kv_cache_strides(kv.shape, order)
        assert kv.dtype == torch.float64
        assert not kv.any()
    storages = {kv.untyped_storage().data_ptr(): kv.untyped_storage().nbytes() for kv in cache}
    assert sorted(storages.values()) == sorted(tensor.num_bytes for tensor in config.tensors)
    for tensor in config.tensors:
        assert len({cache[layer].untyped_storage().data_ptr() for layer in tensor.shared_by}) == 1


def test_a_configuration_with_a_layer_in_no_tensor_is_refused() -> None:
    config = configured((0, 0), (4,), 3)
    with pytest.raises(KVCacheConfigError, match=r"the tensors name the layers \[0\]"):
        initialize_kv_cache(replace(config, tensors=config.tensors[:1]))


def with_cache(loop: Loop, config: KVCacheConfig, order: Any) -> Loop:
    """The loop on a cache that was made by this configuration, full of NaN."""
    kv = initialize_kv_cache(config, order=order)
    for cache in kv:
        cache.fill_(NAN)
    loop.state = initial_state(loop.model, loop.batch.limits, kv=kv)
    return loop


def decoded(loop: Loop, blocks: tuple[tuple[int, ...], ...]) -> list[int]:
    """A prompt in two chunks, then five tokens."""
    loop.step(scheduled(new_request("r", (3, 1, 4, 1, 5, 9, 2), blocks, GREEDY), counts={"r": 4}))
    loop.step(scheduled(cached=cached_requests(loop.batch, "r"), counts={"r": 3}))
    for _ in range(5):
        loop.decode("r")
    return loop.tokens("r")


@pytest.mark.parametrize("order", OTHER_ORDERS)
def test_the_reference_computes_in_any_memory_order(order: tuple[int, ...]) -> None:
    model, params = tiny_llama(num_kv_heads=2)
    limits = BatchLimits(2, 24, 16, (4,), (8,))
    config = configured((0, 0), (4,), 8)
    blocks = ((5, 2, 7),)
    expected = decoded(Loop(model, params, limits), blocks)
    assert decoded(with_cache(Loop(model, params, limits), config, order), blocks) == expected


def test_the_kernels_of_the_cpu_refuse_another_memory_order_by_name() -> None:
    """Before anything is written."""
    model, params = tiny_llama(num_kv_heads=2)
    limits = BatchLimits(2, 24, 16, (4,), (8,))
    loop = with_cache(Loop(model, params, limits, kernels=donating), configured((0, 0), (4,), 8), HND)
    with pytest.raises(ValueError, match="no memory order but NHD"):
        decoded(loop, ((5, 2, 7),))


@pytest.mark.parametrize("kernels", [reference, donating])
def test_groups_that_share_tensors_do_not_meet(kernels: Kernels) -> None:
    """Blocks of one pool: layers of two groups lie in the same bytes, and give the tokens of layers apart."""
    model, params = tiny_llama(groups=(0, 1, 1, 0), num_kv_heads=2)
    limits = BatchLimits(2, 24, 16, (4, 4), (12, 12))
    config = configured((0, 1, 1, 0), (4, 4), 12, shared_pool=True)
    blocks = ((5, 2, 7), (1, 11, 3))
    expected = decoded(Loop(model, params, limits), blocks)
    assert decoded(with_cache(Loop(model, params, limits, kernels=kernels), config, NHD), blocks) == expected


@pytest.mark.parametrize("kernels", [reference, donating])
@pytest.mark.parametrize("kernel_size", [2, 1])
def test_smaller_kernel_blocks_give_the_same_tokens(kernels: Kernels, kernel_size: int) -> None:
    """A configuration for kernels that take no blocks of 4, and limits that say so."""
    model, params = tiny_llama(num_kv_heads=2)
    limits = BatchLimits(2, 24, 16, (4,), (8,))
    config = configured((0, 0), (4,), 8, supported=[(kernel_size,)])
    smaller = replace(limits, kernel_block_sizes=config.kernel_block_sizes)
    assert smaller.kernel_block_sizes == (kernel_size,)
    blocks = ((5, 2, 7),)
    expected = decoded(Loop(model, params, limits), blocks)
    loop = with_cache(Loop(model, params, smaller, kernels=kernels), config, NHD)
    assert decoded(loop, blocks) == expected


# A model whose second layer has no keys and values of its own.

VOCAB, HIDDEN, HEADS, DIM = 16, 8, 2, 4
Carried = tuple[Tensor, ...]


def embed(
    piece: Piece, weights: Tensor, carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    assert inputs.input_ids is not None
    return (kernels.embed(weights, inputs.input_ids),)


def heads(piece: Piece, weights: Any, carried: Carried, inputs: ModelInputs, *, kernels: Kernels) -> Carried:
    """Queries, and keys and values: its own, or those of the layer that has made some."""
    hidden, *shared = carried
    q = kernels.linear(hidden, weights["q"], None).unflatten(-1, (HEADS, DIM))
    if not shared:
        shared = [kernels.linear(hidden, weights[name], None).unflatten(-1, (1, DIM)) for name in ("k", "v")]
    return hidden, q, *shared


def attend(
    piece: Piece,
    weights: Any,
    carried: Carried,
    inputs: ModelInputs,
    kv: Carried,
    metadata: AttentionMetadata,
    *,
    kernels: Kernels,
) -> tuple[Carried, Carried]:
    hidden, q, k, v = carried
    group = metadata.groups[piece.group]
    out, cache = kernels.attend(
        q, k, v, kv[0], metadata.query_start_loc, metadata.seq_lens, group.block_table, group.slot_mapping,
        max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len, scale=DIM**-0.5,
    )  # fmt: skip
    return (hidden, out, k, v), (cache,)


def add(piece: Piece, weights: Any, carried: Carried, inputs: ModelInputs, *, kernels: Kernels) -> Carried:
    hidden, out, k, v = carried
    return torch.tanh(hidden + kernels.linear(out.flatten(-2), weights["o"], None)), k, v


def last(piece: Piece, weights: Any, carried: Carried, inputs: ModelInputs, *, kernels: Kernels) -> Carried:
    return (carried[0],)


def head(piece: Piece, weights: Any, carried: Carried, inputs: Any, *, kernels: Kernels) -> Carried:
    return (kernels.linear(carried[0], weights, None),)


def sharing_model() -> tuple[Model, Params]:
    """Two layers; the second's attention names the KV layer of the first."""
    generator = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layers = (
        {"q": weight(HEADS * DIM, HIDDEN), "k": weight(DIM, HIDDEN), "v": weight(DIM, HIDDEN),
         "o": weight(HIDDEN, HEADS * DIM)},
        {"q": weight(HEADS * DIM, HIDDEN), "o": weight(HIDDEN, HEADS * DIM)},
    )  # fmt: skip
    pieces = [Piece("embed", embed, ("embed",))]
    for i in range(2):
        path = ("layers", i)
        pieces += [
            Piece(f"{i}.heads", heads, path),
            Piece(f"{i}.attend", attend, path, layers=(0,)),
            Piece(f"{i}.add", add, path),
        ]
    model = Model(
        name="sharing",
        pieces=(*pieces, Piece("last", last)),
        head=Piece("head", head, ("head",)),
        kv_layers=(KVLayerSpec(num_kv_heads=1, head_dim=DIM),),
        vocab_size=VOCAB,
        max_position_embeddings=64,
    )
    return model, Params({"embed": weight(VOCAB, HIDDEN), "layers": layers, "head": weight(VOCAB, HIDDEN)})


def continued(params: Params, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    """Greedy tokens, each from a full pass over plain matrices."""
    tree, tokens = params.tree, list(prompt)
    for _ in range(num_tokens):
        hidden = tree["embed"][tokens]
        keys, values = (hidden @ tree["layers"][0][name].T for name in ("k", "v"))
        hides = torch.ones(len(tokens), len(tokens)).triu(1).bool()
        for layer in tree["layers"]:
            parts = []
            for query in (hidden @ layer["q"].T).split(DIM, dim=-1):
                scores = (query @ keys.T * DIM**-0.5).masked_fill(hides, float("-inf"))
                parts.append(scores.softmax(-1) @ values)
            hidden = torch.tanh(hidden + torch.cat(parts, dim=-1) @ layer["o"].T)
        tokens.append(int((hidden[-1] @ tree["head"].T).argmax()))
    return tuple(tokens[len(prompt) :])


@examples(0.1)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=11), min_size=1, max_size=4),
    st.integers(3, 20),
    st.booleans(),
)
def test_a_layer_may_read_the_keys_and_values_of_another(
    prompts: list[list[int]], budget: int, captured: bool
) -> None:
    """It takes no cache of its own, and gives what full passes without a cache give: chunked, batched, captured."""
    model, params = sharing_model()
    wanted = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    api = FakeGraphs() if captured else None
    with Engine(
        (model, params), dtype=torch.float64, kv_cache_bytes=64 * 2**10, block_size=4, max_model_len=32,
        max_num_reqs=4, max_num_batched_tokens=budget, graph_api=api,
    ) as own:  # fmt: skip
        results = own.generate(prompts, wanted, progress=False)
        assert len(own._turns.now.leased.value.kv) == 1
    assert [r.token_ids for r in results] == [continued(params, prompt, 6) for prompt in prompts]
