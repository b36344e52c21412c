"""Hugging Face modules as models of one piece."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from purestep.kernels.reference import reference
from purestep.pure.errors import ModelLoadError
from purestep.pure.forward import model_forward
from purestep.pure.models.module import module_tree
from purestep.pure.records.params import Params
from purestep.state.loading.load import load_model
from purestep.state.loading.transformers_module import load_transformers_module, transformers_model
from tests.pure.models.families import SHAPE, random_ids
from tests.pure.models.paging import empty_cache, lay_out, logits_of, paging, whole

LENGTHS = [13, 5]
CHUNKED = [[(0, 0, 5)], [(1, 0, 5), (0, 5, 6)], [(0, 6, 13)]]
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "gemma2, caps and a window in every other layer": (
        "Gemma2",
        {"head_dim": 24, "query_pre_attn_scalar": 24, **CAPS},
    ),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "granite, scaled logits": ("Granite", {"logits_scaling": 3.0}),
}


def built(kind: str, **changes: Any) -> Any:
    name, own = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**(SHAPE | own | changes))
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [whole(LENGTHS), CHUNKED], ids=["whole", "chunked"])
def test_paged_equals_its_own_forward(kind: str, steps: list[list[tuple[int, int, int]]]) -> None:
    """Windows, soft caps, scales of attention and of logits: all the module's own."""
    module, ids = built(kind), random_ids(LENGTHS)
    model, params = transformers_model(module), Params(tree=module_tree(module))
    found = logits_of(model, params, ids, steps, paging(LENGTHS), torch.float32)
    for got, i in zip(found, ids, strict=True):
        with torch.no_grad():
            want = module(i[None]).logits[0]
        assert (got - want).abs().max() < 2e-5 * want.abs().max()


def test_windows_are_seen() -> None:
    """Each layer's cache knows its window, as the module passes it to attention."""
    layers = transformers_model(built("gemma2, caps and a window in every other layer")).kv_layers
    assert [layer.sliding_window for layer in layers] == [4, None]
    assert [(layer.num_kv_heads, layer.head_dim) for layer in layers] == [(2, 24)] * 2


def test_the_module_is_left_as_it_is() -> None:
    """It trains on with its own attention, and its parameters are ours: a step of an optimiser is seen."""
    module, (ids,) = built("llama"), random_ids([7])
    module.train()
    model, params = transformers_model(module), Params(tree=module_tree(module))

    def run() -> Tensor:
        return logits_of(model, params, [ids], whole([7]), paging([7]), torch.float32)[0]

    before = run()
    module(ids[None]).logits.square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=1e-2).step()
    assert module.training and module.config._attn_implementation == "eager"
    assert (run() - before).abs().max() > 1e-3
    assert torch.allclose(run(), module(ids[None]).logits[0].detach(), atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2, caps and a window in every other layer"])
def test_gradients_and_stacked_parameters(kind: str) -> None:
    """torch.func.grad is autograd's gradient; vmap over three trees is three runs."""
    module, (ids,), where = built(kind), random_ids([9]), paging([9])
    model, params = transformers_model(module), Params(tree=module_tree(module))

    def logprob(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)[torch.arange(8), ids[1:]].sum()

    def loss(params: Params) -> Tensor:
        return logprob(logits_of(model, params, [ids], whole([9]), where, torch.float32)[0])

    found = torch.func.grad(loss)(params).tree
    logprob(module(ids[None]).logits[0]).backward()
    for name, parameter in module.named_parameters():
        assert (found[name] - parameter.grad).abs().max() <= 1e-4 * parameter.grad.abs().max(), name
    sets = [tree_map(lambda x, f=f: x * f, params) for f in (1.0, 0.9, 1.1)]
    stacked = tree_map(lambda *x: torch.stack(x), *sets)
    assert torch.allclose(torch.func.vmap(loss)(stacked), torch.stack([loss(p) for p in sets]), rtol=1e-4)


@pytest.mark.usefixtures("unchecked_records")
def test_traced_and_compiled() -> None:
    """No mask is built, so nothing looks at positions: make_fx and a full graph take it."""
    module, ids, where = built("qwen3"), random_ids(LENGTHS), paging(LENGTHS)
    model, params = transformers_model(module), Params(tree=module_tree(module))
    inputs, metadata = lay_out(ids, whole(LENGTHS)[0], where)
    kv = empty_cache(model, where, torch.float32)

    def run(params: Params, kv: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        return model_forward(model, params, inputs, kv, metadata, kernels=reference)

    expected, _ = run(params, kv)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for way in (make_fx(run)(params, kv), compiled):
        assert torch.allclose(way(params, kv)[0], expected, atol=1e-5)


def test_load_model_takes_pieces_where_it_can() -> None:
    """A module of the dense family becomes pieces, any other one piece; ids of the end come from its config."""
    assert len(load_model(built("llama")).model.pieces) == 8
    loaded = load_model(built("granite, scaled logits", eos_token_id=[5, 6]), dtype=torch.float64)
    assert [piece.name for piece in loaded.model.pieces] == ["module"]
    assert loaded.eos_token_ids == (5, 6) and loaded.params.tree["lm_head.weight"].dtype == torch.float64


def test_what_can_not_be_paged_is_refused() -> None:
    """Encoders and decoders, layers with other masks, attention with sinks, modules that are none of Hugging Face's."""
    bart = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=50,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
        )
    )
    with pytest.raises(ModelLoadError, match="BartForConditionalGeneration: is_encoder_decoder = True"):
        load_model(bart)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "head_dim": 8,
    }
    sinks = transformers.GptOssForCausalLM(transformers.GptOssConfig(**(SHAPE | sizes)))
    with pytest.raises(ModelLoadError, match="GptOssAttention: attention sinks"):
        load_model(sinks)
    chunked = built("granite, scaled logits")
    chunked.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(ModelLoadError, match="layers of type chunked_attention"):
        load_model(chunked)
    with pytest.raises(ModelLoadError, match=r"Linear is no Hugging Face model.*module_model"):
        load_model(nn.Linear(2, 2))


def test_parameters_elsewhere_are_named() -> None:
    """Nothing is moved behind its owner's back."""
    with pytest.raises(
        ModelLoadError, match=r"parameter model\.embed_tokens\.weight is on cpu, meta was asked for"
    ):
        load_transformers_module(built("granite, scaled logits"), dtype=None, device=torch.device("meta"))
