"""Compiles every launch of the Triton kernels for sm_90, without a GPU: a script, to be run without TRITON_INTERPRET.

The interpreter accepts what a compiler refuses: products of fewer than 16 rows, types that change in a loop, too much
shared memory. The functions are called with tensors of the meta device; where they would launch, they compile.
Prints a line of JSON per compiled kernel: name, seconds, bytes of shared memory, whether it has Hopper's wide products.
"""

import json
import sys
import time
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = 227 * 1024  # bytes that a block may have on sm_90


class NoDevice:
    """Enough of a driver to compile for a device that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead_of_launching() -> dict[str, Any]:
    """From now on launches only compile; returns what has been compiled so far, by kernel and hash."""
    driver.set_active(NoDevice())
    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        start = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in compiled:
            compiled[kernel.hash] = kernel
            line = {
                "kernel": kernel.name,
                "s": round(time.perf_counter() - start, 2),
                "shared": kernel.metadata.shared,
                "wgmma": "wgmma" in kernel.asm["ptx"],
            }
            print(json.dumps(line), flush=True)
            assert kernel.metadata.shared <= SHARED_MEMORY, line
        return kernel

    JITFunction.run = only_compile
    return compiled


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def call_attention(
    dtype: torch.dtype,
    dim: int,
    heads: int,
    kv_heads: int,
    *,
    fp8: bool = False,
    normed: tuple[bool, ...] = (False, True),
    **form: Any,
) -> None:
    """Writing, decoding in one part and in several, a few queries and many; of heads, and of what a projection gave,
    with norms or without them."""
    from purestep.kernels.triton import cuda_donating

    kernels = cuda_donating()
    gain, half = meta(dim, dtype=dtype), dim // 2

    for reqs, max_query_len in ((2, 1), (600, 1), (4, 7), (4, 65)):
        tokens = reqs * max_query_len
        qkv = meta(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        kv = meta(64, 2, 16, kv_heads, dim, dtype=torch.float8_e4m3fn if fp8 else dtype)
        batch = (ints(reqs + 1), ints(reqs), ints(reqs, 8), meta(tokens, dtype=torch.int64))
        bounds = {"max_query_len": max_query_len, "max_seq_len": 512, "scale": 0.1, **form}
        bounds["kv_scales"] = meta(2) if fp8 else None
        if len(normed) > 1:
            kernels.attend(q, k, v, kv, *batch, **bounds)
        angles = {"cos": meta(tokens, half, dtype=dtype), "sin": meta(tokens, half, dtype=dtype)}
        for has_norms in normed:
            norms = {"q_gain": gain, "k_gain": gain, "eps": 1e-5} if has_norms else {}
            qkv_of_heads = qkv.flatten(1)
            for settled in (False, True):
                kernels.attend_qkv(
                    kernels, qkv_of_heads, kv, *batch, **angles, **norms, **bounds, settled=settled
                )


def call_dense(dtype: torch.dtype) -> None:
    from purestep.kernels.triton.dense import add_rms_norm, rms_norm, rotate, silu_and_mul

    hidden, gain = meta(5, 2048, dtype=dtype), meta(2048, dtype=dtype)
    rms_norm(hidden, gain, 1e-5)
    add_rms_norm(hidden, hidden, gain, 1e-5)
    q, k = meta(5, 8, 96, dtype=dtype), meta(5, 2, 96, dtype=dtype)
    rms_norm(q, meta(96, dtype=dtype), 1e-5)
    rotate(q, k, meta(5, 48, dtype=dtype), meta(5, 48, dtype=dtype))
    silu_and_mul(hidden)


def call_products(dtype: torch.dtype) -> None:
    """One row and a few, plain, normed and gated, of widths that tiles divide and that they do not."""
    from purestep.kernels.triton import cuda_donating

    kernels = cuda_donating()
    for tokens in (1, 5):
        for width in (96, 3072, 8192):
            x, gain, bias = (
                meta(tokens, width, dtype=dtype),
                meta(width, dtype=dtype),
                meta(1000, dtype=dtype),
            )
            weight = meta(1000, width, dtype=dtype)
            kernels.linear(x, weight, bias)
            kernels.norm_linear(kernels, x, x, gain, 1e-5, weight)
            kernels.norm_gate_up(kernels, x, x, gain, 1e-5, weight)
            kernels.logits(kernels, x, weight)
    for tokens, outs in ((5, 1024), (12, 4096), (20, 2048), (20, 4096)):
        x, weight = meta(tokens, 2048, dtype=dtype), meta(2 * outs, 2048, dtype=dtype)
        kernels.linear(x, weight[:outs], x[0, :1].expand(outs).contiguous())
        kernels.norm_gate_up(kernels, x, x, x[0], 1e-5, weight)
    for outs, width in ((3072, 2048), (6144, 4096), (4096, 14336)):
        kernels.linear(meta(5, width, dtype=dtype), meta(outs, width, dtype=dtype))
    for outs, width in ((3072, 1024), (14336, 4096)):
        x = meta(5, width, dtype=dtype)
        kernels.norm_gate_up(kernels, x, x, x[0], 1e-5, meta(2 * outs, width, dtype=dtype))
    for tokens in (5, 20, 40):
        for width in (96, 2048):
            x = meta(tokens, width, dtype=dtype)
            kernels.norm_gate_up(kernels, x, x, x[0], 1e-5, meta(2 * 8192, width, dtype=dtype))
            kernels.logits(kernels, x, meta(40000, width, dtype=dtype))


def call_hidden_scores() -> None:
    """Without a likeliest token and with one."""
    from purestep.kernels.triton import cuda_donating

    kernels = cuda_donating()
    x, weight = meta(100, 2048, dtype=torch.bfloat16), meta(128256, 2048, dtype=torch.bfloat16)
    for num_logprobs in (0, 1):
        kernels.score_hidden(kernels, x, weight, ints(100), num_logprobs)


def call_the_rest() -> None:
    from purestep.kernels.triton import cuda_donating

    kernels = cuda_donating()
    flags = meta(4, dtype=torch.bool)
    rows = (ints(7, 9), ints(9, 30), (ints(9, 8),), ints(9))
    kernels.lay_out(kernels, ints(4), ints(5), *rows, block_sizes=(16,), num_tokens=6, max_seq_len=64)
    for scaling in (None, (32.0, 1.0, 4.0, 8192)):
        positions = meta(6, dtype=torch.int64)
        kernels.angles(positions, head_dim=64, theta=5e5, scaling=scaling, dtype=torch.bfloat16)
    kernels.advance(kernels, ints(7, 9), ints(9, 30), ints(4), ints(4), flags, ints(4), flags, flags)
    kernels.ragged_index(ints(5), 9)
    kernels.write(ints(7, 30), (ints(6), ints(4, 1)), ints(4, 6))
    kernels.write(ints(30, 7), (ints(4),), ints(4, 7))
    kernels.write(meta(9, 2, 16, 8), (ints(4, 1), ints(2), ints(4, 1)), meta(4, 2, 8))
    kv = meta(9, 2, 16, 2, 64, dtype=torch.bfloat16)
    kernels.copy_blocks(kv, ints(3), ints(3))
    kernels.zero_blocks(kv, ints(3))
    kernels.embed(meta(100, 64, dtype=torch.bfloat16), ints(5))
    logits, reqs = meta(4, 128256), meta(4)
    seeds = meta(4, dtype=torch.int64)
    kernels.greedy(logits)
    kernels.draw(logits, kernels.uniforms(seeds, seeds, ints(4), purpose=0, width=128256))
    kernels.truncate(kernels.scale_by_temperature(logits, reqs), ints(4), reqs, reqs)
    kernels.apply_grammar_bitmask(logits, ints(2, 4008), ints(4))
    kernels.penalize(logits, ints(4, 300), ints(4), ints(4), reqs, reqs, reqs)
    for num_logprobs in (0, 1, 20):
        kernels.gather_logprobs(logits, seeds, num_logprobs)
        kernels.score(logits, seeds, num_logprobs)
    targets, drafts, uniform = meta(4, 6, 128256), ints(4, 5), meta(4, 5)
    kernels.verify_greedy(meta(4, 6, dtype=torch.int64), drafts, meta(4, 6, dtype=torch.bool))
    for probs in (None, meta(4, 5, 128256)):
        kernels.count_accepted(targets, drafts, ints(4), probs, uniform)
        kernels.draw_last(targets, drafts, ints(4), seeds, probs, logits)
    layout = (ints(4), ints(5), rows[0], ints(9, 5), *rows[1:])
    kernels.lay_out_drafts(kernels, *layout, block_sizes=(16,), num_tokens=20, max_seq_len=64)
    several = ints(4, 6), meta(4, 6, dtype=torch.bool), flags
    kernels.advance_drafts(kernels, ints(7, 9), ints(9, 5), ints(9, 30), ints(4), ints(4), flags, *several)
    rows = ints(7, 9), ints(9, 5), ints(4), ints(4)
    kernels.put_drafts(kernels, *rows, ints(4, 6), drafts, longest=64)
    kernels.propose_ngram(ints(9, 5000), ints(4), ints(4), ints(4), min_n=1, max_n=4, num_drafts=5)


def check_ahead() -> None:
    """What is compiled ahead is compiled, whatever else fails, and not launched: there is nothing to launch it on."""
    from purestep.kernels.triton.dense import _silu_and_mul, silu_and_mul
    from purestep.state.compilation import compile_ahead

    driver.set_active(NoDevice())
    compile_ahead([lambda: silu_and_mul(ints(2, 8)), lambda: silu_and_mul(meta(2, 8))])
    assert len(_silu_and_mul.device_caches[0][0]) == 1


def main() -> None:
    check_ahead()
    compiled = compile_instead_of_launching()
    call_attention(torch.bfloat16, 128, 32, 8)
    call_attention(torch.bfloat16, 64, 32, 8, normed=(False,), sliding_window=64, soft_cap=30.0)
    call_attention(torch.bfloat16, 128, 32, 8, normed=(True,), fp8=True)
    if "--all" in sys.argv:
        call_attention(torch.float32, 64, 32, 8, fp8=True)
        call_attention(torch.float16, 96, 6, 2, fp8=True, soft_cap=30.0)
        for dtype in (torch.bfloat16, torch.float32):
            for dim in (32, 96, 256):
                call_attention(dtype, dim, 6, 2)
        call_attention(torch.float32, 64, 32, 8)
        call_attention(torch.float32, 128, 32, 8)
        call_dense(torch.float32)
        call_products(torch.float32)
        call_products(torch.float16)
    call_dense(torch.bfloat16)
    call_products(torch.bfloat16)
    call_hidden_scores()
    call_the_rest()
    print(json.dumps({"compiled": len(compiled), "triton": triton.__version__}))


if __name__ == "__main__":
    main()
