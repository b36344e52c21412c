"""What is measured: a model from files, or a named shape with random weights."""

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import torch

from purestep.pure.errors import InvalidParameterError
from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.state.loading.load import load_model
from purestep.state.loading.loaded import LoadedModel
from purestep.state.setup import usable_device

DTYPES = ("float32", "bfloat16", "float16")


def _shape(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocab_size: int,
    *,
    tied: bool,
    qk_norm: bool = False,
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        attention=AttentionConfig(num_heads=num_heads, num_kv_heads=8, head_dim=head_dim, qk_norm=qk_norm),
        rope=RopeConfig(theta=500000.0),
        rms_norm_eps=1e-5,
        tied_embeddings=tied,
        max_position_embeddings=131072,
    )


SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": tiny_config(vocab_size=512, hidden_size=128, num_layers=4, max_position_embeddings=4096),
        "0.6B": _shape(1024, 28, 16, 128, 3072, 151936, tied=True, qk_norm=True),  # Qwen3-0.6B
        "1B": _shape(2048, 16, 32, 64, 8192, 128256, tied=True),  # Llama-3.2-1B
        "8B": _shape(4096, 32, 32, 128, 14336, 128256, tied=False),  # Llama-3.1-8B
    }
)


@attrs.frozen(kw_only=True)
class Subject:
    """A model, and where it runs: plain values, so that a fresh process can be told of it."""

    model: str | None = None  # a folder, GGUF file or hub id; with neither model nor shape: the default model
    shape: str | None = None  # a name in SHAPES
    device: str = "cpu"
    dtype: str = "float32"

    def __attrs_post_init__(self) -> None:
        if self.model is not None and self.shape is not None:
            raise InvalidParameterError(
                f"model={self.model!r} and shape={self.shape!r}: one thing is measured at a time; give one of them"
            )
        if self.shape is not None and self.shape not in SHAPES:
            raise InvalidParameterError(f"shape={self.shape!r}: the shapes are {', '.join(SHAPES)}")
        if self.dtype not in DTYPES:
            raise InvalidParameterError(f"dtype={self.dtype!r}: give one of {', '.join(DTYPES)}")
        usable_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of weights, keys and values."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def is_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return torch.device(self.device).type == "cuda"


def load(subject: Subject) -> LoadedModel:
    """The model with its weights on its device; those of a named shape are random.

    Raises:
        ModelLoadError: files that can not be loaded.
    """
    if subject.shape is None:
        return load_model(subject.model, dtype=subject.torch_dtype, device=subject.device)
    config = SHAPES[subject.shape]
    params = random_params(config, dtype=subject.torch_dtype, device=subject.device)
    return LoadedModel(name=subject.shape, model=llama(config), params=params)
