"""`initialize_kv_cache`: the memory that a KV cache configuration asks for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from purestep.pure.kv_config import NHD, check_kv_cache_config, kv_cache_shape, kv_cache_strides
from purestep.pure.records.kv_config import KVCacheConfig


def initialize_kv_cache(
    config: KVCacheConfig, *, device: torch.device | str = "cpu", order: Sequence[int] = NHD
) -> tuple[Tensor, ...]:
    """Every layer's cache, zeros, by layer: [kernel blocks, 2, tokens of a kernel block, KV heads, dim].

    One allocation for each tensor of the configuration; its layers are views, laid out in memory as `order` says.
    Layers that share a tensor see the same bytes: a block is theirs in turn, never at once.

    Raises:
        KVCacheConfigError: a configuration that does not give every layer a place of its own, or an order that does
            not keep blocks together.
    Source: vllm/v1/worker/gpu_model_runner.py initialize_kv_cache.
    """
    check_kv_cache_config(config)
    shapes = [kv_cache_shape(config, layer) for layer in range(len(config.specs))]
    strides = [kv_cache_strides(shape, order) for shape in shapes]
    caches: dict[int, Tensor] = {}
    for tensor in config.tensors:
        memory = torch.zeros(tensor.num_bytes, dtype=torch.uint8, device=device)
        for layer in tensor.shared_by:
            words = memory.view(config.specs[layer].dtype)
            caches[layer] = words.as_strided(shapes[layer], strides[layer])
    return tuple(caches[layer] for layer in range(len(config.specs)))
