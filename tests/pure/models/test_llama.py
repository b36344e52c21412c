"""The dense Llama family against transformers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.record import replace
from purestep.kernels.reference import reference
from purestep.pure.errors import InvalidParameterError
from purestep.pure.forward import model_forward
from purestep.pure.models.config import AttentionConfig
from purestep.pure.models.llama import llama
from purestep.pure.records.inputs import ModelInputs
from tests.laws import assert_pure
from tests.profiles import examples
from tests.pure.models.families import FAMILIES, WINDOW, Widened, both, ours, random_ids, theirs
from tests.pure.models.paging import chunkings, empty_cache, lay_out, logits_of, paging, whole

LENGTHS = [3 * WINDOW + 1, 7, 1]  # the first is longer than any window


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_logits_are_those_of_transformers(family: str) -> None:
    """Within 1e-9, once transformers computes in float64 throughout."""
    ids = random_ids(LENGTHS)
    with Widened(), torch.no_grad():
        module = theirs(family, torch.float64)
        expected = [module(i[None]).logits[0] for i in ids]
    model, params = ours(module)
    for got, want in zip(
        logits_of(model, params, ids, whole(LENGTHS), paging(LENGTHS), torch.float64), expected, strict=True
    ):
        assert got.dtype == torch.float64
        assert (got - want).abs().max() < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
@examples(0.08)  # eleven families, and each example runs transformers too
@given(data=st.data())
def test_float32_logits_are_those_of_transformers(family: str, data: st.DataObject) -> None:
    """Within 2e-5 of the largest logit, whole, chunked or packed, over blocks of any size in any order."""
    lengths = data.draw(st.lists(st.integers(1, 3 * WINDOW), min_size=1, max_size=3))
    ids = random_ids(lengths, data.draw(st.integers(0, 1000)))
    module, model, params = both(family)
    where = paging(
        lengths, block_size=data.draw(st.sampled_from([1, 3, 16])), seed=data.draw(st.integers(0, 1000))
    )
    steps = data.draw(chunkings(lengths))
    found = logits_of(
        model, params, ids, steps, where, torch.float32, num_padding=data.draw(st.integers(0, 3))
    )
    for got, i in zip(found, ids, strict=True):
        with torch.no_grad():
            want = module(i[None]).logits[0]
        assert (got - want).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.parametrize(
    "family", ["llama 3 scaling", "mistral", "qwen2 with a window in its second layer", "qwen3"]
)
@examples(0.2)
@given(data=st.data())
def test_chunked_and_packed_equal_whole(family: str, data: st.DataObject) -> None:
    """In float64, whatever the chunks, the company, the blocks and the padding, logits agree to rounding."""
    ids = random_ids(LENGTHS)
    _, model, params = both(family, torch.float64)
    expected = logits_of(model, params, ids, whole(LENGTHS), paging(LENGTHS), torch.float64)
    where = paging(LENGTHS, block_size=data.draw(st.integers(1, 9)), seed=data.draw(st.integers(0, 1000)))
    steps = data.draw(chunkings(LENGTHS))
    num_padding = data.draw(st.integers(0, 3))
    found = logits_of(model, params, ids, steps, where, torch.float64, num_padding=num_padding)
    assert all((a - b).abs().max() < 1e-11 for a, b in zip(found, expected, strict=True))


def test_a_window_is_felt() -> None:
    """The comparison above could not pass with the window ignored: beyond it, logits differ; within it, not."""
    ids = random_ids([3 * WINDOW])
    module = theirs("mistral", torch.float64)
    model, params = ours(module)
    module.config.sliding_window = None
    wide, _ = ours(module)
    windowed, full = (
        logits_of(m, params, ids, whole([3 * WINDOW]), paging([3 * WINDOW]), torch.float64)[0]
        for m in (model, wide)
    )
    difference = (windowed - full).abs().amax(-1)
    assert difference[:WINDOW].max() < 1e-12 < 1e-3 < difference[WINDOW:].min()


def test_bfloat16_stays_near_float32() -> None:
    """Narrow parameters give narrow hidden states, and logits in float32."""
    ids = random_ids([9])
    module = theirs("llama")
    expected = logits_of(*ours(module), ids, whole([9]), paging([9]), torch.float32)[0]
    model, params = ours(module.to(torch.bfloat16))
    got = logits_of(model, params, ids, whole([9]), paging([9]), torch.bfloat16)[0]
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


def test_pieces_are_in_order_and_pure() -> None:
    """embed, (before, attention, after) a layer, norm; each leaves what it was given as it was."""
    ids = random_ids([5, 2])
    model, params = ours(theirs("qwen3"))
    names: list[str] = []

    def call(piece, *arguments, kernels):  # type: ignore[no-untyped-def]
        names.append(piece.name)
        return assert_pure(piece.function, piece, *arguments, kernels=kernels)

    logits_of(model, params, ids, whole([5, 2]), paging([5, 2]), torch.float32, call=call)
    layer = ("before", "attention", "after")
    assert names == ["embed", *(f"layers.{i}.{part}" for i in range(2) for part in layer), "norm"]
    assert [piece.layers for piece in model.pieces if piece.is_attention] == [(0,), (1,)]


def test_models_are_values() -> None:
    """Two models of one config are equal, hash alike, and differ from another config's."""
    model, _ = ours(theirs("qwen3"))
    assert model == llama(model.config) and hash(model) == hash(llama(model.config))
    assert model != ours(theirs("qwen2"))[0]


def test_layers_use_the_blocks_of_their_group() -> None:
    """A layer in group 1 reads and writes where group 1's table says, and its neighbours elsewhere."""
    ids = random_ids([6])
    one_group, params = ours(theirs("mistral", torch.float64))
    two_groups = llama(one_group.config, groups=(0, 1))
    assert [layer.group for layer in two_groups.kv_layers] == [0, 1]
    near, far = paging([6], seed=1), paging([6], seed=2)
    (inputs, metadata), (_, other) = lay_out(ids, [(0, 0, 6)], near), lay_out(ids, [(0, 0, 6)], far)
    kv = empty_cache(one_group, near, torch.float64)
    want, kv_one = model_forward(one_group, params, inputs, kv, metadata, kernels=reference)
    both = replace(metadata, groups=(metadata.groups[0], other.groups[0]))
    got, kv_two = model_forward(two_groups, params, inputs, kv, both, kernels=reference)
    assert torch.equal(got, want)
    written = [kv[1].isfinite().flatten(1).any(1).nonzero().flatten().tolist() for kv in (kv_one, kv_two)]
    assert [sorted(set(w)) for w in written] == [sorted(p.block_table[0, :2].tolist()) for p in (near, far)]


def test_given_embeddings_take_the_place_of_ids() -> None:
    """Embeddings of the ids, given directly, give the same hidden states."""
    ids = random_ids([6])
    model, params = ours(theirs("llama"))
    inputs, metadata = lay_out(ids, [(0, 0, 6)], paging([6]))
    embedded = ModelInputs(
        input_ids=None, positions=inputs.positions, inputs_embeds=params.tree["embed"][inputs.input_ids]
    )
    kv = empty_cache(model, paging([6]), torch.float32)
    hidden, given_hidden = (
        model_forward(model, params, i, kv, metadata, kernels=reference)[0] for i in (inputs, embedded)
    )
    assert torch.equal(hidden, given_hidden)


@pytest.mark.parametrize("windows", [(0,), (None, -1)])
def test_a_window_that_holds_nothing_is_refused(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(InvalidParameterError, match=r"sliding_window=\(.*so 1 is the least"):
        AttentionConfig(2, 1, 8, sliding_window=windows)
