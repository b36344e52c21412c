"""The command line: text or JSON lines out, named errors without a traceback."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from purestep.state.cli import main
from purestep.state.engine import Engine
from tests.pure.models.families import both
from tests.smollm2 import needs_smollm2
from tests.state.loading.gguf_files import random_tensors, write_gguf

MODEL = "tiny-llama"


@pytest.fixture
def model(models_dir: Path) -> str:
    return str(models_dir / MODEL)


@pytest.fixture
def speaker(tmp_path: Path) -> str:
    """A tiny model with a tokenizer and no chat template."""
    config = both("llama")[1].config
    return str(write_gguf(tmp_path / "speaker.gguf", config, random_tensors(config)))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])

    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith("purestep 0.")


def test_info_says_what_a_model_is(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", model]) == 0

    out = capsys.readouterr().out
    assert "vocabulary" in out and "512" in out
    assert "tokenizer" in out and "no" in out


def test_info_names_the_file_and_what_is_written_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    needs_smollm2()

    assert main(["info"]) == 0

    name = capsys.readouterr().out.splitlines()[0]
    assert name.split(maxsplit=1)[1].startswith("SmolLM2-135M-Instruct.Q4_1 (in its metadata: Smollm2 135M ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("ab",), "purestep: the text ends at a limit, not where the model would: --max-tokens is 4"),
        (("-n", "2", "ab"), "purestep: 2 of 2 texts end at a limit"),
        (("--jsonl", "ab"), ""),
    ],
)
def test_a_text_that_ends_at_a_limit_is_told_of(
    options: tuple[str, ...], said: str, speaker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON lines have it as their finish_reason."""
    assert generate(speaker, *options) == 0

    out, err = capsys.readouterr()
    assert err.startswith(said) and bool(err) == bool(said)
    assert '"finish_reason": "length"' in out or said


def test_a_text_that_the_model_ends_is_not_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    needs_smollm2()

    assert main(["generate", "--quiet", "What is the capital of France?"]) == 0

    assert capsys.readouterr().err == ""


def test_a_named_error_is_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", str(tmp_path)]) == 1

    assert capsys.readouterr().err.startswith("purestep: ")


def test_text_for_a_model_without_tokenizer_is_a_named_error(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", model, "hello"]) == 1

    assert "tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--jsonl",), ("-n", "2")])
def test_a_request_that_ends_as_an_error_is_told_of_and_the_status_is_1(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logits of NaN, while it grows and at its end; as a JSON line too."""
    config = both("llama")[1].config
    tensors = random_tensors(config)
    tensors["model.norm.weight"][:] = float("nan")
    spoilt = str(write_gguf(tmp_path / "spoilt.gguf", config, tensors))

    assert main(["generate", "--model", spoilt, "--quiet", *options, "ab"]) == 1

    out, err = capsys.readouterr()
    assert "prompt 'ab': request" in err and "nothing to draw from" in err
    if "--jsonl" in options:
        assert json.loads(out)["finish_reason"] == "error" and "NaN" in json.loads(out)["error"]


@pytest.mark.parametrize("source", ["argument", "file", "stdin"])
def test_generate_reads_prompts_from_anywhere_and_writes_json_lines(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_smollm2()
    prompt = "The capital of France is"
    options = ["--raw", "--jsonl", "--max-tokens", "2", "--logprobs", "1", "--quiet"]
    if source == "argument":
        options.append(prompt)
    elif source == "file":
        (tmp_path / "prompts.txt").write_text(prompt + "\n\n")
        options += ["--file", str(tmp_path / "prompts.txt")]
    else:
        monkeypatch.setattr("sys.stdin", io.StringIO(prompt + "\n"))

    assert main(["generate", *options]) == 0

    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert (row["text"], row["finish_reason"], row["num_prompt_tokens"]) == (" Paris.", "length", 5)
    assert [len(pair) for pair in row["logprobs"]["token_ids"]] == [2, 2]


def test_an_instruct_model_answers_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    needs_smollm2()

    assert main(["generate", "What is the capital of France?"]) == 0

    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["info", "generate"])
@pytest.mark.parametrize("device", ["foo", "cuda:99"])
def test_a_device_that_is_not_there_is_a_named_error(
    command: str, device: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, "--model", model, "--device", device] + (["hello"] if command == "generate" else [])

    assert main(arguments) == 1

    assert "device=" in capsys.readouterr().err


def test_an_empty_or_unreadable_file_is_a_named_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("empty", b"\n"), ("bytes", b"\xff\xfe\n")):
        (tmp_path / name).write_bytes(content)

        assert main(["generate", "--file", str(tmp_path / name)]) == 1
        assert capsys.readouterr().err.startswith("purestep: ")


def test_a_bad_prompt_among_good_ones_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    needs_smollm2()

    assert main(["generate", "--raw", "--jsonl", "--quiet", "--max-tokens", "1", "Hello", "", "World"]) == 1

    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [(row["index"], row["prompt"], "error" in row) for row in rows] == [
        (0, "Hello", False),
        (1, "", True),
        (2, "World", False),
    ]
    assert "empty prompt" in captured.err


def generate(speaker: str, *arguments: str) -> int:
    options = ["--model", speaker, "--ignore-eos", "--max-tokens", "4", "--quiet"]
    return main(["generate", *options, *arguments])


@pytest.mark.parametrize("options", [[], ["--jsonl"]])
@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_each_result_is_written_as_soon_as_it_and_all_before_it_are_finished(
    speaker: str,
    options: list[str],
    error: type[BaseException],
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So Ctrl-C, or a reader that has enough, loses only what was not finished yet."""
    assert generate(speaker, *options, "a", "b", "abc") == 0
    whole = capsys.readouterr().out
    step, finished = Engine.step, []

    def interrupted(engine: Engine) -> Any:
        if len(finished) == 2:
            raise error
        results = step(engine)
        finished.extend(result for result in results if result.finished)
        return results

    def one_at_a_time(engine: Engine, *arguments: Any, **sizes: Any) -> None:
        init(engine, *arguments, **sizes, max_num_reqs=1)

    init = Engine.__init__
    monkeypatch.setattr(Engine, "__init__", one_at_a_time)
    monkeypatch.setattr(Engine, "step", interrupted)
    assert generate(speaker, *options, "a", "b", "abc") == status

    if error is BrokenPipeError:
        sys.stdout.close()  # it is the null device now
    written = capsys.readouterr().out
    assert texts(written) == texts(whole)[: len(texts(written))]
    assert len(texts(written)) == 2


def texts(out: str) -> list[str]:
    """The generated texts, of JSON lines or of text."""
    if out.startswith("{"):
        return [json.loads(line)["text"] for line in out.splitlines()]
    return out.split("\n---\n")[:-1]


def test_results_do_not_follow_the_progress_bar_to_standard_error(
    speaker: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where standard error is a terminal and standard output a file."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard error for a terminal

    assert main(["generate", "--model", speaker, "--jsonl", "--max-tokens", "2", "a", "b"]) == 0

    captured = capsys.readouterr()
    assert [json.loads(line)["prompt"] for line in captured.out.splitlines()] == ["a", "b"]
    assert "prompts" in captured.err and '"prompt"' not in captured.err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_generates(speaker: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(speaker, "--dtype", dtype, "--jsonl", "ab") == 0

    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 4


def test_an_argument_that_is_no_utf_8_is_a_named_error(
    speaker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(speaker, "a\udcff") == 1

    assert "not UTF-8 at character 1" in capsys.readouterr().err


def test_a_path_that_is_not_there_is_named_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", "./nope"]) == 1

    assert capsys.readouterr().err == "purestep: nope: no such file or folder\n"
