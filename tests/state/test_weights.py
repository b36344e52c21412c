"""Parameters that take the place of others, and parameters that lie elsewhere."""

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import InvalidParameterError
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.module import module_model, module_tree
from purestep.pure.record import replace
from purestep.pure.records.params import Params
from purestep.state.engine import Engine
from purestep.state.loading.loaded import LoadedModel
from purestep.state.setup import resolve
from purestep.state.weights import check_alike
from tests.profiles import examples
from tests.state.test_engine import GREEDY, MODEL, PARAMS, PROMPTS

CPU, META = torch.device("cpu"), torch.device("meta")
TREE = random_params(tiny_config(vocab_size=8, hidden_size=8)).tree
REMEDY = "give a tree like engine.params.tree; from_hf_names"


def with_leaf(tree: Any, wanted: str, change: Any) -> Any:
    """The tree with one leaf, named as torch's pytree names it, changed."""
    return pytree.tree_map_with_path(lambda path, x: change(x) if pytree.keystr(path) == wanted else x, tree)


NAMES = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(TREE)]
WRONG = {
    "shape": lambda x: torch.zeros(*x.shape, 2),
    "dtype": lambda x: x.double(),
    "device": lambda x: x.to("meta"),
    "number": lambda x: 1.0,
}


@examples(1)
@given(name=st.sampled_from(NAMES), wrong=st.sampled_from(sorted(WRONG)))
def test_the_leaf_that_differs_is_named(name: str, wrong: str) -> None:
    """Whichever it is, and in whatever it differs."""
    check_alike(TREE, with_leaf(TREE, name, torch.clone))
    with pytest.raises(InvalidParameterError) as raised:
        check_alike(TREE, with_leaf(TREE, name, WRONG[wrong]))
    assert f"parameter {name} is" in str(raised.value) and ": give " in str(raised.value)


def test_the_first_key_that_differs_is_named_with_the_remedy() -> None:
    """One too few, one too many, another kind of container, names of Hugging Face, no tree at all."""
    layers = TREE["layers"]
    cases: list[tuple[Any, str]] = [
        ({key: leaf for key, leaf in TREE.items() if key != "norm"}, r"lack \['norm'\]"),
        (TREE | {"layers": layers[:1]}, r"lack \['layers'\]\[1\]\['input_norm'\]"),
        (TREE | {"head": torch.zeros(1)}, r"have \['head'\], which the model has not"),
        (TREE | {"layers": list(layers)}, "other containers"),
        ({"model.norm.weight": torch.zeros(1)}, r"lack \['embed'\]"),
        (None, r"lack \['embed'\]"),
    ]
    for tree, message in cases:
        with pytest.raises(InvalidParameterError, match=f"{message}.*: {REMEDY}"):
            check_alike(TREE, tree)


def test_weights_in_memory_go_where_the_engine_is() -> None:
    """Floating-point ones in its type, whole numbers as they are; what is there already is not copied."""
    loaded = LoadedModel("tiny", MODEL, PARAMS)
    assert resolve(loaded, dtype=torch.float32, device=CPU, tokenizer=None).params is PARAMS
    assert resolve((MODEL, PARAMS), dtype=torch.float32, device=CPU, tokenizer=None).params is PARAMS
    mixed = Params(
        {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.arange(2)}, version=3
    )
    moved = resolve((MODEL, mixed), dtype=torch.bfloat16, device=META, tokenizer=None).params
    kinds = {name: (leaf.dtype, leaf.device) for name, leaf in moved.tree.items()}
    assert kinds == {"a": (torch.bfloat16, META), "b": (torch.bfloat16, META), "c": (torch.int64, META)}
    assert moved.version == 3
    cast = resolve((MODEL, mixed), dtype=torch.bfloat16, device=CPU, tokenizer=None).params
    assert cast.tree["b"] is mixed.tree["b"]


def test_an_engine_computes_in_its_own_type() -> None:
    """A model that was loaded in another one gives the tokens that it gives when loaded in this one."""
    wide = replace(PARAMS, tree=pytree.tree_map(torch.Tensor.double, PARAMS.tree))
    results = []
    for params in (PARAMS, wide):
        with Engine(LoadedModel("tiny", MODEL, params), kv_cache_bytes=40 * 1024, max_model_len=48) as own:
            assert own.params.tree["embed"].dtype == torch.float32
            results.append([r.token_ids for r in own.generate(PROMPTS, GREEDY, progress=False)])
    assert results[0] == results[1]


def test_a_module_on_another_device_is_refused() -> None:
    """Its parameters could be moved, but not the buffers that it holds beside them."""
    module = torch.nn.BatchNorm1d(2)
    model = module_model(module, kv_layers=(), vocab_size=2, max_position_embeddings=4)
    with pytest.raises(InvalidParameterError, match=r"device='meta': .* lies on cpu: move the module"):
        resolve((model, Params(module_tree(module))), dtype=torch.float32, device=META, tokenizer=None)
