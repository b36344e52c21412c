"""Model parameters as an argument."""

from typing import Any

from purestep.kernels.record import record, static


@record
class Params:
    """A model's parameters: a pytree of fused tensors, and the version that names their values.

    KV blocks carry the version that made them, so that a prefix computed with other weights is never reused.
    """

    tree: Any
    version: int = static(default=0)
