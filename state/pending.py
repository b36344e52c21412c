"""`Pending`: a step's output on its way to the host."""

import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.pure.records.batch import InputBatch
from purestep.pure.records.outputs import StepOutput


class Pending:
    """The output of the step of `batch`; `result` waits for it. Settle with both: settle(now, batch, result())."""

    __slots__ = ("_output", "batch")

    def __init__(self, batch: InputBatch, output: StepOutput) -> None:
        self.batch = batch
        self._output = output

    def result(self) -> StepOutput:
        """The output on the host, numpy arrays in the order of `batch.req_ids`."""
        output: StepOutput = pytree.tree_map(_on_host, self._output)
        return output


def _on_host(leaf: Tensor | None) -> np.ndarray | None:
    return None if leaf is None else leaf.detach().cpu().numpy()
