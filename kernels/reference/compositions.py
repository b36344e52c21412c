"""What a set of kernels may do in one pass, defined by the set's other functions.

Each is given the set itself first, so that a set which replaces one part changes what is made of it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from purestep.kernels.types import Kernels

# Rows of logits that are there at once, since those of a whole prompt may not fit the device; fewer where whole rows
# are sorted, which takes several times their memory.
MAX_SCORED_ROWS, MAX_SORTED_ROWS = 512, 128
SORTED_FROM = 1024  # log-probabilities of a token


def logits(kernels: Kernels, x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] times the transpose of weight [vocab, in] as `prepare` gave it: [n, vocab], in float32 or wider.

    A set may leave out the rounding to x's type before.
    """
    y = kernels.linear(x, weight, None)
    wide: Tensor = y.to(torch.promote_types(y.dtype, torch.float32))
    return wide


def score_hidden(
    kernels: Kernels, x: Tensor, weight: Tensor, ids: Tensor, num_logprobs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`score` of `logits`, but for what those were lowered by: token ids, log-probabilities and ranks.

    x [n, in]; weight [vocab, in] as `prepare` gave it; ids int [n]. Logits of all rows are never there at once.
    """

    def scored(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = kernels.score(kernels.logits(kernels, x, weight), ids, num_logprobs)[:3]
        return found

    return in_parts(scored, x, ids, rows_at_once(num_logprobs))


def rows_at_once(num_logprobs: int) -> int:
    """Of how many rows there may be logits, if so many likeliest tokens are looked for."""
    return MAX_SCORED_ROWS if num_logprobs <= SORTED_FROM else min(MAX_SCORED_ROWS, MAX_SORTED_ROWS)


def in_parts(
    scored: Callable[[Tensor, Tensor], tuple[Tensor, ...]], x: Tensor, ids: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What is `scored` of rows x [n, ...] and ids [n], given so many of them at once at most."""
    parts = [scored(x[at : at + most], ids[at : at + most]) for at in range(0, max(len(x), 1), most)]
    tokens, logprobs, ranks = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return tokens, logprobs, ranks


def norm_linear(
    kernels: Kernels,
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """linear of the RMS norm of x + residual, and x + residual; x [n, in] alone if there is no residual.

    gain [in]; weight [out, in] as `prepare` gave it; bias [out]. Returns [n, out] and [n, in].
    """
    normed, total = _normed(kernels, x, residual, gain, eps)
    return kernels.linear(normed, weight, bias), total


def norm_gate_up(
    kernels: Kernels, x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of the RMS norm of x + residual, and x + residual; weight is [gate, up], [2 * width, in].

    Returns [n, width] and [n, in].
    """
    normed, total = _normed(kernels, x, residual, gain, eps)
    return kernels.silu_and_mul(kernels.linear(normed, weight, None)), total


def attend_qkv(
    kernels: Kernels,
    qkv: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 0.0,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: Tensor | None = None,
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attend` with the heads of qkv [tokens, (heads + 2 * kv_heads) * dim] in the order q, k, v. Donates `kv`.

    Queries and keys are turned by cos and sin [tokens, dim / 2], after RMS norms over each head with q_gain and
    k_gain [dim] where those are given; eps is the norms'. `settled` promises that since the set's `angles` gave cos
    and sin nothing has written query_start_loc, seq_lens, block_table, slot_mapping or kv but such calls of other
    layers: a set may then read them before all that was launched before has ended. All else as in `Attend`.
    """
    q, k, v = turned_heads(kernels, qkv, kv, cos=cos, sin=sin, q_gain=q_gain, k_gain=k_gain, eps=eps)
    return kernels.attend(
        q,
        k,
        v,
        kv,
        query_start_loc,
        seq_lens,
        block_table,
        slot_mapping,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        kv_scales=kv_scales,
    )


def turned_heads(
    kernels: Kernels,
    qkv: Tensor,
    kv: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as `attend` takes them; arguments as in `attend_qkv`."""
    q, k, v = heads_of(qkv, kv)
    if q_gain is not None and k_gain is not None:
        q, k = kernels.rms_norm(q, q_gain, eps), kernels.rms_norm(k, k_gain, eps)
    q, k = kernels.rotate(q, k, cos, sin)
    return q, k, v


def heads_of(qkv: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [tokens, heads, dim] each, out of a projection [tokens, all heads * dim]."""
    num_kv_heads, dim = kv.shape[3:]
    heads = torch.unflatten(qkv, -1, (-1, dim))
    q, k, v = torch.split(heads, [heads.shape[-2] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=-2)
    return q, k, v


def _normed(
    kernels: Kernels, x: Tensor, residual: Tensor | None, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if residual is None:
        return kernels.rms_norm(x, gain, eps), x
    normed, total = kernels.add_rms_norm(x, residual, gain, eps)
    return normed, total
