"""Verification of drafts keeps the distribution of tokens: counted over small vocabularies."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.models.model import Model, Piece
from purestep.pure.record import replace
from purestep.pure.records.inputs import ModelInputs
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.state import StepState
from tests.speculation import prefilled, verified
from tests.toy_model import toy_model

VOCAB, NUM_REQS, LENGTH = 4, 3000, 3
TABLE = torch.tensor(
    [[0.3, -1.0, 1.1, 0.2], [2.0, 0.1, -0.4, 0.7], [-0.6, 0.9, 0.8, -2.0], [0.0, 1.5, -0.3, 0.4]],
    dtype=torch.float64,
)  # of logits behind each token
GUESSES = torch.tensor(
    [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.0, 0.5, 0.0, 0.5], [0.25, 0.25, 0.25, 0.25]]
)  # of drafts behind each token


def say(piece: Piece, weights: Any, carried: Any, inputs: ModelInputs, *, kernels: Kernels) -> tuple[Tensor]:
    """Logits of the token alone."""
    assert inputs.input_ids is not None
    return (TABLE[inputs.input_ids.long()],)


def markov() -> tuple[Model, Params]:
    model, params = toy_model()
    pieces = (*model.pieces[:-1], replace(model.pieces[-1], function=say))
    return replace(model, pieces=pieces, vocab_size=VOCAB), params


MODEL, PARAMS = markov()
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7, "temperature": 1.3},
    "min_p": {"min_p": 0.3},
    "presence": {"presence_penalty": 1.2},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": (1,)},
    "bias": {"logit_bias": {0: -1.0, 3: 1.0}, "bad_words_token_ids": ((2, 1),)},
}
PROMPT = 2


def distribution(outputs: Sequence[int], params: SamplingParams) -> NDArray[np.float64]:
    """Of the next token, by the book."""
    logits = TABLE[outputs[-1] if outputs else PROMPT].numpy().copy()
    for token, value in params.logit_bias:
        logits[token] += value
    for first, last in params.bad_words_token_ids:
        if outputs and outputs[-1] == first:
            logits[last] = -np.inf
    if len(outputs) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    logits[list(set(outputs))] -= params.presence_penalty
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    if params.min_p:
        p[p < params.min_p * p.max()] = 0
    if params.top_k:
        p[np.argsort(-p)[params.top_k :]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


def probability(outputs: Sequence[int], params: SamplingParams) -> float:
    """Of these outputs; a stop id ends them, and what then stands behind counts once, as -1."""
    chance = 1.0
    for place, token in enumerate(outputs):
        ended = (
            place >= params.min_tokens and place > 0 and outputs[place - 1] in (*params.stop_token_ids, -1)
        )
        if ended or token < 0:
            chance *= ended and token < 0
        else:
            chance *= distribution(outputs[:place], params)[token]
    return chance


@cache
def begun(mode: str, num_drafts: int) -> StepState:
    """Many requests of one kind, each with its first output."""
    params = SamplingParams(**({"seed": 5, "max_tokens": 9, "ignore_eos": True} | MODES[mode]))
    return prefilled(MODEL, PARAMS, [((PROMPT,), params)] * NUM_REQS, num_drafts=num_drafts, max_model_len=16)


def drafts_of(state: StepState, kind: str, num_drafts: int, noise: torch.Generator) -> Tensor:
    """Drafts of every row, each behind the one before."""
    known = state.ledger.num_known_tokens[:NUM_REQS].long()
    last = state.token_ids[torch.arange(NUM_REQS), known - 1].long()
    drafts = []
    for _ in range(num_drafts):
        if kind == "fixed":
            last = (last + 2) % VOCAB
        elif kind == "any":
            last = torch.randint(VOCAB, (NUM_REQS,), generator=noise)
        else:
            last = torch.multinomial(GUESSES[last], 1, generator=noise)[:, 0]
        drafts.append(last)
    found = torch.stack(drafts, 1)
    if kind == "drawn, some":
        counts = torch.randint(num_drafts + 1, (NUM_REQS, 1), generator=noise)
        found = torch.where(torch.arange(num_drafts) < counts, found, -1)
    return found


def probabilities(state: StepState, drafts: Tensor) -> Tensor:
    """What drawn drafts were drawn from: float32 [rows, drafts, vocab]."""
    known = state.ledger.num_known_tokens[:NUM_REQS].long()
    last = state.token_ids[torch.arange(NUM_REQS), known - 1].long()
    before = torch.cat([last[:, None], drafts[:, :-1].clamp(min=0)], 1)
    return torch.cat([GUESSES[before], torch.zeros(1, drafts.shape[1], VOCAB)])


def counted(mode: str, kind: str, num_drafts: int) -> tuple[dict[tuple[int, ...], int], int]:
    """How often each sequence of first outputs came, and how many drafts stood."""
    state, noise = begun(mode, num_drafts), torch.Generator().manual_seed(1)
    stood = 0
    while bool(((state.ledger.num_output_tokens < LENGTH) & state.ledger.active)[:NUM_REQS].any()):
        drafts = drafts_of(state, kind, num_drafts, noise)
        if kind.startswith("drawn"):
            state = replace(state, draft_probs=probabilities(state, drafts))
        own = {row: [token for token in guess if token >= 0] for row, guess in enumerate(drafts.tolist())}
        state, output = verified(MODEL, PARAMS, state, own)
        stood += int((output.sampled_token_ids[:, 1:] >= 0).sum())
    outputs = state.token_ids[:NUM_REQS, 1 : 1 + LENGTH]
    there = torch.arange(LENGTH) < state.ledger.num_output_tokens[:NUM_REQS, None]
    found: dict[tuple[int, ...], int] = {}
    for row in torch.where(there, outputs, -1).tolist():
        found[tuple(row)] = found.get(tuple(row), 0) + 1
    return found, stood


def assert_distributed(found: dict[tuple[int, ...], int], params: SamplingParams) -> None:
    """Pearson's chi-square over all sequences, rare ones taken together."""
    cells = {s: probability(s, params) for s in product(range(-1, VOCAB), repeat=LENGTH)}
    assert abs(sum(cells.values()) - 1) < 1e-9
    assert all(cells[sequence] > 0 for sequence in found), "a sequence that is impossible"
    common = [s for s, p in cells.items() if NUM_REQS * p >= 8]
    expected = np.array([NUM_REQS * cells[s] for s in common])
    counts = np.array([found.get(s, 0) for s in common], np.float64)
    if NUM_REQS - expected.sum() > 8:
        expected, counts = (
            np.append(expected, NUM_REQS - expected.sum()),
            np.append(counts, NUM_REQS - counts.sum()),
        )
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    chance = float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))
    assert chance > 1e-3, f"{statistic:.0f} with {freedom} degrees of freedom"


@pytest.mark.parametrize("kind", ["fixed", "any", "drawn", "drawn, some"])
@pytest.mark.parametrize(
    ("mode", "num_drafts"),
    [(mode, 2) for mode in MODES] + [("plain", 1), ("plain", 3), ("top_k", 1), ("presence", 3)],
)
def test_the_distribution_is_kept(mode: str, num_drafts: int, kind: str) -> None:
    """Certain drafts, random ones without and with the probabilities that they were drawn from, fewer than there may
    be; and drafts do stand."""
    found, stood = counted(mode, kind, num_drafts)
    params = SamplingParams(**({"seed": 5, "max_tokens": 9, "ignore_eos": True} | MODES[mode]))
    assert_distributed(found, params)
    assert stood > NUM_REQS / 10


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("rates", [(0.9, 0.45, 0.45), (0.3,), (0.6, 0.0, 0.0), (1.0, 1.0, 1.0)])
def test_benchmarks_may_say_how_often_drafts_stand(temperature: float, rates: tuple[float, ...]) -> None:
    """As often as is said, the first, the first two, all three; a draft that falls is replaced as ever."""
    params = SamplingParams(seed=5, max_tokens=9, ignore_eos=True, temperature=temperature)
    state = prefilled(MODEL, PARAMS, [((PROMPT,), params)] * NUM_REQS, num_drafts=3, max_model_len=16)
    state = replace(state, acceptance_rates=rates)
    drafts = [[int(token), 1, 2] for token in torch.randint(VOCAB, (NUM_REQS,)).tolist()]
    _, output = verified(MODEL, PARAMS, state, dict(enumerate(drafts)))
    kept = output.sampled_token_ids[:NUM_REQS]
    for place in range(3):
        wanted = rates[place] if place < len(rates) else 0.0
        stood = float((kept[:, place + 1] >= 0).double().mean())
        assert abs(stood - wanted) <= 4 * (wanted * (1 - wanted) / NUM_REQS) ** 0.5
        stands = kept[:, place + 1] >= 0
        assert torch.equal(kept[stands, place], torch.tensor(drafts, dtype=torch.int32)[stands, place])
    last = kept.gather(1, (kept >= 0).sum(-1, keepdim=True) - 1)[:, 0]
    fell = kept[:, 1] < 0
    if temperature:
        assert (last[fell] != torch.tensor(drafts)[fell, 0]).all(), "what fell is not drawn again"
    else:
        before = state.token_ids[:NUM_REQS, 1].long()
        assert torch.equal(last[fell].long(), TABLE[before[fell]].argmax(-1))
