"""Checks of the fused kernels of a decode step on a GPU: fresh random inputs, poisoned outputs, whole steps.

Used by `tests/bench/gpu_gemm.py`; needs neither pytest nor hypothesis.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import purestep.kernels.triton.shared as shared_module
from purestep.kernels.reference import reference
from purestep.kernels.triton import cuda_donating
from purestep.pure.forward import compute_logits, model_forward, preprocess
from purestep.pure.inputs import build_attention_metadata, prepare_inputs
from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig, RopeScaling
from purestep.pure.models.initialize import random_params
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.pure.records.params import Params
from tests.kernels.triton.bare import BareStep
from tests.kernels.triton.cases import attention_case, relative_error, same
from tests.kernels.triton.gpu_checks import (
    ERROR,
    SHAPES,
    Result,
    compile_in_parallel,
    integers,
    normal,
    poisoned,
)

BF16 = torch.bfloat16
PRODUCTS = [  # results, width
    *((3072, 2048), (2048, 2048), (8192, 2048), (2048, 8192)),
    *((4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072)),
    *((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (20000, 1024)),
    *(
        (6500, 604),
        (6500, 600),
        (515, 96),
    ),  # rows that do not begin at 16 bytes, and widths that no tile divides
]


def all_checks(seed: int) -> Iterator[Result]:
    """Every check, one by one; a check that raises counts as failed, with the exception's text."""
    torch.manual_seed(seed)
    compile_in_parallel(list(_launching(seed)))
    for name, check in _checks(seed):
        try:
            with poisoned():
                holds, detail = check()
        except torch.AcceleratorError as error:  # nothing can be launched any more
            yield name, False, str(error)[:200]
            return
        except Exception as error:
            holds, detail = False, f"{type(error).__name__}: {error}"[:400]
        yield name, holds, detail


def _launching(seed: int) -> Iterator[Callable[[], Any]]:
    """Calls that launch what the checks will launch."""
    for dtype in (BF16, torch.float16, torch.float32):
        for outs, width in _sizes(dtype):
            yield lambda dtype=dtype, outs=outs, width=width: _product(dtype, outs, width)
    for name in SHAPES:
        yield lambda name=name: _attend_qkv(name, seed)
    yield lambda: _score_hidden(True)
    yield _ends
    yield _angles
    for config in _models().values():
        params = random_params(config, dtype=BF16, device="cuda")
        for batch, context in ((1, 1000), (3, 1000), (8, 1000), (20, 1000), (40, 1000), (1, 200), (8, 200)):
            bare = BareStep(llama(config), params, batch, context=context)
            yield bare.run


def _checks(seed: int) -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
    for dtype in (BF16, torch.float16, torch.float32):
        yield f"products {dtype}", lambda dtype=dtype: _products(dtype)
    for name in SHAPES:
        yield f"attend_qkv {name}", lambda name=name: _attend_qkv(name, seed)
    yield "scores of hidden states", lambda: _score_hidden(False)
    yield "ends of a step to the bit", _ends
    yield "angles", _angles
    for label, config in _models().items():
        yield f"logits of {label} against float64", lambda config=config: _logits(config)
        for batch in (1, 3, 8, 20, 40):
            yield (
                f"{label} x {batch}: early launches, late ones and eager steps give the same bits",
                lambda config=config, batch=batch: _launches(config, batch),
            )


def _sizes(dtype: torch.dtype) -> list[tuple[int, int]]:
    return PRODUCTS if dtype == BF16 else PRODUCTS[-2:]


def _products(dtype: torch.dtype) -> tuple[bool, str]:
    """Norm-wise errors; the last sizes have widths and results that no tile divides."""
    found = {size: _product(dtype, *size) for size in _sizes(dtype)}
    wrong = {size: errors for size, errors in found.items() if not max(errors) < 3 * ERROR[dtype]}
    return not wrong, f"worst error {max(map(max, found.values())):.1e}; wrong {wrong}"


def _product(dtype: torch.dtype, outs: int, width: int) -> list[float]:
    """The errors of all products of one weight; infinite where x + residual is not the reference's to the bit."""
    kernels, errors = cuda_donating(), []
    weight = normal(2 * outs, width, dtype=dtype) * width**-0.5
    gain, bias, wide = normal(width, dtype=dtype), normal(outs, dtype=dtype), weight.double()
    for tokens in (1, 2, 5, 8, 16, 17, 40):
        x, residual = normal(tokens, width, dtype=dtype), normal(tokens, width, dtype=dtype)
        total = residual + x
        normed = reference.rms_norm(total, gain, 1e-5).double()
        plain = kernels.linear(x, weight[:outs], bias)
        fused, own_total = kernels.norm_linear(kernels, x, residual, gain, 1e-5, weight[:outs], bias)
        gated, also = kernels.norm_gate_up(kernels, x, residual, gain, 1e-5, weight)
        errors += [
            relative_error(plain, x.double() @ wide[:outs].T + bias.double()),
            relative_error(fused, normed @ wide[:outs].T + bias.double()),
            relative_error(gated, reference.silu_and_mul(normed @ wide.T)),
            relative_error(kernels.logits(kernels, x, weight), x.double() @ wide.T),
            0.0 if same(own_total, total) and same(also, total) else float("inf"),
        ]
    return errors


def _score_hidden(compiles: bool) -> tuple[bool, str]:
    """Against float64, every weight there twice: ranks are even, and likeliest tokens have the bits of own ones."""
    kernels, wrong, worst = cuda_donating(), [], 0.0
    for vocab, rows in ((128256, 2047), (5120, 65)):
        x, weight = normal(rows, 2048, dtype=BF16), normal(vocab, 2048, dtype=BF16) * 0.05
        weight[1::2] = weight[::2]
        ids = torch.randint(vocab, (rows,), device="cuda").int()
        for n in (0, 1):
            tokens, values, ranks = kernels.score_hidden(kernels, x, weight, ids, n)
            if compiles:
                continue
            likeliest = tokens[:, -1].contiguous() if n else ids
            own = kernels.score_hidden(kernels, x, weight, likeliest, n)
            same_bits = not n or (bool((own[2] == 2).all()) and same(own[1][:, 0], own[1][:, 1]))
            few = slice(0, 64)
            logits = x[few].double() @ weight.double().T
            expected = logits.log_softmax(-1).gather(1, tokens[few].long())
            error = float((values[few] - expected).abs().max())
            by_float64 = (logits >= logits.gather(1, ids[few, None].long())).sum(-1)
            near = float((ranks[few] - by_float64).abs().max()) <= 4  # as many as float32 does not tell apart
            bound = 2**-20 * float(
                (x[few].float().abs() @ weight.float().abs().T).max()
            )  # of sums in float32
            even = bool((ranks % 2 == 0).all()) and (n == 0 or bool((tokens[:, 1] % 2 == 0).all()))
            if not (same_bits and near and even and error < bound):
                wrong.append((vocab, n, same_bits, near, even))
            worst = max(worst, error)
    return not wrong, f"worst error {worst:.1e}; wrong {wrong}"


def _attend_qkv(name: str, seed: int) -> tuple[bool, str]:
    """Decodes in one part and in several, and mixed batches, with norms and without; the cache to the bit without."""
    heads, kv_heads, dim = SHAPES[name]
    kernels, worst, wrong = cuda_donating(), 0.0, []
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 2000, (70,), generator=generator).tolist()
    batches: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
        "one": ([(1777, 1)], {}),
        "five": ([(n, 1) for n in (1, 0, 63, 1290, 4000)], {}),
        "seventy": ([(n, 1) for n in lengths], {}),
        "window": ([(n, 1) for n in lengths[:9]], {"sliding_window": 100, "soft_cap": 20.0}),
        "mixed": ([(500, 500), (0, 2), (900, 1), (77, 20)], {}),
    }
    for label, (requests, form) in batches.items():
        for has_norm in (False, True):
            case = attention_case(
                requests,
                heads=heads,
                kv_heads=kv_heads,
                dim=dim,
                dtype=BF16,
                device="cuda",
                seed=seed,
                **form,
            )
            t = case.tensors
            qkv = torch.cat((t["q"], t["k"], t["v"]), 1).flatten(1)
            angle = torch.rand(len(qkv), dim // 2, device="cuda") * 1000
            how: dict[str, Any] = {"cos": angle.cos().to(BF16), "sin": angle.sin().to(BF16)}
            q, k = t["q"], t["k"]
            if has_norm:
                how |= {"q_gain": normal(dim, dtype=BF16), "k_gain": normal(dim, dtype=BF16), "eps": 1e-6}
                q, k = (reference.rms_norm(x, how[g], 1e-6) for x, g in ((q, "q_gain"), (k, "k_gain")))
            t["q"], t["k"] = reference.rotate(q, k, how["cos"], how["sin"])
            expected = case.expected()
            batch = [t[n] for n in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")]
            out, kv = kernels.attend_qkv(kernels, qkv, t["kv"].clone(), *batch, **how, **case.static)
            error = relative_error(out, expected)
            blind = expected.flatten(1).abs().sum(1) == 0
            wanted, slots = t["kv"].clone(), t["slot_mapping"]
            wanted[slots // 16, :, slots % 16] = torch.stack((t["k"], t["v"]), 1)
            kept = torch.equal(kv[1:].isnan(), wanted[1:].isnan())
            near = relative_error(kv[1:].nan_to_num(0), wanted[1:].nan_to_num(0)) < 2e-3
            frame = kept and (near if has_norm else same(kv[1:], wanted[1:]))
            if not (error < 1.5 * ERROR[BF16] and frame and not out[blind].any()):
                wrong.append((label, has_norm, f"{error:.1e}", frame))
            worst = max(worst, error)
    return not wrong, f"worst error {worst:.1e}; wrong {wrong}"


def _ends() -> tuple[bool, str]:
    kernels, wrong = cuda_donating(), []
    for num_reqs, tokens in ((1, 1), (37, 300), (256, 256), (500, 2000)):
        rows = num_reqs + 9
        ledger, token_ids = integers(7, rows, high=300), integers(rows, 400)
        ledger[1], ledger[4:6] = ledger[0] + integers(rows, high=5), integers(2, rows, high=2)
        ledger[3], ledger[:6, -1] = ledger[1] + integers(rows, high=3), 0
        tables = (integers(rows, 25), integers(rows, 50))
        row_of_index = torch.randperm(rows - 1, device="cuda")[:num_reqs].int()
        starts = torch.linspace(0, tokens, num_reqs + 1, device="cuda").int()
        ledger[1] += tokens // num_reqs
        arguments = (row_of_index, starts, ledger, token_ids, tables, ledger[1] + integers(rows, high=3) - 1)
        kwargs: dict[str, Any] = {"block_sizes": (16, 8), "num_tokens": tokens + 3, "max_seq_len": 300}
        inputs = kernels.lay_out(kernels, *arguments, **kwargs)
        if not same(inputs, reference.lay_out(reference, *arguments, **kwargs)):
            wrong.append(("lay_out", num_reqs))
        flags = torch.rand(2, num_reqs, device="cuda") < 0.3
        after = (row_of_index, inputs[3], inputs[5], integers(num_reqs), flags[0], flags[1])
        expected = reference.advance(reference, ledger, token_ids, *after)
        ours = kernels.advance(kernels, ledger.clone(), token_ids.clone(), *after)
        if not same((ours[0], ours[1][:-1], *ours[2:]), (expected[0], expected[1][:-1], *expected[2:])):
            wrong.append(("advance", num_reqs))
    return not wrong, f"wrong {wrong}"


def _angles() -> tuple[bool, str]:
    at, worst = torch.randint(131072, (777,), device="cuda"), 0.0
    for scaling in (None, (32.0, 1.0, 4.0, 8192)):
        how: dict[str, Any] = {"head_dim": 64, "theta": 5e5, "scaling": scaling}
        ours = cuda_donating().angles(at, dtype=torch.float32, **how)
        for got, want in zip(ours, reference.angles(at, dtype=torch.float64, **how), strict=True):
            worst = max(worst, float(((got - want).abs() / (1e-6 + at[:, None] * 2.0**-22)).max()))
    return worst < 1, f"worst {worst:.2f} of what float32 allows"


def _models() -> dict[str, ModelConfig]:
    """Three layers of Llama-3.2-1B and of Qwen3-0.6B with small vocabularies; rotary scaling in the first."""

    def config(hidden: int, heads: int, dim: int, inner: int, **more: Any) -> ModelConfig:
        return ModelConfig(
            vocab_size=4000, hidden_size=hidden, intermediate_size=inner, num_layers=3,
            attention=AttentionConfig(num_heads=heads, num_kv_heads=8, head_dim=dim, **more),
            rope=RopeConfig(5e5, None if more else RopeScaling(32.0, 1.0, 4.0, 8192)), rms_norm_eps=1e-5,
            tied_embeddings=True, max_position_embeddings=4096,
        )  # fmt: skip

    return {"1B": config(2048, 32, 64, 8192), "0.6B": config(1024, 16, 128, 3072, qk_norm=True)}


def _logits(config: ModelConfig) -> tuple[bool, str]:
    """The error of bfloat16 steps of 1 and of 8 requests is that of the kernels that they are composed of."""
    model, params = llama(config), random_params(config, seed=1, dtype=BF16, device="cuda")
    wide = Params(torch.utils._pytree.tree_map(lambda leaf: leaf.double(), params.tree))
    ours = cuda_donating()
    composed = replace(reference, attend=ours.attend)
    found = []
    for batch in (1, 8):
        bare = BareStep(model, params, batch, context=200)
        state = replace(bare.state, kv=tuple(kv.double() for kv in bare.state.kv))
        expected = _logits_of(model, wide, state, reference)
        errors = [
            relative_error(_logits_of(model, params, _copied(bare.state), kernels), expected)
            for kernels in (ours, composed)
        ]
        found.append(errors)
    holds = all(own < 1.3 * other and own < 0.05 for own, other in found)
    return holds, "; ".join(f"{own:.2e}, composed {other:.2e}" for own, other in found)


def _copied(state: Any) -> Any:
    return replace(state, kv=tuple(kv.clone() for kv in state.kv))


def _logits_of(model: Any, params: Params, state: Any, kernels: Any) -> Tensor:
    with torch.no_grad():
        inputs = prepare_inputs(state, kernels=kernels)
        metadata = build_attention_metadata(state, inputs, kernels=kernels)
        hidden, _ = model_forward(model, params, preprocess(inputs), state.kv, metadata, kernels=kernels)
        return compute_logits(model, params, hidden, inputs.logits_indices, kernels=kernels)


def _launches(config: ModelConfig, batch: int) -> tuple[bool, str]:
    """Thirty steps: tokens, ledger and cache, three times captured and launched early, once late, once eagerly."""
    model, params = llama(config), random_params(config, seed=2, std=0.1, dtype=BF16, device="cuda")
    results = []
    for kind in ("early", "early", "early", "late", "eager"):
        with mock.patch.object(shared_module, "is_hopper_or_later", lambda kind=kind: kind != "late"):
            bare = BareStep(model, params, batch, context=1000)
            replay = bare.run if kind == "eager" else bare.captured().replay
            bare.reset()
            for _ in range(30):
                replay()
            torch.cuda.synchronize()
            results.append(bare.leaves())
    differ = [i for i, other in enumerate(results[1:], 1) if not same(other, results[0])]
    distinct = len(results[0][1][:, 1000:1030].unique())
    return not differ, f"differ {differ}; {distinct} distinct tokens"
