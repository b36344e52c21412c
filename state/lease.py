"""`Leased`: the right to use persistent buffers, for one step."""

from typing import Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.pure.errors import StaleStateError
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.state import StepState


class Lender(Protocol):
    """What a lease is on: see PersistentBuffers."""

    generation: int

    def read(self, generation: int) -> StepState: ...


class Leased:
    """A handle on the state in persistent buffers. Each step consumes one and returns the next.

    `absorbed` is the batch that the state's host-written leaves reflect: a plan must start from it.
    """

    __slots__ = ("_buffers", "_generation", "absorbed")

    def __init__(self, buffers: Lender, generation: int, absorbed: InputBatch) -> None:
        self._buffers = buffers
        self._generation = generation
        self.absorbed = absorbed

    def is_on(self, buffers: Lender) -> bool:
        """Whether it is on these buffers."""
        return self._buffers is buffers

    @property
    def buffers(self) -> Lender:
        """What it is on."""
        return self._buffers

    @property
    def is_valid(self) -> bool:
        """Whether no step has consumed it since, and none has failed."""
        try:
            self._buffers.read(self._generation)
        except StaleStateError:
            return False
        return True

    @property
    def generation(self) -> int:
        """The step that made this state."""
        return self._generation

    @property
    def value(self) -> StepState:
        """The state as views of the buffers; the next step overwrites what it shows.

        Raises:
            StaleStateError: a later step consumed it.
        """
        return self._buffers.read(self._generation)

    def clone(self) -> StepState:
        """A copy of the state, KV cache included, that no step touches: for gradients, or to look at later."""
        state = self.value
        with torch.no_grad():
            copied: StepState = pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state
            )
        return copied

    def __repr__(self) -> str:
        try:
            state = self.value
        except StaleStateError:
            return f"StepState(~consumed at step {self._generation}~)"
        rows, width = state.token_ids.shape
        return f"Leased(StepState at step {self._generation}: {rows - 1} rows x {width} tokens, {len(state.kv)} layers)"
