"""What sampling takes beside the state: known to the host, and not to be expressed by a captured graph's key."""

from typing import Any

import torch
import torch.utils._pytree as pytree
from jaxtyping import Int
from torch import Tensor

from purestep.kernels.record import record, static
from purestep.pure.arrays import Array
from purestep.pure.records.logits_processor import Apply


@record
class ProcessorRows:
    """One function, and the requests of a batch that chose it."""

    index: Int[Array, " rows"]  # their places in the batch
    params: dict[str, Array]  # by name, [rows]
    apply: Apply = static()
    argmax_invariant: bool = static(default=False)


@record
class SamplingExtras:
    """Logits processors in the order in which they run, and ids whose log-probabilities are wanted."""

    processors: tuple[ProcessorRows, ...] = ()
    token_ids: Int[Array, "reqs ids"] | None = None  # -1 behind a request's own

    def to(self, device: torch.device | str) -> "SamplingExtras":
        """The same record with tensors."""
        moved: SamplingExtras = pytree.tree_map(lambda array: _tensor(array).to(device), self)
        return moved


def _tensor(array: Any) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(array.copy())
