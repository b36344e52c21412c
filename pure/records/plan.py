"""The host's whole say about one step, packed into one int32 array.

The sections of `Inbox.data` follow each other in the order of `InboxShape`'s fields. Entries that name the null row
or copy block 0 on itself change nothing that is read, so an inbox may be padded to a fixed capacity.
"""

from typing import Any

import torch
import torch.utils._pytree as pytree
from jaxtyping import Float32, Int32
from torch import Tensor

from purestep.kernels.record import record, static
from purestep.pure.arrays import Array
from purestep.pure.records.layout import LayoutBounds
from purestep.pure.records.sampling_rows import TokenConstraints


@record(static=True)
class InboxShape:
    """Entries in each section of an inbox."""

    layout: int | None = None  # indices; None: row_of_index and query_start_loc stay
    ledger: int = 0  # rows written anew: (row, every ledger column but the step)
    sampling: int = 0  # (row, packed sampling row)
    tokens: int = 0  # (row, position, token id)
    rooms: int = 0  # (row, tokens that its blocks can hold)
    blocks: tuple[int, ...] = ()  # per group: (row, place in the row's table, block id)
    copies: tuple[int, ...] = ()  # per group: (source block, target block)
    zeros: tuple[int, ...] = ()  # per group: block
    forks: int = 0  # (source row, target row): ledger and tokens, copied before anything is written
    drafts: int = 0  # (row, place, token id): all the drafts that the row has then; (row, 0, -1) for none


_NO_ENTRIES = InboxShape()


@record
class Inbox:
    """The leaf that a plan arrives in. With nothing in it, `absorb` is the identity."""

    data: Int32[Array, " words"]
    shape: InboxShape = static()  # without a default: torch.compile traces none that is a record
    constraints: TokenConstraints | None = None  # replaces the state's where `has_constraints`
    bounds: LayoutBounds | None = static(default=None)  # None: the layout stays
    has_constraints: bool = static(default=False)
    floats: Float32[Array, " words"] | None = None  # the words seen as floats, where some are sampling rows

    @property
    def is_empty(self) -> bool:
        """Whether absorbing it changes nothing."""
        return self.bounds is None and not self.brings_data

    @property
    def brings_data(self) -> bool:
        """Whether it changes a tensor of the state; bounds alone are facts of the host."""
        return self.has_constraints or (self.shape is not _NO_ENTRIES and self.shape != _NO_ENTRIES)

    def to(self, device: torch.device | str) -> "Inbox":
        """The same record with tensors, which share no memory with the arrays of the host."""
        moved: Inbox = pytree.tree_map(lambda array: _tensor(array).to(device), self)
        return moved

    @staticmethod
    def make_empty(device: torch.device | str = "cpu") -> "Inbox":
        """Nothing to absorb."""
        return Inbox(torch.zeros(0, dtype=torch.int32, device=device), _NO_ENTRIES)


def _tensor(array: Array) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(array.copy())


@record
class StepPlan:
    """The step from one batch to another: legal between any two, and the only effect that the host has."""

    base: Any  # the InputBatch that the device reflects beforehand
    batch: Any  # the InputBatch that it reflects afterwards
    inbox: Inbox
