"""Kernels compiled before steps are run, on all cores at once, and not one after the other while they run."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
        Shapes(),  # type: ignore[no-untyped-call]
        mock.patch.object(JITFunction, "run", only_compile),
        ThreadPoolExecutor(os.cpu_count()) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        for call in calls:
            with suppress(Exception):
                call()


class Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives operations on tensors without memory, those that steps are made of, their results by shape and type.

    Torch does so by rules in Python, and imports its compiler and symbolic mathematics with them, which takes seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler to keep it out of here; nothing that is compiled by it comes here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, settings)) if isinstance(leaf, Tensor)]
        found = None
        if not func._schema.is_mutable and all(tensor.is_meta for tensor in tensors):
            found = _shape_and_type(func, args, settings, tensors)
        if found is None:
            return func(*args, **settings)
        return torch.empty(found[0], dtype=found[1], device="meta")


def _shape_and_type(
    func: Any, args: tuple[Any, ...], settings: dict[str, Any], tensors: list[Tensor]
) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Of the result, whose items lie in order; None where torch is to be asked."""
    aten = torch.ops.aten
    if torch.Tag.pointwise in func.tags and len(func._schema.returns) == 1:
        own, others = pytree.tree_map(_single, (args, settings))
        return np.broadcast_shapes(*[tensor.shape for tensor in tensors]), func(*own, **others).dtype
    if func in (aten.empty_like.default, aten.scatter.value) and "device" not in settings:
        return args[0].shape, settings.get("dtype") or args[0].dtype
    if func in (aten.mm.default, aten.mm.dtype) and args[0].shape[1] == len(args[1]):
        return (len(args[0]), args[1].shape[1]), args[2] if len(args) > 2 else args[0].dtype
    if func is aten.index.Tensor and all(i is not None and i.dtype != torch.bool for i in args[1]):
        rows = np.broadcast_shapes(*[index.shape for index in args[1]])
        return (*rows, *args[0].shape[len(args[1]) :]), args[0].dtype
    return None


def _single(leaf: Any) -> Any:
    """A tensor of one item, of the same type and as many dimensions."""
    return torch.ones((1,) * leaf.ndim, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _without_memory(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, tree)


def _of(layout: Layout) -> Layout:
    """A layout of this size."""
    count = layout.bounds.num_reqs
    rows, starts = (torch.empty(n, dtype=torch.int32, device="meta") for n in (count, count + 1))
    return Layout(rows, starts, layout.bounds)
