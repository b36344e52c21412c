"""Paged attention against a loop over tokens."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purestep.kernels.reference.attention import attend
from tests.kernels.attention_cases import DIM, Case, cases
from tests.laws import assert_pure, equal
from tests.profiles import examples


def loop(case: Case) -> Tensor:
    """Attention as one would say it: each token, each head, each position it sees."""
    t, s = case.tensors, case.static
    block_size, group = t["kv"].shape[2], t["q"].shape[1] // t["k"].shape[1]
    kv = t["kv"].clone()
    for i, slot in enumerate(t["slot_mapping"].tolist()):
        kv[slot // block_size, 0, slot % block_size] = t["k"][i]
        kv[slot // block_size, 1, slot % block_size] = t["v"][i]
    out = torch.zeros_like(t["q"])
    starts = t["query_start_loc"].tolist()
    for r, length in enumerate(t["seq_lens"].tolist()):
        num_queries = starts[r + 1] - starts[r]
        for i in range(num_queries):
            position = length - num_queries + i
            first = 0 if s["sliding_window"] is None else max(0, position - s["sliding_window"] + 1)
            seen = range(first, min(position + 1, length))
            places = [(int(t["block_table"][r, p // block_size]), p % block_size) for p in seen]
            for h in range(t["q"].shape[1]):
                scores = [
                    float(t["q"][starts[r] + i, h] @ kv[b, 0, o, h // group]) * s["scale"] for b, o in places
                ]
                if s["soft_cap"] is not None:
                    scores = [s["soft_cap"] * math.tanh(x / s["soft_cap"]) for x in scores]
                total = sum(map(math.exp, scores))
                for x, (b, o) in zip(scores, places, strict=True):
                    out[starts[r] + i, h] += math.exp(x) / total * kv[b, 1, o, h // group]
    return out


@examples(2)
@given(case=cases())
def test_equals_a_loop_over_tokens(case: Case) -> None:
    """Grouped heads, windows, caps, chunks, decodes, idle requests and padding: all as the loop says."""
    out, _ = assert_pure(case.run)
    assert (out - loop(case)).abs().max() < 1e-12


@examples(0.3)
@given(case=cases())
def test_writes_its_slots_and_nothing_else(case: Case) -> None:
    """Keys and values lie at their slots, and every block that no slot names, the null block apart, keeps its bits."""
    t, (_, kv) = case.tensors, case.run()
    block_size = kv.shape[2]
    expected = t["kv"].clone()
    for i, slot in enumerate(t["slot_mapping"].tolist()):
        if slot >= block_size:
            expected[slot // block_size, :, slot % block_size] = torch.stack((t["k"][i], t["v"][i]))
    assert torch.equal(kv[1:], expected[1:])


@examples(0.3)
@given(case=cases(), extra=st.integers(0, 9))
def test_bounds_never_change_results(case: Case, extra: int) -> None:
    """Larger static bounds, as after rounding up to a bucket, are only more padding."""
    bounds = {key: case.static[key] + extra for key in ("max_query_len", "max_seq_len")}
    assert (case.run(**bounds)[0] - case.run()[0]).abs().max() < 1e-12


@examples(0.3)
@given(case=cases(), garbage=st.sampled_from([math.nan, math.inf, 1e300]))
def test_unused_memory_is_never_seen(case: Case, garbage: float) -> None:
    """Whatever lies in the null block, in slots past a length, in stale table entries and in padding tokens changes
    neither the result, nor any gradient, by one bit."""
    t = case.tensors
    spoiled, block_size = torch.full_like(t["kv"], garbage), t["kv"].shape[2]
    table = t["block_table"].clone()
    for r, length in enumerate(t["seq_lens"].tolist()):
        for p in range(length):
            place = int(table[r, p // block_size]), slice(None), p % block_size
            spoiled[place] = t["kv"][place]
        table[r, -(-length // block_size) :] = 10**6
    num_real = int(t["query_start_loc"][-1])
    fouled = {name: t[name].clone() for name in "qkv"}
    for tensor in fouled.values():
        tensor[num_real:] = garbage

    def result(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, table: Tensor) -> tuple[Tensor, Any]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v, kv)]
        names = dict(zip(("q", "k", "v", "kv"), inputs, strict=True))
        out, _ = case.run(**names, block_table=table)
        return out, torch.autograd.grad(out.square().sum(), inputs)

    clean = result(*(t[name] for name in ("q", "k", "v", "kv", "block_table")))
    dirty = result(fouled["q"], fouled["k"], fouled["v"], spoiled, table)
    assert equal(clean[0].detach(), dirty[0].detach())
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(clean[1], dirty[1], strict=True))


@given(case=cases())
def test_what_sees_nothing_gives_zero(case: Case) -> None:
    """A request of length 0 (its row is frozen, its tokens run along) gives exactly 0, and finite gradients."""
    frozen = torch.zeros_like(case.tensors["seq_lens"])
    q = case.tensors["q"].clone().requires_grad_()
    out, _ = case.run(q=q, seq_lens=frozen)
    assert not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert not gradient.any()


@examples(0.2)
@given(case=cases())
def test_gradients_are_those_of_finite_differences(case: Case) -> None:
    """With respect to queries, keys, values and the cache."""
    names = ("q", "k", "v", "kv")
    inputs = [case.tensors[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(
        lambda *x: case.run(**dict(zip(names, x, strict=True)))[0], inputs, fast_mode=True
    )


@examples(0.3)
@given(case=cases(), data=st.data())
def test_order_of_requests_does_not_matter(case: Case, data: st.DataObject) -> None:
    """Requests in another order give the same outputs in that order."""
    t = case.tensors
    starts = t["query_start_loc"].tolist()
    order = data.draw(st.permutations(range(len(starts) - 1)))
    spans = [torch.arange(starts[r], starts[r + 1]) for r in order]
    tokens = torch.cat([*spans, torch.arange(starts[-1], len(t["q"]))])
    moved = {name: t[name][tokens] for name in ("q", "k", "v", "slot_mapping")}
    moved |= {name: t[name][list(order)] for name in ("seq_lens", "block_table")}
    lengths = torch.tensor([0, *map(len, spans)]).cumsum(0).to(torch.int32)
    out, _ = case.run(**moved, query_start_loc=lengths)
    assert (out - case.run()[0][tokens]).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@examples(0.3)
@given(case=cases())
def test_narrow_types_are_computed_wide(dtype: torch.dtype, case: Case) -> None:
    """The result is the float64 result of the same narrow inputs, rounded once (up to float32's own error)."""
    narrow = {name: case.tensors[name].to(dtype) for name in ("q", "k", "v", "kv")}
    out, kv = case.run(**narrow)
    exact, _ = case.run(**{name: tensor.double() for name, tensor in narrow.items()})
    assert out.dtype == kv.dtype == dtype
    assert torch.allclose(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.usefixtures("unchecked_records")
@examples(0.05)
@given(case=cases())
def test_same_in_every_world(case: Case) -> None:
    """vmap over everything, vmap over values alone, and a trace give what a plain call gives."""
    names = tuple(case.tensors)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return case.run(**dict(zip(names, tensors, strict=True)))

    arguments = tuple(case.tensors.values())
    expected = call(*arguments)
    twice = torch.func.vmap(call)(*(torch.stack((x, x)) for x in arguments))
    floats = tuple(0 if name in ("q", "k", "v", "kv") else None for name in names)
    values = torch.func.vmap(call, in_dims=floats)(
        *(x[None] if at == 0 else x for x, at in zip(arguments, floats, strict=True))
    )
    traced = make_fx(call)(*arguments)(*arguments)
    for got in ((twice[0][1], twice[1][1]), (values[0][0], values[1][0]), traced):
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, expected, strict=True))


@pytest.mark.usefixtures("unchecked_records")
@pytest.mark.parametrize("max_query_len", [1, 4])
def test_compiles_in_one_graph(max_query_len: int) -> None:
    """torch.compile takes it whole, decode and prefill."""
    torch.manual_seed(0)
    length = max_query_len
    arguments = {
        "q": torch.randn(length, 4, DIM),
        "k": torch.randn(length, 2, DIM),
        "v": torch.randn(length, 2, DIM),
        "kv": torch.randn(4, 2, 4, 2, DIM),
        "query_start_loc": torch.tensor([0, length], dtype=torch.int32),
        "seq_lens": torch.tensor([5], dtype=torch.int32),
        "block_table": torch.tensor([[3, 1]], dtype=torch.int32),
        "slot_mapping": torch.tensor([12 + i for i in range(length)]),
    }
    static = {"max_query_len": length, "max_seq_len": 8, "scale": 0.5}
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**arguments, **static), attend(**arguments, **static), strict=True):
        assert torch.allclose(got, want, atol=1e-6)
