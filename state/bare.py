"""The bare step: what an engine would run next, run on its buffers without it, as benchmarks and profilers want it.

    here = remember(turns.now.leased, turns.now.batch)          # turns = engine.turns
    leased = turns.now.leased
    for plan, key in plans_ahead(turns, 8):
        leased, pending = run(turns.bound, leased, plan, key=key)
    put_back(turns, here, leased)

Plans are values, made before anything runs. In the end the engine goes on as if nothing had been.
"""

from purestep.pure.errors import BenchmarkError
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.plan import StepPlan
from purestep.pure.scheduler import schedule
from purestep.pure.update import update_states
from purestep.state.graphs import GraphKey
from purestep.state.launch import whole_step
from purestep.state.lease import Leased
from purestep.state.moments import Moment, rewind
from purestep.state.turns import Turns

Plans = list[tuple[StepPlan, GraphKey | None]]


def plans_ahead(turns: Turns, num_steps: int) -> Plans:
    """The plans of the next steps, each with its graph, as the engine would make them one step ahead.

    Nothing changes by it: who is in the batch and how far it is are values.

    Raises:
        BenchmarkError: a request ends, or lacks blocks, before the last step.
    """
    now = turns.now
    queue, batch, absorbed = now.queue, now.batch, now.leased.absorbed
    queue = replace(queue, config=replace(queue.config, async_scheduling=True))
    num_requests, plans = len(batch.row_of), Plans()
    for step in range(num_steps):
        queue, scheduled = schedule(queue)
        if len(scheduled.req_ids) < num_requests:
            raise BenchmarkError(
                f"only {len(scheduled.req_ids)} of {num_requests} requests go on at step {step} of {num_steps}: "
                "give the engine blocks and max_model_len for all steps"
            )
        batch = update_states(batch, scheduled)
        padded, key = whole_step(turns.bound, turns.dispatch_keys, batch, absorbed)
        plans.append((plan_step(padded, absorbed), key))
        absorbed = padded
    return plans


def put_back(turns: Turns, moment: Moment, leased: Leased) -> None:
    """Give the engine its buffers back, as they were at the moment."""
    turns.now = replace(turns.now, leased=rewind(moment, leased))
