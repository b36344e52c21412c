"""A token is drawn from its own request's distribution, whatever neighbours ask for, however small the temperature."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from purestep.kernels.donating import donating
from purestep.pure.record import replace
from purestep.pure.records.sampling_params import SamplingParams
from tests.bugs.tiny_engine import BLOCK_SIZE, alone, drained, engine
from tests.sampling_stage import EVERY, Asker, final_logits, sampled

WATCHED = SamplingParams(logprobs=EVERY, logprobs_mode="processed_logits", max_tokens=None)
NAN, INFINITY = float("nan"), float("inf")


def random_logits(num_reqs: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(num_reqs, vocab_size, generator=generator)


def test_top_k_keeps_the_same_tokens_in_a_batch_of_any_size() -> None:
    """Every logit equal to the k-th is kept, k = 1 is greedy, and neither depends on how many rows there are."""
    rows = [(3, 2, 2, 2, 1), (2, 2, 2, 2, 2), (1, 3, 3, 0, 3), (0, 0, 1, 1, 2), (2, 1, 2, 1, 2)]
    rows += [
        tuple(torch.randint(0, 3, (5,), generator=torch.Generator().manual_seed(i)).tolist())
        for i in range(5)
    ]
    for k in (1, 2, 3, 4):
        asker = Asker(replace(WATCHED, top_k=k))
        logits = torch.tensor(rows, dtype=torch.float32)
        together = sampled([asker] * len(rows), logits, kernels=donating)
        finals = final_logits(together)
        for size in (1, 2, 7, 8, 9):
            part = sampled([asker] * size, logits[:size], kernels=donating)
            assert torch.equal(final_logits(part), finals[:size])
        for row, final in zip(rows, finals, strict=True):
            kept = [token for token, value in enumerate(final.tolist()) if value > -INFINITY]
            kth = sorted(row, reverse=True)[k - 1]
            assert kept == ([row.index(max(row))] if k == 1 else [t for t, x in enumerate(row) if x >= kth])
        if k == 1:
            greedy = sampled([Asker(SamplingParams(temperature=0.0))] * len(rows), logits, kernels=donating)
            assert together.token_ids.tolist() == greedy.token_ids.tolist()


def test_temperatures_near_zero_tend_to_greedy_and_stay_finite() -> None:
    """From 1e-3 down to 0, in every dtype: the largest logit, with log-probability 0, and no NaN anywhere."""
    temperatures = [*torch.logspace(-3, -7, 41).tolist(), 0.0]
    vocab_size = 16
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # Processed logits are multiples of 1 / temperature: narrow types do not hold them.
        for mode in ("processed_logits", "processed_logprobs")[dtype != torch.float32 :]:
            params = replace(WATCHED, logprobs_mode=mode)
            askers = [Asker(replace(params, temperature=t), stream=i) for i, t in enumerate(temperatures)]
            generator = torch.Generator().manual_seed(1)
            order = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in askers])
            logits = (order * 4.0).to(dtype)  # up to 60, and 4 apart

            tokens = sampled(askers, logits, kernels=donating)

            assert torch.equal(tokens.token_ids, logits.argmax(-1).int())
            assert not tokens.has_nan.any()
            assert tokens.logprobs_tensors is not None
            values = tokens.logprobs_tensors.logprobs
            assert not values.isnan().any() and (values < INFINITY).all()
            assert (tokens.logprobs_tensors.selected_token_ranks == 1).all()
            if dtype == torch.float32:
                assert values.isfinite().all()
            if mode == "processed_logprobs":
                is_drawn = torch.tensor([t >= 1e-5 for t in temperatures])
                assert (values[is_drawn, 0] == 0).all()


def test_penalties_of_a_neighbour_change_no_bit_of_an_unpenalised_request() -> None:
    """Alone, before and after a penalised request, and after that has left: the same logits and the same token."""
    vocab_size = 12
    logits = random_logits(3, vocab_size)
    plain = Asker(WATCHED, (1, 2, 3), (11, 5, 11))
    penalised = Asker(
        replace(WATCHED, frequency_penalty=0.7, repetition_penalty=1.3, presence_penalty=-0.4),
        (11, 4),
        (7, 7, 7, 11),
        stream=1,
    )
    expected = {asker.stream: sampled([asker], logits[asker.stream, None]) for asker in (plain, penalised)}
    assert torch.equal(final_logits(expected[0])[0], logits[0])
    assert not torch.equal(final_logits(expected[1])[0], logits[1])
    for order in ((plain, penalised), (penalised, plain), (penalised, plain, penalised)):
        rows = torch.stack([logits[asker.stream] for asker in order])
        together = sampled(order, rows, kernels=donating)
        for index, asker in enumerate(order):
            assert torch.equal(final_logits(together)[index], final_logits(expected[asker.stream])[0])
            assert together.token_ids[index] == expected[asker.stream].token_ids[0]


def test_a_penalised_request_may_join_and_outlive_a_plain_one() -> None:
    """A runs 3 steps alone, B joins with a penalty, A leaves first: both get what they get alone."""
    plain = SamplingParams(temperature=0.0, max_tokens=5)
    penalised = SamplingParams(temperature=0.0, max_tokens=8, frequency_penalty=0.7)
    with engine() as own:
        own.add_request("a", (5, 9, 2), plain)
        for _ in range(3):
            own.step()
        own.add_request("b", (5, 9, 2), penalised)
        results = drained(own)

    assert results["a"].token_ids == alone((5, 9, 2), plain).token_ids
    assert results["b"].token_ids == alone((5, 9, 2), penalised).token_ids


def test_min_tokens_holds_back_stop_ids_and_the_models_own_end() -> None:
    """Logits that favour them: none among the first min_tokens outputs, whatever stops there are, in any chunks."""
    end = 7
    favoured = {end: 100.0, **dict.fromkeys(range(20, 32), 90.0)}
    for min_tokens in (1, 3):
        for stops in ((), (20,), tuple(range(20, 30))):
            for ignore_eos in (False, True):
                params = SamplingParams(
                    temperature=0.0,
                    min_tokens=min_tokens,
                    max_tokens=min_tokens + 2,
                    stop_token_ids=stops,
                    ignore_eos=ignore_eos,
                    logit_bias=favoured,
                )
                for budget in (2, 64):
                    result = alone(
                        (5, 9, 2, 7, 1), params, eos_token_ids=(end,), max_num_batched_tokens=budget
                    )
                    assert not {end, *stops}.intersection(result.token_ids[:min_tokens])
                    assert result.token_ids[min_tokens] == end
                    assert result.finish_reason == ("length" if ignore_eos else "stop")


def test_prompts_with_one_seed_draw_independently() -> None:
    """64 equal prompts and one seed, near-uniform over 4 tokens: neighbours and successors agree as chance has it."""
    ids = (1, 2, 3, 4)
    params = SamplingParams(seed=5, temperature=1e4, allowed_token_ids=ids, max_tokens=8)
    prompts = [(5, 9, 2)] * 64
    with engine(max_num_reqs=64, kv_cache_bytes=400 * 1024) as own:
        drawn = [result.token_ids for result in own.generate(prompts, params, progress=False)]
    with engine(max_num_reqs=5, kv_cache_bytes=400 * 1024) as own:
        again = own.generate(prompts, [params] * 64, progress=False)

    assert [result.token_ids for result in again] == drawn, "the form of the call, or the row, matters"
    joint = Counter(pair for a, b in pairwise(drawn) for pair in zip(a, b, strict=True))
    in_time = Counter(pair for tokens in drawn for pair in pairwise(tokens))
    for counts in (joint, in_time):
        expected = counts.total() / 16
        chi_square = sum((counts[a, b] - expected) ** 2 / expected for a in ids for b in ids)
        assert chi_square < 40, "15 degrees of freedom: 40 is exceeded once in 2,000 times"


@pytest.mark.parametrize("broken", [NAN, INFINITY])
def test_logits_without_a_distribution_are_flagged_and_neighbours_stay_exact(broken: float) -> None:
    check_flags(broken)


def check_flags(broken: float = NAN) -> None:
    """One NaN or +inf flags its row alone; -inf is how a model forbids a token, and flags nothing."""
    askers = [Asker(WATCHED, stream=i) for i in range(3)]
    logits = random_logits(3, 8)
    logits[2, 3] = -INFINITY
    clean = sampled(askers, logits)
    assert clean.has_nan.tolist() == [False, False, False]
    for places in ([4], [0, 7], list(range(8))):
        poisoned = logits.clone()
        poisoned[1, places] = broken
        tokens = sampled(askers, poisoned, kernels=donating)
        assert tokens.has_nan.tolist() == [False, True, False]
        for index in (0, 2):
            assert tokens.token_ids[index] == clean.token_ids[index]
            assert torch.equal(final_logits(tokens)[index], final_logits(clean)[index])


def test_a_request_of_nan_ends_as_an_error_and_none_of_its_blocks_is_used_again() -> None:
    """NaN in its third step: it keeps the tokens before; neighbours are exact; its prompt is not found in the cache."""
    poison, prompt, neighbour = 33, (1, 2, 3, 4, 5, 6, 7, 8), (40, 8, 22)
    good = SamplingParams(temperature=0.0, max_tokens=6)
    bad = replace(good, allowed_token_ids=(poison,))

    def embed(weight: Tensor, ids: Tensor) -> Tensor:
        return torch.where((ids == poison)[:, None], NAN, donating.embed(weight, ids))

    with engine(kernels=replace(donating, embed=embed), max_num_batched_tokens=BLOCK_SIZE + 1) as own:
        free = own.num_free_blocks
        own.add_request("good", neighbour, good)
        own.add_request("bad", prompt, bad)
        results = drained(own)
        assert own.num_free_blocks == free
        again = own.generate(prompt, good, progress=False)[0]

    assert (results["bad"].finish_reason, results["bad"].token_ids) == ("error", (poison,))
    assert results["good"].token_ids == alone(neighbour, good).token_ids
    assert again.num_cached_tokens == 0
    assert again.token_ids == alone(prompt, good).token_ids
