"""Failures of logits processors and of rollouts' log-probabilities, brought back: see tests/test_mutants.py."""

import importlib
from itertools import count

from torch import Tensor

from purestep.pure.records.logits_processor import History
from purestep.pure.records.outputs import KeptMass
from purestep.pure.sampling import _kept_mass
from tests.bugs import test_processors
from tests.mutant import Mutant

constrain, sampling = map(importlib.import_module, ("purestep.pure.constrain", "purestep.pure.sampling"))

_forces = test_processors.forces

# H2: state counts calls, also those whose token is thrown away; state begins empty after preemption.

calls = count()


def counts_its_calls(logits: Tensor, history: History, params: dict[str, Tensor]) -> Tensor:
    place = history.lengths - history.lengths + next(calls)
    return _forces(logits, History(history.token_ids, place - place, place), params)


def begins_empty(token_ids: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> History:
    return History(token_ids, lengths, lengths)


# H39: of a cut distribution, what is told is of the whole one.


def tells_of_the_whole(whole: Tensor, final: Tensor, tokens: Tensor) -> KeptMass:
    return _kept_mass(whole, whole, tokens)


PROCESSOR_MUTANTS = [
    Mutant(
        "H2",
        "a processor counts its calls",
        test_processors.test_a_processor_counts_accepted_outputs_and_nothing_else,
        test_processors,
        {"forces": counts_its_calls},
    ),
    Mutant(
        "H2",
        "a processor begins without outputs",
        test_processors.test_a_processor_counts_accepted_outputs_and_nothing_else,
        constrain,
        {"History": begins_empty},
    ),
    Mutant(
        "H39",
        "log-probabilities of the whole distribution",
        test_processors.test_the_kept_mass_is_what_separates_a_rollout_from_its_trainer,
        sampling,
        {"_kept_mass": tells_of_the_whole},
    ),
]
