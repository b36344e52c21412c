"""Random batches over a paged cache, for whoever implements `attend`."""

from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.kernels.types import Attend

DIM = 4


@attrs.frozen
class Case:
    """Arguments of `attend`: tensors, and what is static."""

    tensors: dict[str, Tensor]
    static: dict[str, Any]

    def run(self, *, attend: Attend = reference.attend, **changes: Any) -> tuple[Tensor, Tensor]:
        return attend(**(self.tensors | self.static | changes))


@st.composite
def cases(draw: st.DrawFn, decode: bool | None = None) -> Case:
    """Requests of any lengths over blocks in any order, with idle requests, padding tokens and stale table entries."""
    block_size = draw(st.sampled_from([1, 2, 3, 4]))
    decode = draw(st.booleans()) if decode is None else decode
    queries = draw(st.lists(st.integers(0, 1 if decode else 5), min_size=1, max_size=4))
    before = [draw(st.integers(0, 7)) for _ in queries]
    lens = [n + b if n else 0 for n, b in zip(queries, before, strict=True)]
    num_tokens = sum(queries) + draw(st.integers(0 if sum(queries) else 1, 3))
    width = max(1, *(-(-n // block_size) for n in lens)) + draw(st.integers(0, 2))
    num_blocks = 1 + width * len(queries)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    table = torch.randperm(num_blocks - 1, generator=generator).view(len(queries), width) + 1
    slots = [
        int(table[r, p // block_size]) * block_size + p % block_size
        for r, n in enumerate(queries)
        for p in range(lens[r] - n, lens[r])
    ]
    slots += [i % block_size for i in range(num_tokens - len(slots))]
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = {
        "q": normal(num_tokens, kv_heads * group, DIM),
        "k": normal(num_tokens, kv_heads, DIM),
        "v": normal(num_tokens, kv_heads, DIM),
        "kv": normal(num_blocks, 2, block_size, kv_heads, DIM),
        "query_start_loc": torch.tensor([0, *queries]).cumsum(0).to(torch.int32),
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "block_table": table.to(torch.int32),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
    }
    static = {
        "max_query_len": max(1, *queries),
        "max_seq_len": max(1, *lens),
        "scale": 0.7,
        "sliding_window": draw(st.sampled_from([None, 1, 3])),
        "soft_cap": draw(st.sampled_from([None, 1.5])),
    }
    return Case(tensors, static)
