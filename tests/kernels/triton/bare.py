"""A decode step on the device, as the engine captures it, with neither engine nor scheduler."""

from typing import Any

import torch

from purestep.kernels.triton import cuda_donating
from purestep.kernels.types import Kernels
from purestep.pure.initial import initial_state
from purestep.pure.models.model import Model
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.layout import Layout, LayoutBounds, bucket
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.state import Ledger, StepState
from purestep.pure.step import step

BLOCK_SIZE = 16
MOST_STEPS = 150  # from one reset to the next


class BareStep:
    """`batch` requests, each with the same number of tokens known and all but the last in the cache."""

    def __init__(
        self,
        model: Model,
        params: Params,
        batch: int,
        *,
        context: int = 1120,
        kernels: Kernels | None = None,
        device: str = "cuda",
        seed: int = 0,
    ) -> None:
        self.model, self.params, self.context = model, params, context
        self.kernels = kernels or cuda_donating()
        longest = context + MOST_STEPS
        num_blocks = -(-longest // BLOCK_SIZE)
        limits = BatchLimits(batch, longest, model.vocab_size, (BLOCK_SIZE,), (batch * num_blocks + 1,))
        dtype = params.tree["norm"].dtype
        empty = initial_state(model, limits, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        for kv in empty.kv:
            kv.normal_(generator=generator)
        rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
        blocks = torch.arange(batch * num_blocks, dtype=torch.int32, device=device).view(batch, -1) + 1
        empty.block_tables[0][:batch] = blocks
        empty.room[:batch] = longest
        empty.room[:batch] = longest
        bounds = LayoutBounds(batch, batch, 1, bucket(longest))
        self.state: StepState = replace(empty, layout=Layout(rows[:batch].clone(), rows, bounds))
        self.tokens = torch.randint(
            model.vocab_size,
            self.state.token_ids.shape,
            generator=generator,
            device=device,
            dtype=torch.int32,
        )
        self.reset()

    def reset(self) -> None:
        """Back to the first step; what the cache holds past the context is of no account."""
        state = self.state
        state.token_ids.copy_(self.tokens)
        column = [self.context - 1, self.context, 5, self.context + MOST_STEPS - 1, 1, 0, 0]
        start = torch.tensor(column, dtype=torch.int32)[:, None].expand_as(state.ledger.table).clone()
        start[:, -1] = 0
        state.ledger.table.copy_(start)

    def run(self) -> StepOutput:
        """One step."""
        with torch.no_grad():
            state, output = step(self.model, self.params, self.state, kernels=self.kernels)
        assert state.ledger.table.data_ptr() == self.state.ledger.table.data_ptr()
        return output

    def captured(self) -> Any:
        """A graph of one step."""
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """What steps change, but for the null block and the null row, where padding writes."""
        state: Any = self.state
        ledger: Ledger = state.ledger
        return ledger.table, state.token_ids[:-1], *(kv[1:] for kv in state.kv)
