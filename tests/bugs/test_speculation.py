"""Speculation changes when tokens come: not the noise of others, not what is told of tokens, not whose rules hold."""

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.pure.grammar import apply_grammar, grammar_mask
from purestep.pure.record import replace
from purestep.pure.records.drafter import HostDrafter
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import GrammarOutput
from purestep.pure.records.state import StepState
from purestep.pure.step import execute, sample
from tests.speculation import NUM_DRAFTS, guessed, history, plain, prefilled, run_plain, verified
from tests.state.test_runner import GREEDY, alone
from tests.state.test_runner_drafts import Stages
from tests.state.upstream import Upstream
from tests.tiny import tiny_llama

VOCAB = 16
MODEL, PARAMS = tiny_llama(vocab_size=VOCAB)
FREE = SamplingParams(temperature=0, ignore_eos=True, max_tokens=10)


def test_a_request_without_drafts_draws_what_it_draws_without_speculation() -> None:
    """Beside one with 2 drafts, and with any other number, of the same seed."""
    drawn = SamplingParams(temperature=0.9, seed=7, ignore_eos=True, max_tokens=8)
    begun = prefilled(MODEL, PARAMS, [((5, 9, 2), drawn), ((5, 9, 2), drawn)])
    expected = history(run_plain(MODEL, PARAMS, begun), 1)
    for drafts in ([4, 4], [], [11], [1, 2, 3]):
        state = begun
        while state.ledger.active[1]:
            state, _ = verified(MODEL, PARAMS, state, {0: drafts, 1: []})
        assert history(state, 1) == expected


def model_logits(tokens: list[int]) -> Tensor:
    """What the model says behind a history, in a forward pass of its own."""
    last = len(tokens) - 1
    state = prefilled(MODEL, PARAMS, [(tokens[:last], FREE)])
    tapes = state.token_ids.clone()
    tapes[0, last] = tokens[last]
    state = plain(replace(state, token_ids=tapes), [0])
    logits = execute(MODEL, PARAMS, state, kernels=reference).logits
    assert logits is not None
    return logits[0]


def test_raw_log_probabilities_are_the_models_and_processed_ones_those_that_tokens_are_drawn_from() -> None:
    """At temperature 0.5, with a bias and penalties, of accepted drafts and of the token behind: recomputed plainly."""
    kind = SamplingParams(
        temperature=0.5, seed=3, logit_bias={4: 1.5}, presence_penalty=0.7, ignore_eos=True, logprobs=-1
    )
    modes = ("raw_logprobs", "processed_logprobs")
    requests = [((3, 1, i % 4), replace(kind, logprobs_mode=modes[i % 2])) for i in range(12)]
    state = prefilled(MODEL, PARAMS, requests)
    before = [history(state, row) for row in range(12)]
    plain = run_plain(MODEL, PARAMS, state)
    _, output = verified(MODEL, PARAMS, state, {row: history(plain, row)[4:6] for row in range(12)})
    told, num_told = output.logprobs_tensors, [0, 0]
    assert told is not None
    for row, place in product(range(12), range(NUM_DRAFTS)):
        if output.sampled_token_ids[row, place] < 0:
            continue
        known = before[row] + output.sampled_token_ids[row, :place].tolist()
        logits = model_logits(known)
        if row % 2:
            logits[4] += 1.5
            logits[sorted(set(known[3:]))] -= 0.7
            logits /= 0.5
        at = row * (NUM_DRAFTS + 1) + place
        ids, values = told.logprob_token_ids[at, 1:].long(), told.logprobs[at, 1:]
        ours = torch.zeros_like(values).scatter(0, ids, values)
        torch.testing.assert_close(ours.to(logits.dtype), logits.log_softmax(-1), rtol=1e-6, atol=1e-6)
        num_told[min(place, 1)] += 1
    assert min(num_told) >= 12, "drafts stood"


def test_min_tokens_and_missing_drafts_keep_every_row_in_its_place() -> None:
    """Drafts [2, 0, 3] and min_tokens [0, 2, 4], and every other number of drafts, right or wrong."""
    wants_to_stop = replace(FREE, stop_token_ids=(1,), logit_bias={1: 50.0})
    params = [FREE, replace(wants_to_stop, min_tokens=2), replace(wants_to_stop, min_tokens=4)]
    begun = prefilled(MODEL, PARAMS, [((5, 9, 2 + i), own) for i, own in enumerate(params)])
    end = run_plain(MODEL, PARAMS, begun)
    expected = [history(end, row) for row in range(3)]
    assert [len(own) - 3 for own in expected] == [10, 3, 5]
    for counts, shift in product([(2, 0, 3), (0, 3, 3), (3, 2, 0), (1, 0, 2)], (0, 1)):
        state = begun
        while state.ledger.active[:3].any():
            drafts = {}
            for row, count in enumerate(counts):
                known = len(history(state, row))
                drafts[row] = [(token + shift) % VOCAB for token in expected[row][known : known + count]]
            state, _ = verified(MODEL, PARAMS, state, drafts)
        assert [history(state, row) for row in range(3)] == expected
        assert torch.equal(state.ledger.num_computed_tokens, end.ledger.num_computed_tokens)


def masked(
    state: StepState, scheduled: dict[str, list[int]], allowed: dict[str, list[int]]
) -> list[list[int]]:
    """The tokens of a step in which each request may say one token at each place."""
    names = tuple(reversed(allowed))
    words = np.array([[1 << token] for name in names for token in allowed[name]], np.int32)
    found = grammar_mask(
        GrammarOutput(names, words),
        tuple(allowed),
        scheduled,
        num_rows=len(allowed) * (1 + NUM_DRAFTS),
        vocab_size=VOCAB,
        num_drafts=NUM_DRAFTS,
    )
    mask = replace(found, bitmask=torch.tensor(found.bitmask), mask_of_row=torch.tensor(found.mask_of_row))
    executed = apply_grammar(execute(MODEL, PARAMS, state, kernels=reference), mask, kernels=reference)
    _, output = sample(executed, kernels=reference)
    tokens = output.sampled_token_ids.tolist()
    return [[token for token in own if token >= 0] for own in tokens]


def test_masks_follow_what_was_scheduled_and_tokens_what_is_verified() -> None:
    """Drafts [3, 3] are scheduled and have masks, and the device has [1, 3], or others: every token is legal."""
    allowed = {"a": [1, 2, 3, 4], "b": [11, 12, 13, 14]}
    scheduled = {name: own[:3] for name, own in allowed.items()}
    for kept in product(range(NUM_DRAFTS + 1), repeat=2):
        state = prefilled(MODEL, PARAMS, [((5, 9), FREE), ((7, 3), FREE)])
        drafts = {
            row: own[:count] for row, (own, count) in enumerate(zip(scheduled.values(), kept, strict=True))
        }
        expected = [own[: 1 + count] for own, count in zip(allowed.values(), kept, strict=True)]
        assert masked(guessed(state, drafts), scheduled, allowed) == expected


def test_pipeline_stages_agree_on_how_many_drafts_were_accepted() -> None:
    """Three drafts, one of them right, in every step: batches and ledgers are equal after each."""
    prompt = (5, 9, 2)
    expected = alone(prompt, replace(GREEDY, max_tokens=9), "r")

    def one_right(kept: None, histories: Any, budgets: Any) -> Any:
        (right,) = ((*expected, 0)[len(own) - len(prompt)] for own in histories)
        return None, ((right, (right + 1) % VOCAB, right)[: budgets[0]],)

    stages = Stages(HostDrafter(3, one_right))
    scheduler = Upstream(num_blocks=64, block_size=4, budget=40, max_model_len=32, num_drafts=3)
    scheduler.add("r", prompt, replace(GREEDY, max_tokens=9))
    num_steps = 0
    while scheduler.clients["r"].status != "finished":
        output = scheduler.schedule()
        stages.execute_model(output)
        scheduler.update(output, stages.sample_tokens())
        scheduler.take(stages.take_draft_token_ids())
        stages.assert_agreed()
        num_steps += 1
    assert tuple(scheduler.clients["r"].outputs) == expected
    assert num_steps == 5  # a token, then two a step
