"""Kernels compiled before steps are run, on all cores at once, and not one after the other while they run."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.pure.record import replace
from purestep.pure.records.layout import Layout
from purestep.pure.records.params import Params
from purestep.pure.step import step
from purestep.state.run import BoundStep


def compile_steps(bound: BoundStep, layouts: Sequence[Layout]) -> None:
    """Compile what steps of these layouts launch on a GPU; elsewhere nothing is compiled, and nothing happens."""
    if bound.buffers.device.type == "cuda":
        compile_ahead(steps_without_memory(bound, layouts))


def steps_without_memory(bound: BoundStep, layouts: Sequence[Layout]) -> list[Callable[[], Any]]:
    """Steps of these layouts on tensors of the meta device, which have shapes and no memory."""
    buffers = bound.buffers
    with buffers.put_back():
        state = _without_memory(buffers.laid_out(Layout.make_empty()))
    params = Params(_without_memory(bound.prepared.tree))
    run = torch.no_grad()(step)
    return [
        partial(run, bound.model, params, replace(state, layout=_of(layout)), kernels=bound.kernels)
        for layout in layouts
    ]


def compile_ahead(calls: Iterable[Callable[[], object]]) -> None:
    """Compile the Triton kernels that these calls would launch; nothing is launched: give them tensors without memory.

    A call that fails is left out: where its kernels are launched, they are compiled, or it is told why they can not be.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with (
        mock.patch.object(JITFunction, "run", only_compile),
        ThreadPoolExecutor(os.cpu_count()) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        for call in calls:
            with suppress(Exception):
                call()


def _without_memory(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, tree)


def _of(layout: Layout) -> Layout:
    """A layout of this size."""
    count = layout.bounds.num_reqs
    rows, starts = (torch.empty(n, dtype=torch.int32, device="meta") for n in (count, count + 1))
    return Layout(rows, starts, layout.bounds)
