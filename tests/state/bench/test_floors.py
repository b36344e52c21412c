"""Floors, by worked numbers and against loops; rates, by a clock that counts."""

import math

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.native.dense import PanelWeight
from purestep.pure.models.initialize import random_params
from purestep.pure.models.llama import llama
from purestep.pure.models.model import KVLayerSpec
from purestep.pure.record import replace
from purestep.pure.records.params import Params
from purestep.state.bench import floors
from purestep.state.bench.clocks import Clock
from purestep.state.bench.floors import (
    decode_floor_ms,
    kv_bytes,
    multiply_rate,
    prefill_ceiling,
    prefill_flops,
    read_rate,
    spared_bytes,
    weight_bytes,
)
from purestep.state.bench.shapes import SHAPES

READ = 4.48e12  # bytes per second of the GPU of which the published floors are


@pytest.mark.parametrize(
    ("name", "gigabytes", "token_bytes"),
    [("0.6B", 1.19, 114_688), ("1B", 2.47, 32_768), ("8B", 15.01, 131_072)],
)
def test_named_shapes_read_what_is_published_of_them(name: str, gigabytes: float, token_bytes: int) -> None:
    config = SHAPES[name]

    assert weight_bytes(config, 2) / 1e9 == pytest.approx(gigabytes, abs=0.005)
    assert kv_bytes(llama(config).kv_layers, 1, 2) == token_bytes


@pytest.mark.parametrize(
    ("name", "batch", "ms"),
    [
        ("0.6B", 1, 0.30),
        ("0.6B", 64, 2.10),
        ("0.6B", 256, 7.61),
        ("1B", 1, 0.56),
        ("1B", 8, 0.62),
        ("1B", 256, 2.65),
        ("8B", 1, 3.38),
        ("8B", 64, 5.45),
    ],
)
def test_floors_of_decode_are_the_published_ones(name: str, batch: int, ms: float) -> None:
    layers = llama(SHAPES[name]).kv_layers

    floor = decode_floor_ms(SHAPES[name], layers, batch=batch, context=1120, itemsize=2, read=READ)

    assert floor == pytest.approx(ms, abs=0.006)


@pytest.mark.parametrize(("name", "tok_s"), [("0.6B", 640_000), ("1B", 343_000)])
def test_ceilings_of_prefill_are_the_published_ones(name: str, tok_s: float) -> None:
    assert prefill_ceiling(SHAPES[name], 2048, 713e12) == pytest.approx(tok_s, rel=0.002)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_the_leaves_but_for_an_embedding_of_which_only_rows_are_read(tied: bool) -> None:
    config = replace(SHAPES["tiny"], tied_embeddings=tied)
    tree = random_params(config, dtype=torch.bfloat16).tree

    expected = sum(leaf.nbytes for leaf in pytree.tree_leaves(tree)) - (0 if tied else tree["embed"].nbytes)

    assert weight_bytes(config, 2) == expected


def test_weights_of_fewer_bits_are_read_in_less_time() -> None:
    """Of plain weights, and of panels that are no smaller, nothing is spared."""
    narrow, wide = (
        PanelWeight(dense=torch.zeros(64, 64), panels=torch.zeros(size, dtype=torch.uint8), kind=2)
        for size in (5_000, 20_000)
    )
    prepared = Params({"embed": narrow, "layers": (wide, torch.zeros(9)), "norm": torch.zeros(3)})
    assert spared_bytes(prepared) == 64 * 64 * 4 - 5_000

    found = [
        decode_floor_ms(SHAPES["tiny"], (), batch=1, context=10, itemsize=4, read=1e3, spared=spared)
        for spared in (0, 5_000)
    ]
    assert found[0] - found[1] == pytest.approx(5_000)


@given(st.lists(st.none() | st.integers(1, 50), min_size=1, max_size=4), st.integers(1, 100))
def test_a_window_bounds_the_keys_that_are_read(windows: list[int | None], context: int) -> None:
    layers = [KVLayerSpec(num_kv_heads=2, head_dim=8, sliding_window=window) for window in windows]

    expected = sum(len(range(context)[-(window or context) :]) * 2 * 2 * 8 * 4 for window in windows)

    assert kv_bytes(layers, context, 4) == expected


@given(st.integers(1, 60), st.tuples(*[st.none() | st.integers(1, 40)] * 4))
def test_products_of_a_prompt_are_those_of_its_weights_and_of_the_pairs_that_see_each_other(
    length: int, windows: tuple[int | None, ...]
) -> None:
    tiny = SHAPES["tiny"]
    config = replace(tiny, attention=replace(tiny.attention, sliding_window=windows))
    shape = config.attention
    layer = config.hidden_size * (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer += 3 * config.hidden_size * config.intermediate_size
    pairs = sum(
        1
        for window in windows
        for query in range(length)
        for key in range(query + 1)
        if window is None or query - key < window
    )

    expected = length * 2 * layer * config.num_layers + pairs * 4 * shape.num_heads * shape.head_dim

    assert prefill_flops(config, length) * length == pytest.approx(expected)


@pytest.mark.parametrize("calls", [1, 8])
def test_rates_are_of_so_many_calls_between_two_looks_at_an_idle_device(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(floors.CALLS, "cpu", calls)
    looks, waits = [0.0], [0]

    def now() -> float:
        looks[0] += 0.5
        return looks[0]

    def wait() -> None:
        waits[0] += 1

    clock = Clock(now, wait)

    # half a second for every round of calls
    assert read_rate("cpu", clock, num_bytes=4096) == 4096 * calls / 0.5
    assert multiply_rate("cpu", torch.float32, clock, size=4) == 2 * 4**3 * calls / 0.5
    assert waits[0] * 0.5 == looks[0] == math.ceil(looks[0])
    assert waits[0] == 4 * 2 * (1 + floors.ROUNDS)  # three ways to read, one to multiply
