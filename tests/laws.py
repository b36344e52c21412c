"""Laws as reusable assertions."""

import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import attrs
import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.pure.arrays import Tape
from purestep.pure.persistent import Map
from purestep.pure.record import replace
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.inputs import StepInputs
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.plan import StepPlan
from purestep.pure.records.state import StepState
from purestep.state.lease import Leased
from purestep.state.moments import Moment, rerun
from purestep.state.run import BoundStep

T = TypeVar("T")


def assert_pure(stage: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The purity law: a call leaves its inputs bit for bit as they were, and a second call gives the same.

    Returns the stage's result.
    """
    before = digest((args, kwargs))
    first = stage(*args, **kwargs)
    assert digest((args, kwargs)) == before, f"{_name(stage)} changed its arguments"
    result = digest(first)
    second = stage(*args, **kwargs)
    assert digest((args, kwargs)) == before, f"{_name(stage)} changed its arguments when called again"
    assert digest(first) == result, f"{_name(stage)} changed its first result when called again"
    assert digest(second) == result, f"{_name(stage)} gave another result when called again"
    return first


def assert_rows_are_a_partition(batch: InputBatch) -> None:
    """Every known request has one row, or is parked; the batch runs distinct rows, the tokens that its layout says.

    The last may be past where requests were forked since the step: a fork takes the id of a request that has ended.
    """
    named = {row: request.req_id for row, request in enumerate(batch.rows.requests) if request is not None}
    assert named == {row: req_id for req_id, row in batch.row_of.items()}
    assert not batch.row_of.keys() & batch.parked.keys()
    for column in (batch.rows.tokens, *batch.rows.block_ids):
        assert [row for row, entry in enumerate(column) if entry is not None] == sorted(named)
    if batch.forks:
        return
    layout = batch.layout
    assert [named.get(row) for row in layout.row_of_index.tolist()] == list(batch.req_ids)
    assert len(set(batch.req_ids)) == len(batch.req_ids) == layout.bounds.num_reqs
    counts = np.diff(layout.query_start_loc)
    assert layout.query_start_loc[0] == 0 and layout.query_start_loc[-1] == layout.bounds.num_tokens
    assert layout.bounds.max_query_len == max(counts, default=0) and min(counts, default=1) >= 1


def assert_bounds(batch: InputBatch, state: StepState) -> None:
    """settled <= truth on the device <= bound, for every row in use of a state that has run the batch's step.

    Rows that ran have room for all of it; one that sits out may have given up the block that it goes on in.
    """
    columns, rows = batch.columns, sorted(batch.row_of.values())
    truth = state.ledger.num_computed_tokens.numpy()[rows]
    assert (columns.num_computed_tokens_settled[rows] <= truth).all()
    assert (truth <= columns.num_computed_tokens_bound[rows]).all()
    ran = np.isin(rows, batch.layout.row_of_index)
    assert (truth <= columns.room[rows])[ran].all()


def written_slots(state: StepState, inputs: StepInputs) -> list[Tensor]:
    """Per KV group, the slots that a step's real tokens write. Those of block 0 are nobody's and are left out."""
    real = inputs.slot_mapping[:, : int(inputs.query_start_loc[-1])]
    return [slots[slots >= size] for slots, size in zip(real, state.block_sizes, strict=True)]


def assert_one_writer(state: StepState, inputs: StepInputs) -> None:
    """No two tokens of a step go to one slot, no two requests write one block."""
    index, _ = reference.ragged_index(inputs.query_start_loc, int(inputs.query_start_loc[-1]))
    for slots, size in zip(inputs.slot_mapping, state.block_sizes, strict=True):
        writers: dict[int, int] = {}
        written = [(slot, r) for slot, r in zip(slots.tolist(), index.tolist(), strict=False) if slot >= size]
        assert len({slot for slot, _ in written}) == len(written), "two tokens go to one slot"
        for slot, request in written:
            assert writers.setdefault(slot // size, request) == request, (
                f"block {slot // size} has two writers"
            )


def assert_frame(
    before: StepState, after: StepState, slots: Sequence[Tensor], copied: Sequence[Sequence[int]] = ()
) -> None:
    """The frame rule: KV of blocks >= 1 keeps every bit, but for these slots and copied blocks of each KV group."""
    for layer, group in enumerate(before.group_of_layer):
        size = before.block_sizes[group]
        old, new = (_bits(_by_slot(state.kv[layer])) for state in (before, after))
        may_change = torch.zeros(len(old), dtype=torch.bool)
        may_change[:size] = True
        may_change[slots[group]] = True
        for block in copied[group] if copied else ():
            may_change[block * size : (block + 1) * size] = True
        changed = (old != new).flatten(1).any(1) & ~may_change
        assert not changed.any(), f"layer {layer}: slots {changed.nonzero().flatten().tolist()} changed"


def assert_prefix_kept(before: StepState, after: StepState, rows: Sequence[int]) -> None:
    """The prefix law: tokens and KV below the lengths that these rows had are as they were.

    Each state is read through its own block tables: a row whose shared block was copied reads the copy, and the block
    itself belongs to others, who may have left in the same step. A row that sits out may have given up the block that
    it goes on in, and gets a copy before it does: what lies past its room is looked at then.
    """
    for row in rows:
        known = int(before.ledger.num_known_tokens[row])
        rooms = [int(state.room[row]) for state in (before, after)]
        computed = torch.arange(min(int(before.ledger.num_computed_tokens[row]), *rooms))
        assert torch.equal(before.token_ids[row, :known], after.token_ids[row, :known])
        for layer, group in enumerate(before.group_of_layer):
            old, new = (
                _bits(_by_slot(state.kv[layer])[_slots(state, group, row, computed)])
                for state in (before, after)
            )
            assert torch.equal(old, new), f"KV of row {row} changed below its length"


def assert_same_rows(a: StepState, b: StepState, rows: Sequence[int]) -> None:
    """Two states say the same of these rows: ledger, known tokens, blocks of computed ones, sampling parameters."""
    assert torch.equal(a.ledger.table[:, rows], b.ledger.table[:, rows])
    assert torch.equal(a.sampling.floats[rows], b.sampling.floats[rows])
    assert torch.equal(a.sampling.table[rows], b.sampling.table[rows])
    assert torch.equal(a.room[rows], b.room[rows])
    if a.ledger.drafts is not None and b.ledger.drafts is not None:
        assert torch.equal(a.ledger.drafts[rows], b.ledger.drafts[rows])
    for row in rows:
        known, computed = int(a.ledger.num_known_tokens[row]), int(a.ledger.num_computed_tokens[row])
        assert torch.equal(a.token_ids[row, :known], b.token_ids[row, :known])
        for ours, theirs, size in zip(a.block_tables, b.block_tables, a.block_sizes, strict=True):
            used = -(-computed // size)
            assert torch.equal(ours[row, :used], theirs[row, :used])


def assert_rewound(then: StepState, now: StepState, rows: Sequence[int]) -> None:
    """The state is what it was: every bit of the ledger, and of these rows all that steps read."""
    assert torch.equal(then.ledger.table, now.ledger.table), "the ledger is another one"
    assert_same_rows(then, now, rows)
    assert_prefix_kept(then, now, rows)


def assert_forked(state: StepState, parent: int, child: int) -> None:
    """Two rows have one history: ledger and known tokens are the same to the last bit."""
    assert torch.equal(state.ledger.table[:, parent], state.ledger.table[:, child])
    known = int(state.ledger.num_known_tokens[parent])
    assert torch.equal(state.token_ids[parent, :known], state.token_ids[child, :known])


def assert_reruns(
    bound: BoundStep,
    moment: Moment,
    leased: Leased,
    plans: Sequence[StepPlan],
    tokens: Sequence[Any],
    ledger: Tensor,
) -> Leased:
    """From the moment, the plans bring these tokens again, and leave this ledger, to the last bit."""
    leased, outputs = rerun(bound, moment, leased, plans)
    assert [pending.result().sampled_token_ids.tolist() for pending in outputs] == list(tokens)
    assert torch.equal(leased.value.ledger.table, ledger), "the ledger is another one"
    return leased


def assert_same_output(ours: StepOutput, theirs: StepOutput, num_reqs: int) -> None:
    """The padded output says of the real requests what the other one says; behind them nothing is kept."""
    assert (ours.sampled_token_ids[num_reqs:] == -1).all()
    for name in ("sampled_token_ids", "num_computed_tokens", "active", "has_nan"):
        assert np.array_equal(getattr(ours, name)[:num_reqs], getattr(theirs, name).numpy())
    if theirs.logprobs_tensors is None:
        assert ours.logprobs_tensors is None
        return
    width = theirs.sampled_token_ids.shape[1]
    kept = np.flatnonzero(theirs.sampled_token_ids.numpy().ravel() >= 0) if width > 1 else np.arange(num_reqs)
    for name in ("logprob_token_ids", "selected_token_ranks"):
        found = getattr(ours.logprobs_tensors, name)[kept]
        assert np.array_equal(found, getattr(theirs.logprobs_tensors, name).numpy()[kept])
    np.testing.assert_allclose(
        ours.logprobs_tensors.logprobs[kept],
        theirs.logprobs_tensors.logprobs.numpy()[kept],
        rtol=0,
        atol=1e-9,
    )


def with_canary(state: StepState, value: float) -> StepState:
    """The state with this number in every slot of the KV cache."""
    return replace(state, kv=tuple(torch.full_like(kv, value) for kv in state.kv))


def _slots(state: StepState, group: int, row: int, position: Tensor) -> Tensor:
    """Where these positions of a row lie in a KV group."""
    size = state.block_sizes[group]
    return state.block_tables[group][row, position // size] * size + position % size


def _by_slot(kv: Tensor) -> Tensor:
    """[slots, keys and values, kv_heads, dim]"""
    return kv.transpose(1, 2).flatten(0, 1)


def _bits(kv: Tensor) -> Tensor:
    return kv.contiguous().view({4: torch.int32, 8: torch.int64}[kv.element_size()])


def leaf_bytes(record: Any) -> list[bytes]:
    """What the tensors of a record hold: much cheaper than `digest`, and blind to all else."""
    return [_tensor_bytes(leaf) for leaf in pytree.tree_leaves(record) if isinstance(leaf, Tensor)]


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same to the last bit: types, shapes, dtypes, NaN payloads and signs of zero.

    Looks into records, tuples, lists, dicts (order apart), sets, tensors, arrays and tapes.
    """
    return digest(a) == digest(b)


def digest(value: Any) -> bytes:
    """A hash of everything that `equal` compares.

    Raises:
        TypeError: a value whose content can not be seen: teach it here rather than compare it by address.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def _parts(value: Any) -> list[bytes]:
    kind = _name_of(type(value))
    if type(value) in _SIMPLE or (isinstance(value, tuple | list) and _SIMPLE.issuperset(map(type, value))):
        return [kind, repr(value).encode()]
    if isinstance(value, torch.Tensor):
        return [
            kind,
            repr((value.dtype, tuple(value.shape), str(value.device))).encode(),
            _tensor_bytes(value),
        ]
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            return [kind, str(value.shape).encode(), *_parts(value.tolist())]
        return [kind, repr((value.dtype.str, value.shape)).encode(), value.tobytes()]
    if isinstance(value, Tape):
        return [kind, value.array.tobytes()]
    if isinstance(value, tuple | list):
        return [kind, str(len(value)).encode(), *(digest(item) for item in value)]
    if isinstance(value, Map):
        return [kind, str(len(value.shards)).encode(), digest(dict(value.items()))]
    if isinstance(value, Mapping):
        pairs = sorted(digest(key) + digest(item) for key, item in value.items())
        return [kind, *pairs]
    if isinstance(value, set | frozenset):
        return [kind, *sorted(digest(item) for item in value)]
    if attrs.has(type(value)):
        return [kind, *(digest(getattr(value, name)) for name in _field_names(type(value)))]
    if isinstance(value, float):
        return [kind, np.float64(value).tobytes()]  # repr hides the sign and payload of NaN
    if isinstance(value, torch.nn.Module):
        return [kind, digest(dict(value.state_dict(keep_vars=False)))]
    if value is None or isinstance(value, _PLAIN):
        return [kind, repr(value).encode()]
    if callable(value):
        return [kind, repr(value).encode()]  # functions are compared by identity
    raise TypeError(f"digest() does not know how to look into a {type(value).__qualname__}")


@cache
def _name_of(kind: type) -> bytes:
    return f"{kind.__module__}.{kind.__qualname__}".encode()


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(kind))


_SIMPLE = frozenset([bool, int, str, type(None)])  # whose repr says all, also inside tuples and lists
_PLAIN = (
    bool,
    int,
    str,
    bytes,
    complex,
    range,
    slice,
    torch.dtype,
    torch.device,
    np.dtype,
    type(...),
    enum.Enum,
)


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _name(stage: Callable[..., Any]) -> str:
    return getattr(stage, "__qualname__", repr(stage))
