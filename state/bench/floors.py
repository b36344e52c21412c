"""What the device allows: how fast it reads and multiplies, and what a step has to read and multiply at least."""

import math
import statistics
from collections.abc import Callable, Sequence

import attrs
import torch
import torch.utils._pytree as pytree

from purestep.pure.models.config import ModelConfig
from purestep.pure.models.model import KVLayerSpec
from purestep.pure.models.names import hf_shapes
from purestep.pure.records.params import Params
from purestep.state.bench.clocks import Clock

CALLS = {
    "cuda": 8,
    "cpu": 1,
}  # between two looks at the clock: a GPU takes a while to begin and to be found idle
ROUNDS = 3
READ_BYTES = {"cuda": 2**32, "cpu": 2**28}  # far more than any cache holds
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}


@attrs.frozen
class Rates:
    """What the device does at best, as measured here and now."""

    read: float  # bytes per second
    multiply: float  # floating-point operations per second of a square matrix product, sustained


def measure_rates(device: torch.device | str, dtype: torch.dtype, clock: Clock) -> Rates:
    """Both rates; needs memory for 4 GiB (on a CPU 256 MiB) and three square matrices."""
    kind = torch.device(device).type
    return Rates(
        read=read_rate(device, clock, num_bytes=READ_BYTES[kind]),
        multiply=multiply_rate(device, dtype, clock, size=MATRIX_SIZE[kind]),
    )


def read_rate(device: torch.device | str, clock: Clock, *, num_bytes: int) -> float:
    """Bytes per second of the best of some reductions that read their argument once and write next to nothing."""
    columns = min(4096, num_bytes // 4)
    # ones, not zeros: untouched zeros are one page of memory that is read again and again
    array = torch.ones((num_bytes // 4 // columns, columns), device=device)
    vector = torch.ones(columns, device=device)
    ways: tuple[Callable[[], object], ...] = (array.sum, array.amax, lambda: array @ vector)
    return max(array.nbytes / min(_seconds(way, device, clock)) for way in ways)


def multiply_rate(device: torch.device | str, dtype: torch.dtype, clock: Clock, *, size: int) -> float:
    """Floating-point operations per second of a square matrix product of random numbers; the median of the rounds."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn((size, size), generator=generator, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / statistics.median(_seconds(lambda: a @ b, device, clock))


def _seconds(call: Callable[[], object], device: torch.device | str, clock: Clock) -> list[float]:
    """Seconds of one call, in each round; a round before them warms up."""
    seconds, num_calls = [], CALLS[torch.device(device).type]
    for _ in range(1 + ROUNDS):
        begun = clock.idle()
        for _ in range(num_calls):
            call()
        seconds.append((clock.idle() - begun) / num_calls)
    return seconds[1:]


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights that a step reads: all, but of an embedding table that is not the head too only a few rows."""
    sizes = {name: math.prod(shape) for name, shape in hf_shapes(config).items()}
    if not config.tied_embeddings:
        del sizes["model.embed_tokens.weight"]
    return sum(sizes.values()) * itemsize


def spared_bytes(prepared: Params) -> int:
    """Bytes that kernels need not read of prepared weights, since a file held them in fewer bits."""
    from purestep.kernels.native.dense import PanelWeight

    weights = pytree.tree_leaves(prepared.tree, is_leaf=lambda leaf: isinstance(leaf, PanelWeight))
    return sum(max(w.dense.nbytes - w.panels.nbytes, 0) for w in weights if isinstance(w, PanelWeight))


def kv_bytes(layers: Sequence[KVLayerSpec], context: float, itemsize: int) -> float:
    """Bytes of keys and values that one request's next token reads behind `context` tokens; windows see no more."""
    return sum(
        2 * layer.num_kv_heads * layer.head_dim * itemsize * min(context, layer.sliding_window or math.inf)
        for layer in layers
    )


def decode_floor_ms(
    config: ModelConfig,
    layers: Sequence[KVLayerSpec],
    *,
    batch: int,
    context: float,
    itemsize: int,
    read: float,
    spared: int = 0,
) -> float:
    """Milliseconds in which the weights, once, and the batch's keys and values can be read at `read` bytes per second.

    The weights are read as numbers of `itemsize` bytes, but for the `spared_bytes`. A step of a large batch may be
    bound by its matrix products instead; that is not in here.
    """
    num_bytes = weight_bytes(config, itemsize) - spared + batch * kv_bytes(layers, context, itemsize)
    return num_bytes / read * 1e3


def prefill_flops(config: ModelConfig, length: int) -> float:
    """Floating-point operations of a prompt token, over a prompt of `length`: layers and causal attention, no head.

    A multiplication and an addition for each weight, and for each pair of a query and a key that it sees: twice, for
    scores and for values.
    """
    per_layer = [
        math.prod(shape)
        for name, shape in hf_shapes(config).items()
        if ".layers." in name and len(shape) == 2
    ]
    shape = config.attention
    windows = [shape.window_of(layer) or length for layer in range(config.num_layers)]
    seen = sum(_mean_seen(length, window) for window in windows)
    return 2.0 * sum(per_layer) + 4.0 * seen * shape.num_heads * shape.head_dim


def _mean_seen(length: int, window: int) -> float:
    """How many keys a query sees on average, itself included."""
    width = min(window, length)
    return width - width * (width - 1) / 2 / length


def prefill_ceiling(config: ModelConfig, length: int, multiply: float) -> float:
    """Prompt tokens per second at `multiply` floating-point operations per second."""
    return multiply / prefill_flops(config, length)
