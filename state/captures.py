"""What is captured before the first step, and compiled before that."""

from collections.abc import Sequence

from purestep.pure.dispatch import capture_descriptors
from purestep.pure.padding import capture_layout
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchKeys
from purestep.pure.records.layout import Layout, SamplerShape
from purestep.state.compilation import compile_steps
from purestep.state.graphs import CaptureReport, GraphKey
from purestep.state.progress import watched
from purestep.state.run import BoundStep
from purestep.state.sizes import GREEDY_SHAPE, RANDOM_SHAPE, UNROLLED_REQS, Sizes


def graph_keys(
    keys: DispatchKeys, *, two_phase: bool = False, samplers: tuple[SamplerShape, ...] = (), unroll: int = 1
) -> list[GraphKey]:
    """What is captured before the first step: pieces, then full graphs, of these samplers, random and greedy.

    The largest come first. Graphs of `unroll` steps are of random and greedy decoding, of few requests.

    With `two_phase`, full graphs are those of the halves: each `execute`, and its samples behind it. Where decoding
    requests have drafts, there are graphs that verify them, and for batches of any kind also those that do not.
    """
    found, shapes = list[GraphKey](), (*samplers, RANDOM_SHAPE, GREEDY_SHAPE)
    most = keys.uniform_query_len - 1
    for mode, descriptors in capture_descriptors(keys):
        for descriptor in descriptors:
            if mode is CUDAGraphMode.PIECEWISE:
                found.append(GraphKey(descriptor, None))
                continue
            for num_drafts in (most,) if descriptor.uniform else dict.fromkeys((most, 0)):
                key = GraphKey(descriptor, None, num_drafts=num_drafts)
                if two_phase:
                    found.append(replace(key, half="execute"))
                    found += [replace(key, sampler=shape, half="sample") for shape in shapes]
                else:
                    if unroll > 1 and descriptor.uniform and descriptor.num_tokens <= UNROLLED_REQS:
                        several = (RANDOM_SHAPE, GREEDY_SHAPE)
                        found += [replace(key, sampler=shape, num_steps=unroll) for shape in several]
                    found += [replace(key, sampler=shape) for shape in shapes]
    return found


def wanted_keys(keys: DispatchKeys, sizes: Sizes, *, unroll: int = 1) -> list[GraphKey]:
    """What is captured before the first step, for these sizes: see `graph_keys`."""
    found = graph_keys(keys, samplers=sizes.capture_samplers, unroll=unroll)
    if sizes.capture_halves:
        found += graph_keys(keys, two_phase=True, samplers=sizes.capture_samplers)
    return found


def capture_layouts(keys: Sequence[GraphKey], limits: BatchLimits) -> list[Layout]:
    """The layouts of these captures. Those of several steps launch what those of one do, and are left out."""
    return [
        capture_layout(key.descriptor, limits, sampler=key.sampler or GREEDY_SHAPE, num_drafts=key.num_drafts)
        for key in keys
        if key.num_steps == 1
    ]


def capture(bound: BoundStep, keys: DispatchKeys, sizes: Sizes, *, unroll: int = 1) -> CaptureReport | None:
    """Capture what batches are dispatched to; None: this step has no graphs."""
    if bound.captured is None:
        return None
    found = wanted_keys(keys, sizes, unroll=unroll)
    if sizes.kv_cache_bytes is not None:  # else it was done with the trial run's
        compile_steps(bound, capture_layouts(found, bound.buffers.limits))
    return bound.captured.capture(
        found, watch=lambda keys: watched(list(keys), "capturing", shown=sizes.capture_progress)
    )
