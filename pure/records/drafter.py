"""Drafters: functions that guess what a request says next, so that one step can verify several tokens.

Guesses change how fast tokens come, never which: a drafter may be wrong, late or random.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from purestep.kernels.record import record
from purestep.pure.errors import DrafterError

Histories = Sequence[Sequence[int] | NDArray[np.int32]]  # known token ids of requests
Drafts = tuple[tuple[int, ...], ...]  # of each request


def is_count(value: object) -> bool:
    """Whether this is a whole number of at least 1."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def _check_num_drafts(num_drafts: object) -> None:
    if not is_count(num_drafts):
        raise DrafterError(
            f"a drafter with num_drafts={num_drafts!r}: it is a whole number of guesses a step, at least 1"
        )


@record
class Proposal:
    """What a drafter on the device gives for the requests of a batch, in its order."""

    drafts: Int[Tensor, "reqs drafts"]  # -1 behind a request's last
    probs: Float[Tensor, "reqs drafts vocab"] | None = None  # drafts were drawn from these; None: certain
    kv: tuple[Tensor, ...] | None = None  # the cache with the drafter's own layers written; None: unchanged
    kept: Any = None  # what it keeps for the next step; None: what it kept before


def keep_nothing(**sizes: Any) -> None:
    """The `init` of a drafter that keeps nothing."""


@record(static=True)
class Drafter:
    """A drafter on the device: two functions, run behind `advance` in the same step and captured with it.

    `step(model, params, state, kernels=kernels, drafter=drafter)` is `execute`, `sample`, then the stage `propose`:

        proposal = drafter.propose(params, executed, state, output, kernels=kernels)

    `executed` is the step's ExecuteModelState: its inputs and hidden states may be read, its state is consumed. `state`
    is the StepState after `advance`: kept tokens are appended and counted, no row of the batch that ran has drafts.
    `output` is the StepOutput so far. The stage writes the proposal: drafts into the ledger, cut to what each request
    may still say; `probs`, `kv` and `kept` where they are not None. So `propose` is pure, and waits for nothing.

    What it keeps from step to step is `StepState.drafter`, a tree of tensors that `init(num_rows=, device=)`
    makes. Its weights are `params.tree["draft"]`. Layers of its own lie in the KV cache behind the model's: they share
    its block tables, so that blocks which are cached, copied or forked bring the drafter's keys along.

    Raises: DrafterError for a num_drafts that is no whole number of at least 1.
    """

    num_drafts: int
    propose: Callable[..., Proposal]
    init: Callable[..., Any] = keep_nothing
    kv_layers: tuple[Any, ...] = ()  # KVLayerSpec of its own layers
    target_layers: tuple[Any, ...] = ()  # those of the model that it was made for, behind which its own lie
    linear_paths: tuple[tuple[str | int, ...], ...] = ()  # as in Model, below params.tree["draft"]
    draws: bool = False  # it states the probabilities that drafts were drawn from

    def __attrs_post_init__(self) -> None:
        _check_num_drafts(self.num_drafts)


@record(static=True)
class HostDrafter:
    """A drafter on the host, between steps: its drafts arrive with a plan.

    `propose(kept, histories, budgets) -> (kept, drafts)`: histories are the known token ids of each request, budgets
    the most drafts that each may have; drafts are a tuple of token ids for each, as short as it likes. `init()` makes
    the first `kept`, an immutable value.

    Raises: DrafterError for a num_drafts that is no whole number of at least 1.
    """

    num_drafts: int
    propose: Callable[..., Any]
    init: Callable[[], Any] = keep_nothing

    def __attrs_post_init__(self) -> None:
        _check_num_drafts(self.num_drafts)
