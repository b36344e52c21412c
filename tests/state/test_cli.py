"""The command line: text or JSON lines out, named errors without a traceback."""

import io
import json
from pathlib import Path

import pytest

from purestep.state.cli import main
from tests.smollm2 import needs_smollm2

MODEL = "tiny-llama"


@pytest.fixture
def model(models_dir: Path) -> str:
    return str(models_dir / MODEL)


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


def test_a_named_error_is_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", str(tmp_path)]) == 1

    assert capsys.readouterr().err.startswith("purestep: ")


def test_text_for_a_model_without_tokenizer_is_a_named_error(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", model, "hello"]) == 1

    assert "tokenizer" in capsys.readouterr().err


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
