"""Failures of drafters, brought back: see tests/test_mutants.py."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from purestep.pure.records.drafter import HostDrafter
from purestep.pure.records.state import StepState
from tests.bugs import test_drafters
from tests.mutant import Mutant

proposing = importlib.import_module("purestep.pure.propose")


# H23: drafts that pass the length budget, by any number or by the token that follows them.


def knows_no_limit(state: StepState) -> Tensor:
    return torch.full_like(state.layout.row_of_index, 1000)


def forgets_the_token_behind(state: StepState) -> Tensor:
    rows = state.layout.row_of_index
    return state.ledger.length_limit[rows] - state.ledger.num_known_tokens[rows]


def knows_no_limit_on_the_host(
    drafter: HostDrafter, kept: Any, histories: Sequence[Sequence[int]], limits: Sequence[int]
) -> Any:
    return drafter.propose(kept, histories, [drafter.num_drafts] * len(histories))


DRAFTER_MUTANTS = [
    Mutant(
        "H23",
        "drafts of any length",
        test_drafters.test_drafts_fit_into_the_slots_that_remain,
        proposing,
        {"draft_budget": knows_no_limit},
    ),
    Mutant(
        "H23",
        "no slot is left for the token behind the drafts",
        test_drafters.test_drafts_fit_into_the_slots_that_remain,
        proposing,
        {"draft_budget": forgets_the_token_behind},
    ),
    Mutant(
        "H23",
        "drafts of any length on the host",
        test_drafters.test_drafts_of_the_host_fit_into_the_slots_that_remain,
        test_drafters,
        {"host_drafts": knows_no_limit_on_the_host},
    ),
]
