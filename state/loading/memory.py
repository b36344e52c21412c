"""A model whose weights are in memory already."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from purestep.pure.errors import ModelLoadError
from purestep.pure.models.config import ModelConfig
from purestep.pure.models.llama import llama
from purestep.pure.models.names import check_shapes, fuse
from purestep.pure.records.params import Params
from purestep.state.loading.hf_config import hf_model_config, model_type
from purestep.state.loading.loaded import LoadedModel
from purestep.state.loading.transformers_module import load_transformers_module


def load_weights(
    weights: Mapping[str, Tensor],
    config: ModelConfig | Mapping[str, Any] | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    name: str = "weights",
) -> LoadedModel:
    """A model from tensors by Hugging Face name; `config` is ours, or the content of a config.json.

    Fused leaves are copies; to share storage with a trainer's module, give it `to_hf_views` of them.

    Raises:
        ModelLoadError: an unknown architecture, a missing, unexpected or misshapen tensor.
    """
    if config is None:
        raise ModelLoadError("weights in memory need config=: a ModelConfig, or the content of a config.json")
    if not isinstance(config, ModelConfig):
        config = hf_model_config(config, source="config")
    check_shapes(config, {key: tuple(tensor.shape) for key, tensor in weights.items()}, source=name)
    tree = fuse(config, lambda key: weights[key].detach().to(device=device, dtype=dtype))
    return LoadedModel(
        name=name,
        model=llama(config, name=name),
        params=Params(tree=tree),
        eos_token_ids=config.eos_token_ids,
    )


def load_module(module: nn.Module, *, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    """A model from a Hugging Face causal LM: pieces if it is of the dense Llama family, else one module.

    Raises:
        ModelLoadError: a module that is no Hugging Face causal LM, or whose attention can not be paged.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise ModelLoadError(
            f"{type(module).__name__} is no Hugging Face model (it has no config); "
            "any other module becomes a model by purestep.pure.models.module.module_model"
        )
    described = config.to_dict() | {"architectures": [type(module).__name__]}
    name = type(module).__name__
    if model_type(described, source=f"{name}.config") is None:
        return load_transformers_module(module, dtype=dtype, device=device)
    return load_weights(module.state_dict(), described, dtype=dtype, device=device, name=name)
