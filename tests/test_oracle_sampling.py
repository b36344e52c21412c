"""The sampling kernels against what upstream's own functions gave for the same inputs."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from purestep.kernels.reference.constraints import add_bias, allow_only, ban_bad_words, ban_tokens
from purestep.kernels.reference.draw import draw, greedy, scale_by_temperature, temperature_offset
from purestep.kernels.reference.logprobs import gather_logprobs
from purestep.kernels.reference.penalties import penalize
from purestep.kernels.reference.truncate import truncate

Case = dict[str, Any]


@cache
def _cases(folder: Path, name: str) -> list[Case]:
    """Every case of a pair of files: its JSON fields, and its arrays as tensors."""
    cases: list[Case] = json.loads((folder / f"{name}.json").read_text())
    with np.load(folder / f"{name}.npz") as arrays:
        for key in arrays.files:
            index, field = key[1:].split("_", 1)
            cases[int(index)][field] = torch.from_numpy(arrays[key])
    return cases


def oracle_case(folder: Path, name: str, index: int, num_cases: int) -> Case:
    """One case of a pair of files, of which this test knows how many cases it holds."""
    cases = _cases(folder, name)
    assert len(cases) == num_cases, f"{name} holds {len(cases)} cases, this test names {num_cases}"
    return cases[index]


def _floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _ragged(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows as a matrix that begins at the left, filled with ids that must not matter, and their lengths."""
    width = max([1, *map(len, rows)])
    filled = [row + [0] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.int32), torch.tensor([len(row) for row in rows])


def _entries(rows: list[dict[int, float]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of {id: value} as (index, ids, values)."""
    flat = [(index, token, value) for index, row in enumerate(rows) for token, value in row.items()]
    index, ids, values = zip(*flat, strict=True) if flat else ((), (), ())
    return torch.tensor(index, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32), _floats(list(values))


def _history(case: Case, num_reqs: int) -> tuple[Tensor, Tensor, Tensor]:
    """(history, prompt_lengths, lengths) of a case; upstream's padding and placeholders are left in."""
    prompts = case["prompt_token_ids"].tolist() if "prompt_token_ids" in case else [[]] * num_reqs
    both = [prompt + outputs for prompt, outputs in zip(prompts, case["output_token_ids"], strict=True)]
    history, lengths = _ragged(both)
    return history, torch.tensor([len(prompt) for prompt in prompts]), lengths


def _words(bad_words: dict[str, list[list[int]]]) -> tuple[Tensor, Tensor]:
    """(index, words) of {row: words}, padded behind their ends."""
    flat = [(int(row), word) for row, words in bad_words.items() for word in words]
    width = max([1, *(len(word) for _, word in flat)])
    words = torch.tensor([word + [-1] * (width - len(word)) for _, word in flat], dtype=torch.int32)
    return torch.tensor([row for row, _ in flat], dtype=torch.int32), words.view(-1, width)


def assert_same_cut(ours: Tensor, recorded: Tensor, logits: Tensor, top_k: Tensor) -> None:
    """Same logits kept, as many of each value; among equals the lower ids, and for k = 1 the lowest only."""
    for mine, theirs, row, k in zip(ours, recorded, logits, top_k.tolist(), strict=True):
        kept, expected = mine.isfinite(), theirs.isfinite()
        assert torch.equal(mine[kept], row[kept])
        if k == 1:
            assert kept.nonzero().flatten().tolist() == [int(row.argmax())]
            assert set(row[expected].tolist()) == {float(row.max())}
            continue
        assert Counter(row[kept].tolist()) == Counter(row[expected].tolist())
        for value in row.unique().tolist():
            ids = (row == value).nonzero().flatten()
            num_kept = int(kept[ids].sum())
            assert kept[ids].tolist() == [True] * num_kept + [False] * (len(ids) - num_kept)
            if num_kept == len(ids):
                assert expected[ids].all()


@pytest.mark.parametrize("index", range(84))
def test_top_k_and_top_p(oracle_dir: Path, index: int) -> None:
    case = oracle_case(oracle_dir, "topk_topp", index, 84)
    logits = case["logits"]
    num_reqs, vocab = logits.shape
    top_k = case.get("k", torch.full((num_reqs,), vocab))
    top_p = case.get("p", torch.ones(num_reqs))
    ours = truncate(logits, top_k, top_p, torch.zeros(num_reqs))
    assert_same_cut(ours, case["out"], logits, top_k)
    if "out_topk_only_path" in case:
        assert_same_cut(ours, case["out_topk_only_path"], logits, top_k)


@pytest.mark.parametrize("index", range(48))
def test_penalties(oracle_dir: Path, index: int) -> None:
    case = oracle_case(oracle_dir, "penalties", index, 48)
    logits = case["logits"]
    parameters = (case["repetition"], case["frequency"], case["presence"])
    ours = penalize(logits, *_history(case, len(logits)), *parameters)
    assert torch.equal(ours, case["out"])


def _process(kind: str, logits: Tensor, params: list[Case], outputs: list[list[int]]) -> Tensor:
    num_reqs, vocab = logits.shape
    if kind == "min_p":
        off = torch.zeros(num_reqs, dtype=torch.int32), torch.ones(num_reqs)
        return truncate(logits, *off, _floats([p["min_p"] for p in params]))
    if kind == "logit_bias":
        biases = [{int(token): value for token, value in (p["logit_bias"] or {}).items()} for p in params]
        return add_bias(logits, *_entries(biases))
    stops, _ = _ragged([p["stop"] + [-1] * (vocab - len(p["stop"])) for p in params])
    active = [len(ids) < p["min_tokens"] for p, ids in zip(params, outputs, strict=True)]
    return ban_tokens(logits, stops, torch.tensor(active))


@pytest.mark.parametrize("index", range(36))
def test_logits_processors(oracle_dir: Path, index: int) -> None:
    case = oracle_case(oracle_dir, "logits_processors", index, 36)
    params, outputs = case["params"], case["output_token_ids"]
    ours = _process(case["kind"], case["logits"], params, outputs)
    assert torch.equal(ours, case["out"])
    if "out_after_move" in case:
        order = [1, len(params) - 1, *range(2, len(params) - 1)]  # last row moved to row 0, rows 0, 1 swapped
        moved = [params[i] for i in order], [outputs[i] for i in order]
        assert torch.equal(_process(case["kind"], case["logits_after_move"], *moved), case["out_after_move"])


@pytest.mark.parametrize("index", range(30))
def test_bad_words(oracle_dir: Path, index: int) -> None:
    case = oracle_case(oracle_dir, "bad_words", index, 30)
    history = _history(case, len(case["logits"]))
    assert torch.equal(ban_bad_words(case["logits"], *history, *_words(case["bad_words"])), case["out"])


@pytest.mark.parametrize("index", range(30))
def test_logprobs(oracle_dir: Path, index: int) -> None:
    """Ids, values and ranks; among equal values upstream's order is its sort's, ours is by id."""
    case = oracle_case(oracle_dir, "logprobs", index, 30)
    logprobs = case["logits"].log_softmax(-1)
    torch.testing.assert_close(logprobs, case["logprobs_full"], rtol=0, atol=1e-6)
    ids, values, ranks = gather_logprobs(case["logprobs_full"], case["token_ids"], case["num_logprobs"])
    assert torch.equal(values, case["out_logprobs"])
    assert torch.equal(ranks, case["out_ranks"])
    assert torch.equal(ids[:, 0], case["out_token_ids"][:, 0])
    if not case["has_ties"]:
        assert torch.equal(ids, case["out_token_ids"])


def sample_chain(case: Case) -> tuple[Tensor, Tensor]:
    """The whole of sampling: ids, and the matrix [reqs, vocab] that `logprobs_mode` reports."""
    raw = case["logits"]
    num_reqs = len(raw)
    temperature = _floats(case["temperature"])
    logits = raw
    if "disallowed_mask" in case:
        allowed = (~case["disallowed_mask"]).nonzero()
        logits = allow_only(logits, case["disallowed_mask"].any(-1), allowed[:, 0], allowed[:, 1])
    history = _history(case, num_reqs)
    logits = ban_bad_words(logits, *history, *_words(case["bad_words"]))
    bias = [{int(token): value for token, value in (row or {}).items()} for row in case["logit_bias"]]
    logits = add_bias(logits, *_entries(bias))
    if case["penalties"]:
        logits = penalize(logits, *history, case["repetition"], case["frequency"], case["presence"])
    ids, processed = greedy(logits), logits
    if not case["all_greedy"]:
        logits, offset = scale_by_temperature(logits, temperature), temperature_offset(logits, temperature)
        top_k = case.get("top_k", torch.zeros(num_reqs, dtype=torch.int32))
        top_p = case.get("top_p", torch.ones(num_reqs))
        logits = truncate(logits, top_k, top_p, _floats(case["min_p"]))
        ids = torch.where(temperature < 1e-5, ids, draw(logits, case["noise"]))
        processed = logits + offset
    reported = raw if case["logprobs_mode"].startswith("raw") else processed
    return ids, reported.log_softmax(-1) if case["logprobs_mode"].endswith("logprobs") else reported


@pytest.mark.parametrize("index", range(72))
def test_whole_sampler(oracle_dir: Path, index: int) -> None:
    """Recorded noise gives the recorded tokens; ids, values and ranks of the report are as recorded."""
    case = oracle_case(oracle_dir, "sampler_forward", index, 72)
    ids, reported = sample_chain(case)
    assert ids.tolist() == case["sampled"]
    if case["num_logprobs"] is None:
        return
    top_ids, values, ranks = gather_logprobs(reported, ids, case["num_logprobs"])
    torch.testing.assert_close(values, case["out_lp"], rtol=1e-6, atol=2e-6)
    assert torch.equal(ranks, case["out_ranks"])
    is_tie = values[:, 1:, None] == reported[:, None, :]
    unique = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), is_tie.sum(-1) == 1], 1)
    assert torch.equal(top_ids[unique], case["out_lp_ids"][unique])
