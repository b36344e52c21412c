"""The moves on whole states: `remember` where a device is, `rewind` to it from anywhere, `rerun` what was run then.

A moment copies what is overwritten: the ledger, drafts, and the token ids of its rows, 4 bytes a token, since rows
are given to others. Keys and values stay where they are: below a request's length they never change while somebody
holds their blocks. Who gives blocks to requests has to count the moment as a holder of `moment.blocks`, and to have a
block copied that others hold before it is written; `hold` and `schedule` of `purestep.pure.scheduler` do.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from purestep.kernels.donating import donating
from purestep.pure.absorb import absorb
from purestep.pure.errors import StaleStateError
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.plan import StepPlan
from purestep.state.buffers import PersistentBuffers, overwritten
from purestep.state.graphs import GraphKey
from purestep.state.lease import Leased
from purestep.state.pending import Pending
from purestep.state.run import BoundStep, run
from purestep.state.staging import stage


@attrs.frozen(eq=False)
class Moment:
    """A remembered state: what the host knew, and copies of what the device overwrites."""

    batch: InputBatch  # what the host knew; the next step follows from it
    absorbed: InputBatch  # what the device's host-written leaves reflected
    overwritten: tuple[Tensor, ...]
    rows: Int32[Tensor, " used"]  # those in use
    token_ids: Int32[Tensor, "used longest"]  # of these rows
    step: int  # generation of the buffers
    _buffers: "weakref.ref[Any]"  # PersistentBuffers

    @property
    def blocks(self) -> tuple[Int32[np.ndarray, " blocks"], ...]:
        """The blocks that must not be written or given to others while it may be rewound to, per KV group."""
        tapes = [[tape for tape in group if tape is not None] for group in self.batch.rows.block_ids]
        for entry in self.batch.parked.values():
            tapes = [[*group, tape] for group, tape in zip(tapes, entry.block_ids, strict=True)]
        nothing = np.zeros(0, np.int32)
        return tuple(
            [np.unique(np.concatenate([nothing, *(tape.array for tape in group)])) for group in tapes]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it takes beside the blocks."""
        return sum(tensor.nbytes for tensor in (*self.overwritten, self.rows, self.token_ids))

    def buffers_of(self, leased: Leased) -> PersistentBuffers:
        """The buffers that it is of.

        Raises:
            StaleStateError: they are gone, or the lease is on other ones.
        """
        buffers: PersistentBuffers | None = self._buffers()
        if buffers is None or not leased.is_on(buffers):
            raise StaleStateError(
                f"this moment is of {'buffers that are gone' if buffers is None else 'other buffers than the lease'}: "
                "a moment can be rewound to only on the buffers on which it was remembered"
            )
        return buffers


def remember(leased: Leased, batch: InputBatch) -> Moment:
    """The state as it is once every step begun so far has run, with what the host knows of it; nothing waits for it.

    Raises:
        StaleStateError: the lease was consumed by a step.
    """
    state, absorbed = leased.value, leased.absorbed
    used = sorted(absorbed.row_of.values())
    columns = absorbed.columns
    known = np.maximum(columns.num_tokens, columns.num_computed_tokens_bound + 1)[used]  # at most
    longest = min(int(known.max(initial=0)), absorbed.limits.max_model_len)
    with torch.no_grad():
        rows = torch.tensor(used, dtype=torch.int32, device=state.token_ids.device)
        return Moment(
            batch=batch,
            absorbed=absorbed,
            overwritten=tuple([leaf.clone() for leaf in overwritten(state)]),
            rows=rows,
            token_ids=state.token_ids[rows, :longest],
            step=leased.generation,
            buffers=weakref.ref(leased.buffers),
        )


def rewind(moment: Moment, leased: Leased) -> Leased:
    """The buffers as they were at the moment, from whatever they hold now: the lease is consumed, a new one comes back.

    What the host writes is brought back by a plan from what the buffers reflect now, the rest from the moment's copies.
    Go on with `run(bound, rewound, plan_step(update_states(moment.batch, output), rewound.absorbed))`. Outputs of steps
    begun after the moment are of another history: they must not be settled any more. Those of steps that were on their
    way then may be, again.

    Raises:
        StaleStateError: a lease that was consumed or is on other buffers, or buffers that are closed.
    """
    buffers = moment.buffers_of(leased)
    then = replace(moment.absorbed, block_copies=(), blocks_to_zero=(), forks=())  # these were done
    leased.value  # noqa: B018  # a stale lease is refused before a plan is made
    inbox = plan_step(then, leased.absorbed).inbox
    state = buffers.begin(leased.generation)
    with torch.no_grad():
        if not inbox.is_empty:
            staged = replace(state, inbox=stage(inbox, buffers.device))
            state = buffers.place(absorb(staged, kernels=donating))
        for leaf, copy in zip(overwritten(state), moment.overwritten, strict=True):
            leaf.copy_(copy)
        state.token_ids[moment.rows, : moment.token_ids.shape[1]] = moment.token_ids
    return buffers.adopt(state, moment.absorbed)


def rerun(
    bound: BoundStep,
    moment: Moment,
    leased: Leased,
    plans: Iterable[StepPlan | tuple[StepPlan, GraphKey | None]],
) -> tuple[Leased, tuple[Pending, ...]]:
    """Rewind to the moment and run the plans that were run from there, each with its graph's key if it had one.

    The same tokens come out, and the ledger is the same to the last bit. Blocks that the plans write must belong to
    nobody else by now: this is for a device that no scheduler shares.

    Raises:
        StaleStateError: as `rewind`.
        PlanBaseError: the first plan does not start from the moment, or another one not from where the last ended.
    """
    leased, outputs = rewind(moment, leased), list[Pending]()
    for entry in plans:
        plan, key = entry if isinstance(entry, tuple) else (entry, None)
        leased, pending = run(bound, leased, plan, key=key)
        outputs.append(pending)
    return leased, tuple(outputs)
