"""`PersistentBuffers`: the one owner of memory that changes from step to step.

A step is a pure function; on buffers it is given kernels that write their argument's storage, so the state that
comes back lies where the old one lay. `adopt` checks that: a leaf in fresh storage is refused, since copying a KV
cache once a step is the mistake that this module exists to exclude.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from purestep.pure.errors import FreshStorageError, StaleStateError
from purestep.pure.initial import initial_state
from purestep.pure.models.model import Model
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.layout import Layout
from purestep.pure.records.plan import Inbox
from purestep.pure.records.sampling_rows import SamplingRows
from purestep.pure.records.state import StepState
from purestep.state.lease import Leased


class PersistentBuffers:
    """The tensors of one StepState at fixed addresses, and the number of the last step that wrote them."""

    def __init__(
        self,
        model: Model,
        limits: BatchLimits,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.limits = limits
        self.device = torch.device(device)
        self.generation = 0
        self._broken: str | None = None
        state = initial_state(model, limits, dtype=dtype, device=device)
        # A layout is as long as its batch; it lies at the beginning of these, where captured graphs read it.
        self._row_of_index = torch.zeros(limits.max_num_reqs, dtype=torch.int32, device=device)
        self._query_start_loc = torch.zeros(limits.max_num_reqs + 1, dtype=torch.int32, device=device)
        self._state: StepState | None = state

    def lease(self) -> Leased:
        """A lease on emptied buffers: no request is known, older leases are stale, a failed step is forgotten.

        Blocks keep what they hold; nothing reads a block that no request was given.
        """
        state = self._opened()
        for leaf in (state.ledger.table, state.sampling.table, *state.block_tables):
            leaf.zero_()
        self._state = replace(
            state,
            sampling=SamplingRows(state.sampling.table),
            layout=self._placed(Layout.make_empty()),
            inbox=Inbox.make_empty(self.device),
        )
        self._broken = None
        self.generation += 1
        return Leased(self, self.generation, InputBatch.make_empty(self.limits))

    def read(self, generation: int) -> StepState:
        """The state, as views of the buffers, for the holder of this generation.

        Raises:
            StaleStateError: a later step consumed it, a step failed half-way, or the buffers are closed.
        """
        state = self._opened()
        if self._broken is not None:
            raise StaleStateError(
                f"this StepState is unusable: the step after {self.generation} failed half-way ({self._broken}). "
                "Begin anew with buffers.lease()"
            )
        if generation != self.generation:
            raise StaleStateError(
                f"this StepState was consumed at step {generation}; the buffers are at step {self.generation}. "
                "Use the lease that the last run returned, or clone() a state before running on"
            )
        return state

    def begin(self, generation: int) -> StepState:
        """The state, to be written by a step. Every lease is void until `adopt` is reached."""
        state = self.read(generation)
        self._broken = "it did not reach its end"
        return state

    def adopt(self, state: StepState, absorbed: InputBatch) -> Leased:
        """The lease on what a step returned. The layout and the inbox are taken over; all else must lie in place.

        Raises:
            FreshStorageError: a leaf came back in other storage.
        """
        for (name, before), (_, after) in zip(leaves(self._opened()), leaves(state), strict=True):
            if before.data_ptr() != after.data_ptr() or before.shape != after.shape:
                raise FreshStorageError(
                    f"{name} came back in fresh storage ({after.nbytes:,} bytes, shape {tuple(after.shape)}): "
                    "steps on buffers need kernels that donate, such as purestep.kernels.donating.donating"
                )
        self._state = state
        self._broken = None
        self.generation += 1
        return Leased(self, self.generation, absorbed)

    def laid_out(self, layout: Layout) -> StepState:
        """The state with another layout, in the place where layouts lie, and nothing to absorb: what is captured."""
        return replace(self._opened(), layout=self._placed(layout), inbox=Inbox.make_empty(self.device))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """What runs inside leaves no trace in ledger and layout. It must write no row but the null row."""
        state = self._opened()
        ledger, layout = state.ledger.table.clone(), state.layout
        arrays = layout.row_of_index.clone(), layout.query_start_loc.clone()
        try:
            yield
        finally:
            state.ledger.table.copy_(ledger)
            self._placed(Layout(*arrays, layout.bounds))

    def place(self, state: StepState) -> StepState:
        """The state with its layout where layouts lie."""
        layout = state.layout
        if layout.row_of_index.data_ptr() == self._row_of_index.data_ptr():
            return state
        return replace(state, layout=self._placed(layout))

    def _placed(self, layout: Layout) -> Layout:
        count = layout.bounds.num_reqs
        rows, starts = self._row_of_index[:count], self._query_start_loc[: count + 1]
        for place, values in ((rows, layout.row_of_index), (starts, layout.query_start_loc)):
            place.copy_(values if isinstance(values, Tensor) else torch.tensor(values))
        return Layout(rows, starts, layout.bounds)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(leaf.nbytes for _, leaf in leaves(self._opened()))

    def close(self) -> None:
        """Give the memory back; leases are stale from here on. Closing twice is allowed."""
        self._state = None

    def check_open(self) -> None:
        """Raises: StaleStateError if they are closed."""
        self._opened()

    def _opened(self) -> StepState:
        if self._state is None:
            raise StaleStateError("these buffers are closed and hold nothing: make new ones")
        return self._state

    def __repr__(self) -> str:
        if self._state is None:
            return "PersistentBuffers(closed)"
        rows = [(name, str(list(leaf.shape)), f"{leaf.nbytes:,}") for name, leaf in leaves(self._state)]
        rows.append(("total", "", f"{self.nbytes:,}"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{n:<{widths[0]}}  {s:<{widths[1]}}  {b:>{widths[2]}} bytes" for n, s, b in rows]
        return "\n".join(["PersistentBuffers", *lines])


def leaves(state: StepState) -> Iterator[tuple[str, Tensor]]:
    """The leaves that must keep their storage, by name."""
    yield "ledger", state.ledger.table
    yield "token_ids", state.token_ids
    yield "sampling", state.sampling.table
    for group, table in enumerate(state.block_tables):
        yield f"block_tables[{group}]", table
    for layer, kv in enumerate(state.kv):
        yield f"kv[{layer}]", kv
