"""Laws of the forward pass as a function of its parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from purestep.kernels.reference import reference
from purestep.pure.forward import compute_logits, model_forward, preprocess
from purestep.pure.models.model import Model
from purestep.pure.models.names import to_hf_views
from purestep.pure.record import replace
from purestep.pure.records.inputs import StepInputs
from purestep.pure.records.params import Params
from tests.laws import assert_pure, equal
from tests.pure.models.families import Widened, both, ours, random_ids, theirs
from tests.pure.models.paging import empty_cache, lay_out, logits_of, paging, whole

LENGTHS = [11, 4]
CHUNKED = [[(0, 0, 5)], [(1, 0, 4), (0, 5, 6)], [(0, 6, 11)]]


def logprob(logits: Tensor, ids: Tensor) -> Tensor:
    """The sum of the log-probabilities of a sequence's tokens, given those before them."""
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].sum()


def autograd(module: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    logprob(module(ids[None]).logits[0], ids).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    "family", ["llama 3 scaling", "llama, wide heads, tied", "mistral", "qwen2", "qwen3"]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("steps", [whole(LENGTHS), CHUNKED], ids=["whole", "chunked"])
def test_gradients_are_those_of_transformers(
    family: str, dtype: torch.dtype, tolerance: float, steps: list[list[tuple[int, int, int]]]
) -> None:
    """Of a packed sequence's log-probability, through the paged cache, relative to each gradient's largest part."""
    ids = random_ids(LENGTHS)
    if dtype is torch.float64:
        with Widened():
            module = theirs(family, dtype)
            expected = autograd(module, ids[0])
    else:
        module = theirs(family, dtype)
        expected = autograd(module, ids[0])
    model, params = ours(module)

    def loss(params: Params) -> Tensor:
        return logprob(logits_of(model, params, ids, steps, paging(LENGTHS), dtype)[0], ids[0])

    found = to_hf_views(model.config, torch.func.grad(loss)(params).tree)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert (found[name] - want).abs().max() <= tolerance * want.abs().max(), name


@pytest.mark.parametrize("family", ["llama", "qwen3 with biases, tied"])
def test_three_parameter_sets_at_once_are_three_runs(family: str) -> None:
    """vmap over stacked parameters gives what three calls give, chunks and cache included."""
    ids = random_ids(LENGTHS)
    models = [ours(theirs(family, torch.float64, seed)) for seed in range(3)]
    model, sets, where = models[0][0], [params for _, params in models], paging(LENGTHS)

    def run(params: Params) -> tuple[Tensor, ...]:
        return tuple(logits_of(model, params, ids, CHUNKED, where, torch.float64))

    together = torch.func.vmap(run)(tree_map(lambda *leaves: torch.stack(leaves), *sets))
    for i, params in enumerate(sets):
        for got, want in zip(together, run(params), strict=True):
            assert (got[i] - want).abs().max() < 1e-11
    assert not torch.allclose(together[0][0], together[0][1])


class Pass:
    """One packed forward pass with a cache that holds something, as a function of tensors."""

    def __init__(self, family: str, max_query_len: int) -> None:
        self.ids = random_ids(LENGTHS)
        _, self.model, self.params = both(family)
        where = paging(LENGTHS)
        first, metadata = lay_out(self.ids, [(0, 0, 5), (1, 0, 3)], where)
        kv = empty_cache(self.model, where, torch.float32)
        self.kv = model_forward(self.model, self.params, first, kv, metadata, kernels=reference)[1]
        chunks = [(0, 5, 5 + max_query_len), (1, 3, 4)]
        self.inputs, self.metadata = lay_out(self.ids, chunks, where, num_padding=1)

    def __call__(self, params: Params, kv: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        model: Model = self.model
        hidden, kv = model_forward(model, params, self.inputs, kv, self.metadata, kernels=reference)
        wanted = self.metadata.query_start_loc[1:] - 1
        return compute_logits(model, params, hidden, wanted, kernels=reference), kv


@pytest.mark.usefixtures("unchecked_records")
@pytest.mark.parametrize("max_query_len", [1, 4], ids=["decode", "prefill"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("family", ["llama 3 scaling", "qwen3"])
def test_compiles_in_one_graph(family: str, backend: str, max_query_len: int) -> None:
    """torch.compile takes the whole pass, records and kernels and all, and changes nothing but roundings."""
    run = Pass(family, max_query_len)
    torch._dynamo.reset()
    compiled = torch.compile(lambda params, kv: run(params, kv), fullgraph=True, backend=backend)
    assert torch.allclose(compiled(run.params, run.kv)[0], run(run.params, run.kv)[0], atol=1e-5)


@pytest.mark.usefixtures("unchecked_records")
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_traces(family: str) -> None:
    """make_fx takes it too, and the trace serves other parameters."""
    run = Pass(family, 4)
    traced = make_fx(run)(run.params, run.kv)
    other = tree_map(lambda leaf: leaf * 1.1, run.params)
    for params in (run.params, other):
        assert torch.allclose(traced(params, run.kv)[0], run(params, run.kv)[0], atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_forward_is_pure(family: str) -> None:
    """Inputs, the cache among them, are bit for bit what they were; a second call gives the same."""
    run = Pass(family, 4)
    assert_pure(model_forward, run.model, run.params, run.inputs, run.kv, run.metadata, kernels=reference)
    hidden, _ = model_forward(run.model, run.params, run.inputs, run.kv, run.metadata, kernels=reference)
    assert_pure(compute_logits, run.model, run.params, hidden, torch.tensor([0, 3]), kernels=reference)


def test_logits_are_computed_for_chosen_rows_alone() -> None:
    """The head sees the gathered rows, in their order, once for each time they are named."""
    run = Pass("llama", 4)
    hidden, _ = model_forward(run.model, run.params, run.inputs, run.kv, run.metadata, kernels=reference)
    seen = []

    def call(piece, weights, carried, inputs, *, kernels):  # type: ignore[no-untyped-def]
        seen.append(carried[0])
        return piece.function(piece, weights, carried, inputs, kernels=kernels)

    wanted = torch.tensor([4, 0, 4])
    logits = compute_logits(run.model, run.params, hidden, wanted, kernels=reference, call=call)
    assert equal(seen, [hidden[wanted]])
    assert torch.equal(logits, hidden[wanted] @ run.params.tree["head"].T)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3 with biases, tied"])
@given(st.lists(st.integers(0, 5), max_size=8))
def test_wanted_tokens_have_the_hidden_states_that_they_have_among_all(
    family: str, wanted: list[int]
) -> None:
    """In their order, once for each time they are named; keys and values are written of every token all the same."""
    run, rows = Pass(family, 4), torch.tensor(wanted, dtype=torch.int64)
    every, kv = model_forward(run.model, run.params, run.inputs, run.kv, run.metadata, kernels=reference)
    inputs = replace(run.inputs, wanted=rows)
    hidden, written = model_forward(run.model, run.params, inputs, run.kv, run.metadata, kernels=reference)
    assert torch.allclose(hidden, every[rows], rtol=1e-5, atol=1e-5)
    assert equal(written, kv)


def test_preprocess_gives_ids_or_embeddings() -> None:
    """Ids as they are; or, if embeddings are given, those and no ids."""
    none = torch.zeros(0, dtype=torch.int64)
    inputs = StepInputs(
        input_ids=torch.tensor([3, 5]),
        positions=torch.tensor([0, 1]),
        slot_mapping=torch.tensor([[4, 5]]),
        seq_lens=torch.tensor([2]),
        query_start_loc=torch.tensor([0, 2]),
        logits_indices=none,
        discard=torch.tensor([False]),
    )
    plain = assert_pure(preprocess, inputs)
    assert plain.input_ids is inputs.input_ids and plain.inputs_embeds is None
    given = preprocess(inputs, inputs_embeds=torch.ones(2, 4))
    assert given.input_ids is None and given.inputs_embeds is not None
    assert given.positions is inputs.positions
