"""`initial_state`: a device state that holds no request."""

import torch
from torch.nn.functional import pad

from purestep.pure.models.model import Model
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.layout import Layout
from purestep.pure.records.plan import Inbox
from purestep.pure.records.sampling_rows import NUM_FLOATS, NUM_WORDS, SamplingRows
from purestep.pure.records.state import LEDGER_COLUMNS, Ledger, StepState


def initial_state(
    model: Model,
    limits: BatchLimits,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    kv: tuple[torch.Tensor, ...] | None = None,
) -> StepState:
    """A state for these limits: every row inactive, every block zero, nothing laid out, nothing to absorb.

    It reflects `InputBatch.make_empty(limits)`. The KV cache takes, per layer, 2 * num_blocks * block_size *
    num_kv_heads * head_dim elements of `dtype`; with `kv` it is these tensors, one a layer, made elsewhere. Where they
    are float8_e4m3fn, every scale is 1.
    """

    # No arithmetic: on tensors without memory, whose sizes are asked for first, it imports torch's compiler.
    def filled(*size: int, value: int = 0) -> torch.Tensor:
        return torch.full(size, value, dtype=torch.int32, device=device)

    num_rows, sizes = limits.max_num_reqs + 1, limits.table_block_sizes
    if kv is None:
        num_blocks = [n * ratio for n, ratio in zip(limits.num_blocks, limits.num_kernel_blocks, strict=True)]
        kv = tuple(
            torch.zeros(
                num_blocks[layer.group],
                2,
                sizes[layer.group],
                layer.num_kv_heads,
                layer.head_dim,
                dtype=dtype,
                device=device,
            )
            for layer in model.kv_layers
        )
    nothing = Layout.make_empty().bounds
    # The null row's blocks are the null block, wherever it is.
    room = pad(filled(num_rows - 1), (0, 1), value=limits.max_model_len)
    return StepState(
        ledger=Ledger(
            table=filled(len(LEDGER_COLUMNS), num_rows),
            drafts=filled(num_rows, limits.num_drafts, value=-1) if limits.num_drafts else None,
        ),
        kv=kv,
        token_ids=filled(num_rows, limits.max_model_len),
        block_tables=tuple(filled(num_rows, -(-limits.max_model_len // size)) for size in sizes),
        room=room,
        sampling=SamplingRows(filled(num_rows, NUM_FLOATS).float(), filled(num_rows, NUM_WORDS - NUM_FLOATS)),
        layout=Layout(filled(0), filled(1), nothing),
        inbox=Inbox.make_empty(device),
        block_sizes=sizes,
        group_of_layer=tuple(layer.group for layer in model.kv_layers),
        acceptance_rates=limits.acceptance_rates,
        kv_scales=torch.ones(len(kv), 2, device=device) if _has_scales(kv) else None,
    )


def _has_scales(kv: tuple[torch.Tensor, ...]) -> bool:
    """Whether keys and values are stored by scales: those of eight bits are."""
    return any(layer.dtype == torch.float8_e4m3fn for layer in kv)
