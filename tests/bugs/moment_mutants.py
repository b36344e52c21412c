"""Failures of going back and branching, brought back: see tests/test_mutants.py."""

import importlib
from collections.abc import Hashable
from typing import Any

import numpy as np

from purestep.pure.errors import SchedulerOutputError
from purestep.pure.record import replace
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.queue import Queue
from purestep.pure.scheduler import hold
from purestep.pure.scheduler.sharing import Shareable
from purestep.state.lease import Leased
from purestep.state.moments import Moment, remember, rewind
from tests.bugs import test_moments
from tests.mutant import Mutant

turns, growth = map(importlib.import_module, ("purestep.state.turns", "purestep.pure.scheduler.growth"))


def rewinds_the_host_alone(moment: Moment, leased: Leased) -> Leased:
    """The device keeps its counts."""
    now = leased.value.ledger.table.clone()
    leased = rewind(moment, leased)
    leased.value.ledger.table.copy_(now)
    return leased


def remembers_no_tokens(leased: Leased, batch: InputBatch) -> Moment:
    """Those that the host does not know yet are lost with the row."""
    moment = remember(leased, batch)
    moment.token_ids.fill_(0)
    return moment


def holds_no_block(queue: Queue, moment: Hashable) -> Shareable:
    """Nothing but a name."""
    held = hold(queue, moment)
    nothing = tuple([np.zeros(0, np.int32)] * len(queue.pools))
    return replace(held, queue=replace(held.queue, pools=queue.pools, moments={moment: nothing}))


def copies_nothing(queue: Queue, num_blocks: Any, group: int) -> dict[int, int]:
    """Whoever shares an open block goes on writing into it."""
    sources = {row: queue.running.residences[row].sources for row in np.flatnonzero(num_blocks).tolist()}
    return {row: own[group] for row, own in sources.items() if own and own[group] is not None}  # type: ignore[misc]


MOMENT_MUTANTS = [
    Mutant(
        "H36",
        "the device keeps what discarded steps have counted",
        test_moments.test_steps_that_are_discarded_leave_nothing_behind,
        turns,
        {"rewind": rewinds_the_host_alone},
        error=SchedulerOutputError,
    ),
    Mutant(
        "H36",
        "the last tokens are lost with their row",
        test_moments.test_steps_that_are_discarded_leave_nothing_behind,
        turns,
        {"remember": remembers_no_tokens},
    ),
    Mutant(
        "H36",
        "blocks of a moment are given to others",
        test_moments.test_what_a_moment_refers_to_is_nobodys_to_overwrite,
        turns,
        {"hold": holds_no_block},
    ),
    Mutant(
        "H36",
        "two histories are written into one block",
        test_moments.test_two_histories_that_part_in_the_midst_of_a_block_do_not_meet_in_it,
        growth,
        {"own_again": copies_nothing},
        error=SchedulerOutputError,
    ),
    Mutant(
        "H29",
        "a fork misses the token on its way to its parent",
        test_moments.test_a_fork_gets_the_token_that_was_on_its_way_to_its_parent,
        turns,
        {"with_heir": lambda readers, parent, child: readers},
    ),
]
