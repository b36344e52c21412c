"""Start-up, in fresh processes and in this one."""

import json
import os
import sys
from collections.abc import Mapping, Sequence

import attrs
import pytest

from purestep.pure.errors import BenchmarkError
from purestep.state.bench.child import first_token
from purestep.state.bench.startup import CACHES, launch, startup_rows
from tests.state.bench.fakes import TINY

PARTS = ("import_s", "engine_s", "first_token_s")


class Launched:
    """What was started, and with which caches in place."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.caches: list[list[str]] = []

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        self.commands.append(command)
        self.environments.append(environment)
        folder = environment["TRITON_CACHE_DIR"]
        self.caches.append(os.listdir(folder) if os.path.isdir(folder) else [])
        os.makedirs(folder, exist_ok=True)
        open(os.path.join(folder, "kernel"), "w").close()
        return "a banner\n" + json.dumps(dict.fromkeys(PARTS, 1.0)) + "\n"


def test_the_first_process_finds_no_compiled_kernels_and_the_second_those_of_the_first() -> None:
    launched = Launched()

    rows = list(startup_rows(TINY, "purestep", "tiny", launch=launched))

    assert [(row.facts["caches"], row.value) for row in rows] == [("cold", 3.0), ("warm", 3.0)]
    assert launched.caches == [[], ["kernel"]]
    assert launched.environments[0] == launched.environments[1]
    assert set(CACHES) <= set(launched.environments[0])
    assert not any(os.path.exists(launched.environments[0][variable]) for variable in CACHES)
    told = json.loads(launched.commands[0][-1])
    assert told == {"who": "purestep", "subject": attrs.asdict(TINY)}


def test_a_fresh_process_is_timed_from_import_to_first_token() -> None:
    cold = next(startup_rows(TINY, "purestep", "tiny"))

    assert cold.value == sum(cold.facts[part] for part in PARTS)
    assert all(cold.facts[part] > 0 for part in PARTS)


def test_every_engine_gives_its_first_token() -> None:
    for who in ("purestep", "transformers"):
        seconds = first_token({"who": who, "subject": attrs.asdict(TINY)})

        assert tuple(seconds) == PARTS


def test_a_process_that_fails_is_a_named_error_with_its_last_words() -> None:
    with pytest.raises(BenchmarkError, match="status 1: no such thing"):
        launch([sys.executable, "-c", "import sys; sys.exit('no such thing')"], {})
