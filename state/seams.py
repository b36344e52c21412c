"""What a runner calls out to, as values: functions that somebody else gives it, and when each of them is called.

A step of tokens, in order: `RoutedExperts.clear`, `KVConnector.handle_preemptions`, `begin`; the forward pass; without
a drafter `wait_for_save`, `collect`, `end`, with one `collect` alone. Then, in `sample_tokens`: the step's tokens are
known; `RoutedExperts.take`; the drafter; `wait_for_save` and `end` if they were put off. A step without tokens has
`clear`, `handle_preemptions`, `begin`, `collect` and `end`. A step that fails has `end`, wherever it fails.
"""

from collections.abc import Callable
from typing import Any

import attrs

from purestep.pure.records.inputs import StepInputs
from purestep.pure.records.outputs import KVConnectorOutput
from purestep.pure.records.scheduler_output import SchedulerOutput


@attrs.frozen(kw_only=True)
class KVConnector:
    """Keys and values that come from elsewhere and go elsewhere; each function is given the scheduler's output.

    Source: vllm/v1/worker/kv_connector_model_runner_mixin.py.
    """

    handle_preemptions: Callable[[SchedulerOutput], None]  # before anything of the step is touched
    begin: Callable[[SchedulerOutput], None]  # bind the step's metadata, start to load
    wait_for_save: Callable[[], None]
    collect: Callable[[SchedulerOutput], KVConnectorOutput | None]  # what was received and sent, failed loads
    end: Callable[[], None]  # clear the metadata


@attrs.frozen(kw_only=True)
class RoutedExperts:
    """Which experts a step's tokens were sent to, as a model's pieces write it down while they run."""

    clear: Callable[[], None]  # before the step
    take: Callable[
        [StepInputs, int], Any
    ]  # of the first so many tokens; a copy, the next step clears its source
