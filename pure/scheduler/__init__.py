"""The scheduler: who runs in the next step, and with which blocks. A state machine of pure functions on `Queue`.

    queue = add(make_queue(config), request)
    queue, output = schedule(queue)                       # what the step does
    queue, finished = update(queue, output.req_ids, ...)  # what it brought

Every function returns a new queue and leaves the old one good, so going back to where one was is keeping the old value.
"""

from purestep.pure.scheduler.branches import fork, go_back, hold, let_go
from purestep.pure.scheduler.drafts import take_drafts
from purestep.pure.scheduler.invariants import check_invariants
from purestep.pure.scheduler.lifecycle import (
    abort,
    add,
    finish,
    make_queue,
    num_free,
    preempt_all,
    set_version,
)
from purestep.pure.scheduler.schedule import schedule
from purestep.pure.scheduler.stop_strings import find_stop
from purestep.pure.scheduler.update import update

assert __name__ == "purestep.pure.scheduler", (
    f"import this package as purestep.pure.scheduler, not as {__name__}"
)

__all__ = [
    "abort",
    "add",
    "check_invariants",
    "find_stop",
    "finish",
    "fork",
    "go_back",
    "hold",
    "let_go",
    "make_queue",
    "num_free",
    "preempt_all",
    "schedule",
    "set_version",
    "take_drafts",
    "update",
]
