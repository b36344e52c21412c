"""Random parameters, to try things with and to train from."""

import torch

from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig
from purestep.pure.models.names import from_hf_names, hf_shapes
from purestep.pure.records.params import Params


def random_params(
    config: ModelConfig,
    *,
    seed: int = 0,
    std: float = 0.02,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Params:
    """Parameters of a model that has learnt nothing: norms of ones, biases of zeros, all else normal with `std`.

    The values are a function of seed, shapes, dtype and device.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device) * std

    tensors = {name: draw(name, shape) for name, shape in hf_shapes(config).items()}
    return Params(from_hf_names(config, tensors))


def tiny_config(
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_position_embeddings: int = 128,
) -> ModelConfig:
    """A Llama small enough to print: four query heads over two key-value heads."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=num_layers,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=hidden_size // 4),
        rope=RopeConfig(),
        rms_norm_eps=1e-5,
        tied_embeddings=True,
        max_position_embeddings=max_position_embeddings,
    )
