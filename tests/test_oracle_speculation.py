"""The kernels of speculation against what upstream's own functions gave for the same inputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from purestep.kernels.reference.ngram import propose_ngram
from purestep.kernels.reference.verify import count_accepted, draw_last, verify_greedy
from tests.test_oracle_sampling import oracle_case

Case = dict[str, Any]


def recorded_noise(case: Case) -> tuple[Tensor, Tensor]:
    """Uniform draws of all drafts and the exponential rows, drawn as upstream draws them."""
    torch.manual_seed(case["global_seed"])
    counts = case["num_draft_tokens"]
    generators = {int(row): torch.Generator().manual_seed(seed) for row, seed in case["seeds"].items()}
    uniform = torch.rand(sum(counts), dtype=torch.float64)
    start = 0
    for row, count in enumerate(counts):
        if count and row in generators:
            uniform[start : start + count].uniform_(generator=generators[row])
        start += count
    exponential = torch.empty(len(counts), case["V"]).exponential_()
    for row, generator in generators.items():
        if counts[row]:
            exponential[row].exponential_(generator=generator)
    return uniform, exponential


def padded(flat: Tensor, counts: list[int], width: int, fill: float) -> Tensor:
    """Entries laid end to end as [requests, width, ...]."""
    rows = torch.full((len(counts), width, *flat.shape[1:]), fill, dtype=flat.dtype)
    for row, part in enumerate(flat.split(counts)):
        rows[row, : len(part)] = part
    return rows


@pytest.mark.parametrize("index", range(72))
def test_rejection_sampling(oracle_dir: Path, index: int) -> None:
    """Recorded noise gives the recorded tokens, of greedy and of random rows, with and without draft probabilities."""
    case = oracle_case(oracle_dir, "rejection_sample", index, 72)
    counts, most = case["num_draft_tokens"], case["max_spec_len"]
    num_drafts, vocab, reqs = torch.tensor(counts), case["V"], case["B"]
    drafts = padded(case["draft_token_ids"], counts, most, 0)
    logits = padded(case["target_logits"], counts, most + 1, 0.0)
    # The bonus token is given: behind the drafts nothing else is possible.
    certain = torch.full((reqs, vocab), -torch.inf).scatter(1, case["bonus_token_ids"].long(), 0.0)
    logits[torch.arange(reqs), num_drafts] = certain
    guesses = torch.where(torch.arange(most) < num_drafts[:, None], drafts, -1)
    ours, has_nan = verify_greedy(logits.argmax(-1), guesses, torch.zeros(reqs, most + 1, dtype=torch.bool))
    assert not has_nan.any()
    is_greedy = torch.tensor(case["temperature"]) == 0
    if not is_greedy.all():
        uniform, exponential = recorded_noise(case)
        assert torch.equal(uniform, case["uniform"])
        q = padded(case["draft_probs"], counts, most, 0.0) if "draft_probs" in case else None
        accepted = count_accepted(logits, drafts, num_drafts, q, padded(uniform, counts, most, 0.5))
        last = draw_last(logits, drafts, num_drafts, accepted, q, exponential)
        for row in (~is_greedy).nonzero().flatten().tolist():
            n = int(accepted[row])
            kept = [*drafts[row, :n].tolist(), int(last[row])]
            ours[row] = torch.tensor(kept + [-1] * (most + 1 - len(kept)))
    assert torch.equal(ours, case["out"])


def drafts_of(tokens: list[int], case: Case, num_drafts: int) -> list[int]:
    width, length = len(tokens) + 3, torch.tensor([len(tokens)])
    tape = torch.tensor([[99] * width, tokens + [tokens[-1] if tokens else 0] * 3], dtype=torch.int32)
    drafts = propose_ngram(
        tape,
        torch.tensor([1]),
        length,
        case["max_model_len"] - length,
        min_n=case["min_n"],
        max_n=case["max_n"],
        num_drafts=num_drafts,
    )[0].tolist()
    count = sum(token >= 0 for token in drafts)
    assert drafts[count:] == [-1] * (num_drafts - count)
    return drafts[:count]


def test_ngram(oracle_dir: Path) -> None:
    """What upstream's proposer found in 240 histories, and in 24 batches, whose rows without a sample get none."""
    recorded = json.loads((oracle_dir / "ngram.json").read_text())
    assert {kind: len(cases) for kind, cases in recorded.items()} == {"single": 240, "batch": 24}
    for case in recorded["single"]:
        assert drafts_of(case["tokens"], case, case["k"]) == case["out"]
    for case in recorded["batch"]:
        for tokens, sampled, out in zip(case["tokens"], case["sampled_token_ids"], case["out"], strict=True):
            ours = drafts_of(tokens, case, case["num_speculative_tokens"]) if sampled else []
            assert ours == out
