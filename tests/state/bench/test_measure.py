"""All measurements: which rows come, for whom, and what is in them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from purestep.pure.errors import InvalidParameterError, ModelLoadError
from purestep.state.bench.floors import decode_floor_ms, prefill_ceiling
from purestep.state.bench.measure import WHAT, Wanted, measure, usual_batches, usual_method
from purestep.state.bench.methods import CPU_METHOD, TINY_METHOD, Method
from purestep.state.bench.peers import PEERS
from purestep.state.bench.rows import Row, about
from purestep.state.bench.shapes import SHAPES, Subject, load
from tests.state.bench.fakes import RATES, SMALL, TINY, peer

KEYS = {"bench", "shape", "who", "level"}
UNITS = {"decode": "ms", "sampled": "ms", "prefill": "tok_s", "startup": "s", "host": "us"}


def launch(command: Sequence[str], environment: Mapping[str, str]) -> str:
    return json.dumps({"import_s": 1.0, "engine_s": 2.0, "first_token_s": 0.5})


def wanted(**changes: Any) -> Wanted:
    settings: dict[str, Any] = {"subject": TINY, "method": SMALL, "batches": (1, 2)}
    return Wanted(**(settings | changes))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    asked = wanted(peers=(peer(), peer("vllm", RuntimeError("no\nroom"))))
    return list(measure(asked, rates=RATES, launch=launch))


def test_everything_is_measured_for_everybody(rows: list[Row]) -> None:
    measured = [(row.who, row.bench, row.level, row.batch) for row in rows if row.why is None]
    per_batch = [
        (who, bench, level, batch)
        for batch in (1, 2)
        for who, bench, level in (
            ("purestep", "decode", "engine"),
            ("purestep", "sampled", "engine"),
            ("purestep", "decode", "step"),
            ("purestep", "host", "step"),
            ("purestep", "host", "engine"),
            ("transformers", "decode", "engine"),
            ("transformers", "sampled", "engine"),
        )
    ]
    once = [
        *[(who, "startup", "engine", None) for who in ("purestep", "vllm")] * 2,
        *[(who, "prefill", "engine", SMALL.prefill_batch) for who in ("purestep", "transformers")],
    ]

    assert sorted(measured, key=str) == sorted(per_batch + once, key=str)


def test_a_peer_that_fails_becomes_a_row_that_says_why(rows: list[Row]) -> None:
    (failed,) = [row for row in rows if row.why is not None]

    assert (failed.who, failed.value, failed.why) == ("vllm", None, "RuntimeError: no")


def test_rows_are_plain_json_with_the_number_under_its_unit(rows: list[Row]) -> None:
    for row in rows:
        plain = json.loads(json.dumps(row.as_json()))
        assert set(plain) >= KEYS
        if row.why is None:
            assert plain[UNITS[row.bench]] == row.value
            assert not set(plain) & (set(UNITS.values()) - {UNITS[row.bench]})
            assert ("floor" in plain) == (row.bench in ("decode", "sampled"))
            assert plain.get("includes_step") == (True if row.bench == "host" else None)
            assert ("ceiling" in plain) == (row.bench == "prefill")
            assert ("version" in plain) == (row.who == "transformers")


def test_our_decode_rows_say_how_many_steps_a_launch_is_of(rows: list[Row]) -> None:
    for row in rows:
        has_steps = row.who == "purestep" and row.bench in ("decode", "sampled")
        has_turns = row.bench == "host" and row.level == "engine"
        assert row.facts.get("unroll") == (1 if has_steps or has_turns else None)


def test_bounds_are_those_of_the_rates(rows: list[Row]) -> None:
    config, layers = SHAPES["tiny"], load(TINY).model.kv_layers
    for row in rows:
        if row.bench in ("decode", "sampled") and row.why is None:
            assert row.bound == decode_floor_ms(
                config, layers, batch=row.batch or 0, context=SMALL.mean_context, itemsize=4, read=1e9
            )
            assert (row.facts["context"], row.facts["tokens"]) == (SMALL.context, [SMALL.short, SMALL.long])
        if row.bench == "prefill":
            assert row.bound == prefill_ceiling(config, SMALL.prefill_length, 1e12)


def test_our_floors_are_of_the_bytes_that_our_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a peer, which reads weights of the subject's type, are not."""
    monkeypatch.setattr("purestep.state.bench.measure.spared_bytes", lambda prepared: 1000)
    config, layers = SHAPES["tiny"], load(TINY).model.kv_layers
    asked = wanted(what=("decode",), batches=(1,), peers=(peer(),))

    for row in measure(asked, rates=RATES, launch=launch):
        spared = 1000 if row.who == "purestep" else 0
        assert row.bound == decode_floor_ms(
            config, layers, batch=1, context=SMALL.mean_context, itemsize=4, read=1e9, spared=spared
        )


def test_start_up_is_the_sum_of_its_parts_and_comes_first(rows: list[Row]) -> None:
    startup = [row for row in rows if row.bench == "startup" and row.why is None]

    assert rows[: len(startup)] == startup
    assert [(row.who, row.facts["caches"], row.value) for row in startup] == [
        ("purestep", "cold", 3.5),
        ("purestep", "warm", 3.5),
        ("vllm", "cold", 3.5),
        ("vllm", "warm", 3.5),
    ]


@pytest.mark.parametrize("what", [(bench,) for bench in WHAT])
def test_only_what_is_wanted_is_measured_and_as_many_rows_as_are_promised(what: tuple[str, ...]) -> None:
    asked = wanted(
        what=what, batches=(2,), peers=(peer(), peer("vllm")) if what == ("startup",) else (peer(),)
    )

    found = list(measure(asked, rates=RATES, launch=launch))

    assert {row.bench for row in found} == set(what)
    assert len(found) == asked.num_rows


def test_all_rows_are_promised() -> None:
    assert wanted(peers=(peer(), peer("vllm"))).num_rows == 4 + 2 * (3 * 2 + 1 + 2) + 3


@pytest.mark.parametrize("wrong", [{"what": ("speed",)}, {"what": ()}, {"batches": (0,)}, {"batches": ()}])
def test_what_can_not_be_measured_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError):
        wanted(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": "70B"},
        {"shape": "tiny", "model": "."},
        {"dtype": "int8"},
        {"device": "cuda:99"},
        {"device": "abacus"},
    ],
)
def test_a_subject_that_can_not_be_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidParameterError):
        Subject(**wrong)


@pytest.mark.parametrize("bench", ["decode", "prefill"])
def test_prompts_longer_than_the_model_knows_positions_are_refused(bench: str) -> None:
    method = Method(context=4000, short=2, long=60, host_steps=3, prefill_length=4090, repeats=1)

    with pytest.raises(InvalidParameterError, match="4096 positions"):
        list(measure(wanted(method=method, what=(bench,)), rates=RATES))


def test_a_folder_without_a_model_is_a_named_error(tmp_path: Any) -> None:
    with pytest.raises(ModelLoadError):
        list(measure(wanted(subject=Subject(model=str(tmp_path)), what=("decode",)), rates=RATES))


def test_what_is_usual() -> None:
    assert usual_method(TINY) == TINY_METHOD
    assert usual_method(Subject(shape="1B")) == CPU_METHOD
    assert usual_batches(TINY) == (1, 8)
    assert [own.name for own in PEERS] == ["transformers", "vllm"]


def test_every_row_can_say_where_and_when_it_was_measured() -> None:
    own = about("cpu")

    assert {"torch", "python", "device"} <= set(own["versions"])
    assert own["threads"] >= 1 and len(own["date"].split("-")) == 3
