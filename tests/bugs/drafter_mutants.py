"""Failures of drafters, brought back: see tests/test_mutants.py."""

import importlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from purestep.kernels.reference.draft_ends import put_drafts
from purestep.kernels.reference.ends import LIMIT
from purestep.kernels.types import Function, Kernels
from purestep.pure.propose import propose
from purestep.pure.record import replace
from purestep.pure.records.drafter import HostDrafter
from tests.bugs import test_drafters
from tests.mutant import Mutant

steps = importlib.import_module("purestep.pure.step")

# H23: drafts that pass the length budget, by any number or by the token that follows them.


def proposing(put: Function) -> Any:
    """`propose` by kernels that put drafts so."""

    def mutated(*given: Any, kernels: Kernels) -> Any:
        return propose(*given, kernels=replace(kernels, put_drafts=put))

    return mutated


def knows_no_limit(kernels: Kernels, ledger: Tensor, *given: Tensor, longest: int) -> Any:
    far = ledger.clone()
    far[LIMIT] = 1000
    return put_drafts(kernels, far, *given, longest=1000)


def forgets_the_token_behind(kernels: Kernels, ledger: Tensor, *given: Tensor, longest: int) -> Any:
    further = ledger.clone()
    further[LIMIT] += 1
    return put_drafts(kernels, further, *given, longest=longest + 1)


def knows_no_limit_on_the_host(
    drafter: HostDrafter, kept: Any, histories: Sequence[Sequence[int]], limits: Sequence[int]
) -> Any:
    return drafter.propose(kept, histories, [drafter.num_drafts] * len(histories))


DRAFTER_MUTANTS = [
    Mutant(
        "H23",
        "drafts of any length",
        test_drafters.test_drafts_fit_into_the_slots_that_remain,
        steps,
        {"propose": proposing(knows_no_limit)},
    ),
    Mutant(
        "H23",
        "no slot is left for the token behind the drafts",
        test_drafters.test_drafts_fit_into_the_slots_that_remain,
        steps,
        {"propose": proposing(forgets_the_token_behind)},
    ),
    Mutant(
        "H23",
        "drafts of any length on the host",
        test_drafters.test_drafts_of_the_host_fit_into_the_slots_that_remain,
        test_drafters,
        {"host_drafts": knows_no_limit_on_the_host},
    ),
]
