"""`PersistentBuffers`: the one owner of memory that changes from step to step.

A step is a pure function; on buffers it is given kernels that write their argument's storage, so the state that
comes back lies where the old one lay. `adopt` checks that: a leaf in fresh storage is refused, since copying a KV
cache once a step is the mistake that this module exists to exclude.

Every leaf has a class, which says who may change it:

overwrite    the ledger, and what a drafter says and keeps: a new value each step
append-only  the KV cache and token ids: what lies below a request's length stays
once         scales of an eight-bit cache: 1, or calculated by the first real step, and the same from there on
host-written block tables, room, sampling rows, the layout: changed only by what a plan brings
inbox        the plan of the coming step, which `run` stages in memory of its own and `absorb` empties
"""

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.pure.errors import (
    DeviceMemoryError,
    DispatchError,
    FreshStorageError,
    KVCacheConfigError,
    StaleStateError,
)
from purestep.pure.initial import initial_state
from purestep.pure.models.model import Model
from purestep.pure.propose import equip
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.drafter import Drafter
from purestep.pure.records.kv_config import KVCacheConfig
from purestep.pure.records.layout import Layout
from purestep.pure.records.plan import Inbox
from purestep.pure.records.sampling_rows import SamplingRows
from purestep.pure.records.state import StepState
from purestep.state.device_memory import AvailableBytes, available_bytes
from purestep.state.kv_cache import initialize_kv_cache
from purestep.state.kv_scales import DueScales
from purestep.state.lease import Leased

CLASSES = {
    "ledger": "overwrite",
    "drafts": "overwrite",
    "kv": "append-only",
    "token_ids": "append-only",
    "kv_scales": "once",
    "block_tables": "host-written",
    "room": "host-written",
    "sampling": "host-written",
    "layout": "host-written",
    "inbox": "inbox",
}


@attrs.frozen
class Buffer:
    """One leaf: its name, its class, and where it lies."""

    name: str
    tensor: Tensor

    @property
    def kind(self) -> str:
        """Its class: overwrite, append-only, once, host-written or inbox."""
        return CLASSES[self.name.split("[")[0].split(".")[0]]


class PersistentBuffers:
    """The tensors of one StepState at fixed addresses, and the number of the last step that wrote them.

    The KV cache is what `kv_config` says; without one it has a tensor of `dtype` for every layer, as `initial_state`.
    With a `drafter` they hold what it keeps too. With `calculate_kv_scales` the first real step makes the scales of an
    eight-bit cache from its own keys and values, and runs eagerly for it; else they are 1.

    Raises:
        KVCacheConfigError: scales are to be calculated, and the cache has none.
        DeviceMemoryError: they would not fit in what `available` says of the device; nothing is allocated then.
    """

    def __init__(
        self,
        model: Model,
        limits: BatchLimits,
        *,
        kv_config: KVCacheConfig | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        available: AvailableBytes = available_bytes,
        drafter: Drafter | None = None,
        calculate_kv_scales: bool = False,
    ) -> None:
        self.limits = limits
        self.device = torch.device(device)
        self.generation = 0
        self._broken: str | None = None
        shapes = _equipped(initial_state(model, limits, dtype=dtype, device="meta"), drafter, limits)
        _check_memory(shapes, limits, kv_config, self.device, available)
        kv = None if kv_config is None else initialize_kv_cache(kv_config, device=device)
        state = _equipped(initial_state(model, limits, dtype=dtype, device=device, kv=kv), drafter, limits)
        if calculate_kv_scales and state.kv_scales is None:
            raise KVCacheConfigError(
                f"calculate_kv_scales with a cache of {', '.join({str(kv.dtype) for kv in state.kv}) or 'no layers'}: "
                "only float8_e4m3fn is stored by scales; ask for that type, or for no scales"
            )
        self.due_scales = DueScales(range(len(state.kv)) if calculate_kv_scales else ())
        # A layout is as long as its batch; it lies at the beginning of these, where captured graphs read it.
        self._row_of_index = torch.zeros(limits.max_num_reqs, dtype=torch.int32, device=device)
        self._query_start_loc = torch.zeros(limits.max_num_reqs + 1, dtype=torch.int32, device=device)
        self._state: StepState | None = state

    def lease(self) -> Leased:
        """A lease on emptied buffers: no request is known, older leases are stale, a failed step is forgotten.

        Blocks keep what they hold; nothing reads a block that no request was given.
        """
        state = self._opened()
        sampling = state.sampling
        host_written = (sampling.floats, sampling.table, state.room[:-1], *state.block_tables)
        for leaf in (state.ledger.table, *host_written):
            leaf.zero_()
        if state.ledger.drafts is not None:
            state.ledger.drafts.fill_(-1)
        self._state = replace(
            state,
            sampling=SamplingRows(sampling.floats, sampling.table),
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
                "Begin anew with buffers.lease(), or go on from a moment before: rewind(here, buffers.lease())"
            )
        if generation != self.generation:
            raise StaleStateError(
                f"this StepState was consumed at step {generation}; the buffers are at step {self.generation}.\n"
                "To branch on purpose, remember it first:  here = remember(leased, batch)  ...  "
                "run(bound, rewind(here, leased), plan)"
            )
        return state

    def begin(self, generation: int) -> StepState:
        """The state, to be written by a step. Every lease is void until `adopt` is reached."""
        state = self.read(generation)
        self._broken = "it did not reach its end"
        self.due_scales.begin()
        return state

    def adopt(self, state: StepState, absorbed: InputBatch) -> Leased:
        """The lease on what a step returned. The layout and the inbox are taken over; all else must lie in place.

        Raises:
            FreshStorageError: a leaf came back in other storage.
        """
        now = self._opened()
        # A replayed step gives back the very record that it was given.
        for (name, before), (_, after) in (
            () if state is now else zip(leaves(now), leaves(state), strict=True)
        ):
            if before.data_ptr() != after.data_ptr() or before.shape != after.shape:
                raise FreshStorageError(
                    f"{name} came back in fresh storage ({after.nbytes:,} bytes, shape {tuple(after.shape)}): "
                    "steps on buffers need kernels that donate, such as purestep.kernels.donating.donating"
                )
        if state.layout.query_start_loc.data_ptr() != self._query_start_loc.data_ptr():
            raise FreshStorageError(
                f"the layout of {state.layout.bounds.num_reqs} requests lies elsewhere than where captured graphs read "
                "it: put it in place with buffers.place(state) after absorbing a plan"
            )
        self._state = state
        self._broken = None
        self.due_scales.keep()
        self.generation += 1
        return Leased(self, self.generation, absorbed)

    def laid_out(self, layout: Layout) -> StepState:
        """The state with another layout, in the place where layouts lie, and nothing to absorb: what is captured."""
        return replace(self._opened(), layout=self._placed(layout), inbox=Inbox.make_empty(self.device))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """What runs inside leaves no trace in ledger, drafts and layout. It must write no row but the null row."""
        state = self._opened()
        copies, layout = [leaf.clone() for leaf in overwritten(state)], state.layout
        arrays = layout.row_of_index.clone(), layout.query_start_loc.clone()
        self._broken, broken = "what was captured meanwhile did not reach its end", self._broken
        try:
            yield
        finally:
            for leaf, copy in zip(overwritten(state), copies, strict=True):
                leaf.copy_(copy)
            self._placed(Layout(*arrays, layout.bounds))
            self._broken = broken

    def place(self, state: StepState) -> StepState:
        """The state with its layout where layouts lie."""
        layout = state.layout
        if layout.row_of_index.data_ptr() == self._row_of_index.data_ptr():
            return state
        return replace(state, layout=self._placed(layout))

    def check_layout(self, layout: Layout) -> None:
        """Raises: DispatchError for a layout of more requests than there is a place for."""
        if layout.bounds.num_reqs > self.limits.max_num_reqs:
            raise DispatchError(
                f"a layout of {layout.bounds.num_reqs} requests, padding included; these buffers have places for "
                f"max_num_reqs={self.limits.max_num_reqs}: pad to no more"
            )

    def _placed(self, layout: Layout) -> Layout:
        self.check_layout(layout)
        count = layout.bounds.num_reqs
        rows, starts = self._row_of_index[:count], self._query_start_loc[: count + 1]
        for place, values in ((rows, layout.row_of_index), (starts, layout.query_start_loc)):
            place.copy_(values if isinstance(values, Tensor) else torch.tensor(values))
        return Layout(rows, starts, layout.bounds)

    @property
    def specification(self) -> tuple[Buffer, ...]:
        """Every leaf, by name; the layout's are as long as the largest batch."""
        state = self._opened()
        layout = (
            ("layout.row_of_index", self._row_of_index),
            ("layout.query_start_loc", self._query_start_loc),
        )
        return tuple(Buffer(*pair) for pair in (*leaves(state), *layout, ("inbox", state.inbox.data)))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; memory that layers share counts once."""
        return sum(storage.nbytes() for storage in _storages(self.specification).values())

    def close(self) -> None:
        """Give the memory back; leases are stale from here on. Closing twice is allowed."""
        self._state = None
        self._row_of_index = self._query_start_loc = torch.zeros(0, dtype=torch.int32)

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
        owner_of: dict[int, str] = {}
        rows = [("name", "class", "shape", "bytes")]
        for buffer in self.specification:
            owner = owner_of.setdefault(buffer.tensor.untyped_storage().data_ptr(), buffer.name)
            is_view = owner != buffer.name and buffer.tensor.numel() > 0
            size = f"in {owner}" if is_view else f"{buffer.tensor.nbytes:,}"
            rows.append((buffer.name, buffer.kind, str(list(buffer.tensor.shape)), size))
        rows.append(("total", "", "", f"{self.nbytes:,}"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            f"{n:<{widths[0]}}  {c:<{widths[1]}}  {s:<{widths[2]}}  {b:>{widths[3]}}".rstrip()
            for n, c, s, b in rows
        ]
        return "\n".join(["PersistentBuffers", *lines])


def overwritten(state: StepState) -> list[Tensor]:
    """The leaves that every step writes anew: the ledger, and what a drafter says and keeps."""
    leaves = pytree.tree_leaves((state.ledger, state.draft_probs, state.drafter))
    return [leaf for leaf in leaves if leaf is not None]


def leaves(state: StepState) -> Iterator[tuple[str, Tensor]]:
    """The leaves that must keep their storage, by name."""
    yield "ledger", state.ledger.table
    for place, tensor in enumerate(overwritten(state)[1:]):
        yield f"drafts[{place}]", tensor
    yield "token_ids", state.token_ids
    yield "sampling.floats", state.sampling.floats
    yield "sampling.table", state.sampling.table
    for group, table in enumerate(state.block_tables):
        yield f"block_tables[{group}]", table
    yield "room", state.room
    for layer, kv in enumerate(state.kv):
        yield f"kv[{layer}]", kv
    if state.kv_scales is not None:
        yield "kv_scales", state.kv_scales


def _storages(buffers: tuple[Buffer, ...]) -> dict[int, torch.UntypedStorage]:
    """The memory that they lie in, each piece once."""
    storages = [buffer.tensor.untyped_storage() for buffer in buffers]
    return {storage.data_ptr(): storage for storage in storages}


def _equipped(state: StepState, drafter: Drafter | None, limits: BatchLimits) -> StepState:
    return state if drafter is None else equip(state, drafter, vocab_size=limits.vocab_size)


def _check_memory(
    shapes: StepState,
    limits: BatchLimits,
    kv_config: KVCacheConfig | None,
    device: torch.device,
    available: AvailableBytes,
) -> None:
    """Refuse buffers that do not fit, with the numbers, before any of them is allocated."""
    asked = {"kv": 0, "token_ids": 0, "other": 0}
    for name, leaf in leaves(shapes):
        key = name.split("[")[0]
        asked[key if key in asked else "other"] += leaf.nbytes
    if kv_config is not None:
        asked["kv"] = kv_config.num_bytes
    total, there = sum(asked.values()), available(device)
    if total > there:
        raise DeviceMemoryError(
            f"buffers on {device} need {total:,} bytes and {there:,} are there: {asked['kv']:,} for a KV cache of "
            f"{limits.num_blocks} blocks, {asked['token_ids']:,} for token ids of {limits.max_num_reqs + 1} rows x "
            f"{limits.max_model_len} tokens, {asked['other']:,} for tables. Lower kv_cache_bytes, max_model_len or "
            "max_num_reqs"
        )
