"""Paged attention on the CPU: keys and values are written in place, then each group of like requests attends.

Lengths are read on the host, which costs nothing here: so no padding is computed that need not be, and a batch of
decodes of one length needs no mask at all.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MAX_SHORT_QUERY = 8  # requests with this many queries or fewer are batched; longer ones are worth a call each
GATHERED_BYTES = 16 * 2**20  # keys and values that are gathered at once, so that they are still cached when read


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Write this step's keys and values into `kv`, then attend; arguments as in `Attend`.

    What lies in slots past a request's length, or before the window of all its queries, is never multiplied.
    Source: https://arxiv.org/abs/2309.06180 (paged attention).
    """
    write_kv(kv, k, v, slot_mapping)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    batches = _batches(starts, lens, MAX_SHORT_QUERY, _rows_at_once(kv))
    form = _Form(scale, sliding_window, soft_cap)
    out = None
    for query_len, rows in batches:
        
    return out, kv
