"""Tiny random models of each dense family, built by transformers."""

import functools
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from purestep.pure.models.llama import llama
from purestep.pure.models.model import Model
from purestep.pure.models.names import from_hf_names
from purestep.pure.records.params import Params
from purestep.state.loading.hf_config import hf_model_config

WINDOW = 6
SHAPE = {
    "vocab_size": 83,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, all heads their own": ("Llama", {"num_key_value_heads": 4}),
    "llama, wide heads, tied": ("Llama", {"head_dim": 24, "tie_word_embeddings": True}),
    "llama 3 scaling": ("Llama", {"rope_parameters": LLAMA_3}),
    "llama with biases": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral without window": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with a window in its second layer": ("Qwen2", QWEN_WINDOW),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3 with biases, tied": (
        "Qwen3",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


class Widened(TorchFunctionMode):
    """Under it, whatever asks for float32 gets float64.

    transformers computes norms, softmax and rotary angles in float32 whatever the model's dtype; this lifts
    them, so that in float64 its mathematics can be compared to more than seven digits.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def theirs(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """transformers' model with every parameter random, norms and biases too. For float64, call it under `Widened`."""
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SHAPE | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = getattr(transformers, f"{name}ForCausalLM")(config)
        for key, parameter in module.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.data = torch.randn_like(parameter) * 0.3 + ("norm" in key)
    return module.to(dtype).eval()


def ours(module: nn.Module) -> tuple[Model, Params]:
    """The same model in pieces."""
    config = hf_model_config(module.config.to_dict(), source="config")
    tensors = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    return llama(config), Params(tree=from_hf_names(config, tensors))


@functools.cache
def both(family: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Model, Params]:
    """Theirs and ours, built once: property tests only read them."""
    module = theirs(family, dtype)
    return module, *ours(module)


def random_ids(lengths: list[int], seed: int = 0) -> list[Tensor]:
    """Random token ids of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, SHAPE["vocab_size"], (length,), generator=generator) for length in lengths]
