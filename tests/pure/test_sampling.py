"""Sampling of a batch: each row as if it were alone, and what is reported of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.pure.record import replace
from purestep.pure.records.outputs import SampledTokens
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.sampling_rows import stop_ids_of
from purestep.pure.strategies import logits, sampling_params
from tests.laws import equal
from tests.profiles import examples
from tests.sampling_stage import EVERY, Asker, final_logits, sampled

pytestmark = pytest.mark.usefixtures("unchecked_records")

VOCAB, END = 9, (0,)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=5)
WATCHED = SamplingParams(logprobs=EVERY, logprobs_mode="processed_logits", max_tokens=None)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Asker], Tensor]:
    """Requests of any kind with histories of any kind, and logits with ties and forbidden tokens."""
    num_reqs = draw(st.integers(1, 4))
    params = sampling_params(VOCAB, max_model_len=16, eos_token_ids=END)
    askers = [
        Asker(
            draw(params),
            (draw(st.integers(0, VOCAB - 1)), *draw(TOKENS)),
            draw(TOKENS),
            draw(st.integers(0, 3)),
        )
        for _ in range(num_reqs)
    ]
    return askers, draw(logits(num_reqs, VOCAB))


def row_of(tokens: SampledTokens, index: int, width: int | None) -> tuple[object, ...]:
    """What is said of one request, as wide as it asked for."""
    found = tokens.logprobs_tensors
    own = (tokens.token_ids[index], tokens.stops[index], tokens.has_nan[index])
    if width is None or found is None:
        return own
    columns = slice(1 + (VOCAB if width == EVERY else width))
    report = found.logprob_token_ids[index, columns], found.logprobs[index, columns]
    return *own, *report, found.selected_token_ranks[index]


@examples(0.2)
@given(batches(), st.randoms(use_true_random=False))
def test_every_row_is_sampled_as_if_it_were_alone(batch: tuple[list[Asker], Tensor], rng: object) -> None:
    """Neighbours, their parameters and the order change no bit of a request's token and report."""
    askers, table = batch
    order = list(range(len(askers)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    together = sampled([askers[i] for i in order], table[order], eos_token_ids=END)
    for index, i in enumerate(order):
        alone = sampled([askers[i]], table[i, None], eos_token_ids=END)
        width = askers[i].params.logprobs
        assert equal(row_of(together, index, width), row_of(alone, 0, width))


@examples(0.3)
@given(batches())
def test_a_token_is_one_that_may_be(batch: tuple[list[Asker], Tensor]) -> None:
    """Allowed, no bad word, no end before min_tokens; it stops its row if it is an end and comes late enough."""
    askers, table = batch
    tokens = sampled(askers, table, eos_token_ids=END)
    for asker, row, token, stops in zip(askers, table, tokens.token_ids.tolist(), tokens.stops, strict=True):
        params, ends = asker.params, stop_ids_of(asker.params, END)
        is_short = len(asker.outputs) < params.min_tokens
        banned = set(ends[0] if is_short else ())
        banned |= {word[-1] for word in params.bad_words_token_ids if ends_with(asker.outputs, word[:-1])}
        allowed = set(range(VOCAB)) if params.allowed_token_ids is None else set(params.allowed_token_ids)
        possible = {t for t in allowed - banned if row[t] > -float("inf")}
        if possible:
            assert token in possible
            is_late = len(asker.outputs) + 1 >= params.min_tokens
            assert bool(stops) == (token in ends[0][: ends[1]] and is_late)


def ends_with(outputs: object, beginning: tuple[int, ...]) -> bool:
    return not beginning or tuple(outputs)[-len(beginning) :] == beginning  # type: ignore[arg-type]


@examples(0.3)
@given(logits(2, VOCAB))
def test_neutral_parameters_leave_the_models_logits(table: Tensor) -> None:
    """Bit for bit, also beside a request that changes its own in every way."""
    busy = replace(WATCHED, temperature=0.3, top_k=2, repetition_penalty=2.0, logit_bias=((1, 5.0),))
    for askers in ([Asker(WATCHED)] * 2, [Asker(WATCHED), Asker(busy, (1,), (2,))]):
        assert equal(final_logits(sampled(askers, table))[0], table[0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_processed_logits_are_what_temperature_divides(temperature: float) -> None:
    """Also where the largest logit is forbidden or moved, so that another one leads."""
    table = torch.tensor([[3.0, 1.0, 0.5, -2.0]])
    params = replace(WATCHED, temperature=temperature)
    for changes, processed in (
        ({"allowed_token_ids": (1, 2, 3)}, [-float("inf"), 1.0, 0.5, -2.0]),
        ({"logit_bias": ((2, 6.0),)}, [3.0, 1.0, 6.5, -2.0]),
        ({}, [3.0, 1.0, 0.5, -2.0]),
    ):
        found = final_logits(sampled([Asker(replace(params, **changes))], table))
        torch.testing.assert_close(found, torch.tensor([processed]) / temperature)


def test_rows_report_in_their_own_modes() -> None:
    """Raw and processed, logits and log-probabilities side by side."""
    table = torch.tensor([[3.0, 1.0, 0.5, -2.0]]).expand(4, -1)
    modes = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
    params = replace(WATCHED, temperature=0.5, logit_bias=((1, 1.0),))
    found = final_logits(sampled([Asker(replace(params, logprobs_mode=mode)) for mode in modes], table))
    processed = torch.tensor([3.0, 2.0, 0.5, -2.0]) / 0.5
    expected = [table[0].log_softmax(-1), processed.log_softmax(-1), table[0], processed]
    torch.testing.assert_close(found, torch.stack(expected))
