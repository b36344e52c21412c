"""Between Hugging Face's names and fused leaves."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from purestep.kernels.record import replace
from purestep.pure.errors import ModelLoadError
from purestep.pure.models.names import from_hf_names, hf_shapes, to_hf_views
from tests.pure.models.families import FAMILIES, both, ours, random_ids, theirs
from tests.pure.models.paging import logits_of, paging, whole


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_transformers(family: str) -> None:
    """Every tensor of the family, by name and shape; a tied head is not counted."""
    module, model, _ = both(family)
    wanted = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    assert hf_shapes(model.config) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_views_undo_fusing(family: str) -> None:
    """Every tensor comes back, equal, and as a view: no storage but that of the leaves."""
    module, model, params = both(family)
    views = to_hf_views(model.config, params.tree)
    own = dict(module.named_parameters())
    assert views.keys() == own.keys()
    assert all(torch.equal(views[name], own[name]) for name in own)
    storages = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(params.tree)}
    assert {view.untyped_storage().data_ptr() for view in views.values()} <= storages


def test_a_trainers_module_can_share_storage() -> None:
    """With our views as its parameters, what an optimiser does to the module is seen by the next forward pass."""
    module, (ids,) = theirs("qwen2"), random_ids([5])
    model, params = ours(module)
    for name, view in to_hf_views(model.config, params.tree).items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, torch.nn.Parameter(view))
    before = logits_of(model, params, [ids], whole([5]), paging([5]), torch.float32)[0]
    module(ids[None]).logits.square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=1e-3).step()
    after = logits_of(model, params, [ids], whole([5]), paging([5]), torch.float32)[0]
    assert (after - before).abs().max() > 1e-3
    assert torch.allclose(after, module(ids[None]).logits[0].detach(), atol=1e-4)


def test_a_missing_tensor_is_named() -> None:
    """The message says which, and how much there is."""
    module, model, _ = both("llama")
    tensors = dict(module.state_dict())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        ModelLoadError,
        match=r"here: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing; there are 20 tensors",
    ):
        from_hf_names(model.config, tensors, source="here")


def test_more_layers_than_can_be_counted_are_refused_at_once() -> None:
    """The first tensor that is not there is named, however many would be asked for after it."""
    module, model, _ = both("llama")
    with pytest.raises(ModelLoadError, match=r"layers\.2\.input_layernorm.*asks for 1000000000000 layers"):
        from_hf_names(replace(model.config, num_layers=10**12), dict(module.state_dict()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "4 query heads over 3 key-value heads"),
        ({"head_dim": 15}, "heads of size 15; rotation takes pairs"),
        ({"head_dim": 0}, "heads of size 0"),
    ],
)
def test_heads_that_can_not_be_are_refused(changes: dict[str, int], message: str) -> None:
    """Before a tensor is looked at."""
    config = both("llama")[1].config
    config = replace(config, attention=replace(config.attention, **changes))
    with pytest.raises(ModelLoadError, match=f"here: its config has {message}.*: correct the config"):
        from_hf_names(config, {}, source="here")


def test_a_misshapen_tensor_is_named() -> None:
    """The message says which, its shape, and the shape that was wanted."""
    module, model, _ = both("llama")
    tensors = module.state_dict() | {"model.norm.weight": torch.zeros(63)}
    with pytest.raises(
        ModelLoadError, match=r"model\.norm\.weight has shape \(63,\), its config asks for \(64,\)"
    ):
        from_hf_names(model.config, tensors)


def test_an_unexpected_tensor_is_named() -> None:
    """A tensor without a place is refused: the model is not what its config says."""
    module, model, _ = both("llama")
    tensors = module.state_dict() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias has no place in this model"):
        from_hf_names(model.config, tensors)


def test_what_follows_from_the_rest_may_be_there() -> None:
    """Old checkpoints hold rotary buffers, and some tied ones their head as well."""
    module, model, params = both("llama, wide heads, tied")
    tensors = module.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(12)}
    assert "lm_head.weight" in tensors
    tree = from_hf_names(model.config, tensors)
    assert "head" not in tree
    assert torch.equal(tree["layers"][1]["qkv"], params.tree["layers"][1]["qkv"])
