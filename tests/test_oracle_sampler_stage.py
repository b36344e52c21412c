"""The sampling stage against what upstream's own functions gave: requests with parameters and histories in, tokens out.

`tests/test_oracle_sampling.py` compares the kernels. Here everything goes the way of a request: its parameters are
packed by a plan, taken in by `absorb`, and read by `sample_tokens`.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from purestep.pure.records.sampling_params import SamplingParams
from tests.sampling_stage import EVERY, Asker, final_logits, sampled
from tests.test_oracle_sampling import assert_same_cut, oracle_case, sample_chain

Case = dict[str, Any]
Fields = dict[str, Any]

WATCHED: Fields = {"logprobs": EVERY, "logprobs_mode": "processed_logits", "max_tokens": None}
WATCHED_GREEDY = WATCHED | {"temperature": 0.0}


def askers(case: Case, params: list[Fields]) -> list[Asker]:
    """Requests with a case's histories; placeholders and padding in them never count, so they are left out."""
    vocab, num_reqs = case["logits"].shape[-1], len(params)

    def known(ids: list[int]) -> list[int]:
        return [token for token in ids if 0 <= token < vocab]

    outputs = case.get("output_token_ids", [[]] * num_reqs)
    prompts = case["prompt_token_ids"].tolist() if "prompt_token_ids" in case else [[0]] * num_reqs
    return [
        Asker(SamplingParams(**own), known(prompt), known(output))
        for own, prompt, output in zip(params, prompts, outputs, strict=True)
    ]


def final(case: Case, params: list[Fields], logits: Tensor) -> Tensor:
    """The logits that tokens are drawn from when all requests have these parameters too."""
    return final_logits(sampled(askers(case, params), logits))


def bias_of(entries: dict[str, float] | None) -> dict[int, float]:
    return {int(token): value for token, value in (entries or {}).items()}


@pytest.mark.parametrize("index", range(84))
def test_top_k_and_top_p(oracle_dir: Path, index: int) -> None:
    case = oracle_case(oracle_dir, "topk_topp", index, 84)
    logits = case["logits"]
    top_k = case.get("k", torch.zeros(len(logits), dtype=torch.int32))
    top_p = case.get("p", torch.ones(len(logits)))
    params = [WATCHED | {"top_k": k, "top_p": p} for k, p in zip(top_k.tolist(), top_p.tolist(), strict=True)]
    assert_same_cut(final(case, params, logits), case["out"], logits, top_k)


@pytest.mark.parametrize("index", range(48))
def test_penalties(oracle_dir: Path, index: int) -> None:
    case = oracle_case(oracle_dir, "penalties", index, 48)
    assert torch.equal(final(case, penalties(case), case["logits"]), case["out"])


def penalties(case: Case) -> list[Fields]:
    names = ("repetition", "frequency", "presence")
    values = zip(*(case[name].tolist() for name in names), strict=True)
    return [
        WATCHED_GREEDY | {f"{n}_penalty": value for n, value in zip(names, row, strict=True)}
        for row in values
    ]


@pytest.mark.parametrize("index", range(36))
def test_logits_processors(oracle_dir: Path, index: int) -> None:
    case = oracle_case(oracle_dir, "logits_processors", index, 36)
    params = [processor(case["kind"], own) for own in case["params"]]
    assert torch.equal(final(case, params, case["logits"]), case["out"])


def processor(kind: str, recorded: Fields) -> Fields:
    """One request's parameters, of which only those of this kind are set."""
    if kind == "min_p":
        return WATCHED | {"min_p": recorded["min_p"]}
    if kind == "logit_bias":
        return WATCHED_GREEDY | {"logit_bias": bias_of(recorded["logit_bias"])}
    return WATCHED_GREEDY | {"min_tokens": recorded["min_tokens"], "stop_token_ids": recorded["stop"]}


@pytest.mark.parametrize("index", range(30))
def test_bad_words(oracle_dir: Path, index: int) -> None:
    case = oracle_case(oracle_dir, "bad_words", index, 30)
    words = [case["bad_words"].get(str(i), []) for i in range(case["B"])]
    params = [WATCHED_GREEDY | {"bad_words_token_ids": own} for own in words]
    assert torch.equal(final(case, params, case["logits"]), case["out"])


def whole(case: Case) -> list[Fields]:
    """Every parameter of a case of the whole sampler."""
    num_reqs = case["B"]
    columns: dict[str, list[Any]] = {
        "temperature": case["temperature"],
        "min_p": case["min_p"],
        "logit_bias": [bias_of(entries) for entries in case["logit_bias"]],
        "bad_words_token_ids": [case["bad_words"].get(str(i), []) for i in range(num_reqs)],
    }
    if case["penalties"]:
        columns |= {f"{n}_penalty": case[n].tolist() for n in ("repetition", "frequency", "presence")}
    columns |= {name: case[name].tolist() for name in ("top_k", "top_p") if name in case}
    if "disallowed_mask" in case:
        rows = [(~row).nonzero().flatten().tolist() for row in case["disallowed_mask"]]
        columns["allowed_token_ids"] = [None if len(ids) == case["V"] else ids for ids in rows]
    names = {"logprobs": case["num_logprobs"], "logprobs_mode": case["logprobs_mode"]}
    return [names | {name: column[i] for name, column in columns.items()} for i in range(num_reqs)]


def comparable(case: Case) -> Tensor:
    """Requests whose report can be compared: upstream's sampler got cuts for greedy ones, as no request has them."""
    greedy = torch.tensor(case["temperature"]) < 1e-5
    is_cut = torch.zeros_like(greedy)
    for name, off in (("top_k", case["V"]), ("top_p", 1.0)):
        if name in case:
            is_cut |= case[name] < off
    is_cut |= torch.tensor(case["min_p"]) > 0
    return ~(greedy & is_cut) | torch.tensor(case["logprobs_mode"].startswith("raw") or case["all_greedy"])


@pytest.mark.parametrize("index", range(72))
def test_whole_sampler(oracle_dir: Path, index: int) -> None:
    """Recorded noise gives the recorded tokens; values, ranks and, where no values tie, ids are as recorded."""
    case = oracle_case(oracle_dir, "sampler_forward", index, 72)
    tokens = sampled(askers(case, whole(case)), case["logits"], exponential=case.get("noise"))
    assert tokens.token_ids.tolist() == case["sampled"]
    assert not tokens.has_nan.any()
    report = tokens.logprobs_tensors
    if case["num_logprobs"] is None:
        assert report is None
        return
    assert report is not None
    rows = comparable(case)
    torch.testing.assert_close(report.logprobs[rows], case["out_lp"][rows], rtol=1e-6, atol=2e-6)
    assert torch.equal(report.selected_token_ranks[rows], case["out_ranks"][rows])
    _, reported = sample_chain(case)
    for row in rows.nonzero().flatten().tolist():
        counts = Counter(reported[row].tolist())
        values = reported[row][case["out_lp_ids"][row].long()].tolist()
        unique = torch.tensor([True] + [counts[value] == 1 for value in values[1:]])
        assert torch.equal(report.logprob_token_ids[row][unique], case["out_lp_ids"][row][unique])


def test_most_reports_are_compared(oracle_dir: Path) -> None:
    cases = [oracle_case(oracle_dir, "sampler_forward", index, 72) for index in range(72)]
    reporting = [case for case in cases if case["num_logprobs"] is not None]
    assert sum(int(comparable(case).sum()) for case in reporting) >= 0.9 * sum(c["B"] for c in reporting)
