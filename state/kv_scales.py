"""`DueScales`: scales of keys and values that are calculated once, from the first real step, and never change again.

What lies in the cache was stored by them, so they are settled before a layer writes for the first time. Made-up batches
and captures run with the plain kernels: whatever they read, no scale is made of it.
Source: vllm/v1/worker/gpu_model_runner.py execute_model (calculate_kv_scales).
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from purestep.kernels.record import replace
from purestep.kernels.reference.compositions import turned_heads
from purestep.kernels.types import Kernels


class DueScales:
    """The layers whose scales are still 1 and are to be calculated; false once there is none."""

    def __init__(self, layers: Iterable[int] = ()) -> None:
        self._due = frozenset(layers)
        self._calculated = set[int]()  # by the step that runs

    def __bool__(self) -> bool:
        return bool(self._due)

    def begin(self) -> None:
        """A step begins: what one that failed has calculated is due again."""
        self._calculated = set()

    def keep(self) -> None:
        """The step is taken over, and its scales with it."""
        self._due -= self._calculated

    def calculating(self, kernels: Kernels) -> Kernels:
        """These kernels, where attention writes a layer's scales before it uses them, if they are due.

        They are made of the step's keys, normed and turned, and values; padding and rows that run idle do not count.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, *batch: Tensor, **how: Any) -> Any:
            self._calculate(kernels, k, v, kv, batch[-1], how.get("kv_scales"))
            return kernels.attend(q, k, v, kv, *batch, **how)

        def attend_qkv(_: Kernels, qkv: Tensor, kv: Tensor, *batch: Tensor, **how: Any) -> Any:
            turn = {name: how.get(name) for name in ("cos", "sin", "q_gain", "k_gain", "eps")}
            k, v = turned_heads(kernels, qkv, kv, **turn)[1:]  # type: ignore[arg-type]
            self._calculate(kernels, k, v, kv, batch[-1], how.get("kv_scales"))
            return kernels.attend_qkv(kernels, qkv, kv, *batch, **how)

        return replace(kernels, attend=attend, attend_qkv=attend_qkv)

    def _calculate(
        self,
        kernels: Kernels,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        slot_mapping: Tensor,
        kv_scales: Tensor | None,
    ) -> None:
        if kv_scales is None:
            return  # the kernels refuse that by name
        layer = kv_scales.storage_offset() // 2
        if layer in self._due - self._calculated:
            kv_scales.copy_(kernels.scales_of(k, v, slot_mapping >= kv.shape[2]))  # block 0 is nobody's
            self._calculated.add(layer)
