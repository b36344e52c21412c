"""The engine with a drafter: fewer steps, the same tokens, whatever is guessed and whatever happens in between."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.pure.drafters.draft_model import draft_model
from purestep.pure.drafters.ngram import ngram, ngram_on_host
from purestep.pure.errors import DrafterError, InvalidParameterError, ReentrantCallError
from purestep.pure.record import replace
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.drafter import Drafter, HostDrafter, Proposal
from purestep.pure.records.logits_processor import LogitsProcessor
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from purestep.state.loading.loaded import LoadedModel
from purestep.state.results import RequestOutput
from tests.grammars import small_tokenizer
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs
from tests.tiny import tiny_llama

VOCAB = 16
MODEL = tiny_llama(vocab_size=VOCAB)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = ([1, 2, 3], [4, 5, 6, 7], [2] * 9, [3, 1], [5, 5, 1])
PARAMS = (
    GREEDY,
    replace(GREEDY, max_tokens=None, stop_token_ids=(4, 9)),
    replace(GREEDY, max_tokens=13, min_tokens=5, stop_token_ids=tuple(range(1, 13)), logprobs=2),
    replace(GREEDY, repetition_penalty=1.4, bad_words_token_ids=((11, 11), (3,)), logprobs=0),
    replace(GREEDY, temperature=0.7, top_p=0.9, seed=3),
)
Generated = list[tuple[Any, ...]]


def engine(**changes: Any) -> Engine:
    sizes = {"max_model_len": 32, "block_size": 4, "kv_cache_bytes": 24 * 1024, "max_num_reqs": 4}
    return Engine(MODEL, dtype=torch.float64, **(sizes | changes))


def told(result: RequestOutput) -> tuple[Any, ...]:
    """All that is told of a request, but the time that it took."""
    own = result.logprobs
    rows = (
        None if own is None else (own.token_ids.tolist(), own.logprobs.round(9).tolist(), own.ranks.tolist())
    )
    return result.token_ids, result.finish_reason, result.stop_reason, rows


def generated(prompts: Sequence[Any] = PROMPTS, params: Any = PARAMS, **changes: Any) -> Generated:
    with engine(**changes) as own:
        results = own.generate(list(prompts), list(params), progress=False)
        assert own.num_free_blocks == own.limits.num_blocks[0] - 1
        return [told(result) for result in results]


def guesser(seed: int, num_drafts: int) -> HostDrafter:
    """A drafter on the host that guesses at random, few or many, mostly right where the model repeats itself."""

    def propose(kept: int, histories: Any, budgets: Any) -> Any:
        rng = Random(kept)
        drafts = [[rng.choice((11, 11, 3, 15)) for _ in range(rng.randint(0, most))] for most in budgets]
        return kept + 1, tuple(map(tuple, drafts))

    return HostDrafter(num_drafts, propose, lambda: seed)


def device_guesser(num_drafts: int) -> Drafter:
    """One on the device: it says 11, fewer times the longer the history."""

    def propose(params: Any, executed: Any, state: Any, output: Any, *, kernels: Any) -> Proposal:
        known = state.ledger.num_known_tokens.index_select(0, state.layout.row_of_index)
        place = torch.arange(num_drafts)
        return Proposal(torch.where(place < (known % (num_drafts + 1))[:, None], 11, -1).to(torch.int32))

    return Drafter(num_drafts, propose)


@examples(0.06)
@given(
    seed=st.integers(0, 1000),
    num_drafts=st.integers(1, 4),
    budget=st.sampled_from([3, 6, 32]),
    blocks=st.sampled_from([10, 14, 40]),
    caching=st.booleans(),
)
def test_any_guesses_of_the_host_give_the_plain_tokens(
    seed: int, num_drafts: int, budget: int, blocks: int, caching: bool
) -> None:
    """With small budgets and few blocks too, so that drafts are cut and requests preempted."""
    sizes = {
        "max_num_batched_tokens": budget,
        "kv_cache_bytes": blocks * 512,
        "enable_prefix_caching": caching,
    }
    assert generated(drafter=guesser(seed, num_drafts), **sizes) == generated(**sizes)


@examples(0.06)
@given(
    num_drafts=st.integers(1, 4),
    steps_ahead=st.integers(0, 3),
    budget=st.sampled_from([3, 6, 32]),
    blocks=st.sampled_from([10, 14, 40]),
)
def test_guesses_that_stay_on_the_device_give_them_too_however_far_ahead_steps_begin(
    num_drafts: int, steps_ahead: int, budget: int, blocks: int
) -> None:
    sizes = {"max_num_batched_tokens": budget, "kv_cache_bytes": blocks * 512}
    own = {"drafter": device_guesser(num_drafts), "steps_ahead": steps_ahead}
    assert generated(**own, **sizes) == generated(**sizes)


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_right_guesses_save_steps(steps_ahead: int) -> None:
    """A model as its own drafter: three tokens of four cost no step. Drawn ones are those of a plain run's law."""
    model, params = MODEL
    drafter = draft_model(model, model, num_drafts=3)
    with engine(drafter=drafter, draft_params=params, steps_ahead=steps_ahead, kv_cache_bytes=1 << 16) as own:
        (result,) = own.generate([1, 2, 3], GREEDY, progress=False)
        steps = own._turns.now.batch.clock.num_begun
    assert result.token_ids == generated([[1, 2, 3]], [GREEDY])[0][0]
    assert steps <= 6 + 2 * steps_ahead


def test_ngrams_of_the_host_and_of_the_device_give_the_plain_tokens() -> None:
    sizes = {"num_drafts": 3, "min_n": 1, "max_n": 3}
    plain = generated()
    assert generated(drafter=ngram_on_host(**sizes)) == plain
    assert generated(drafter=ngram(**sizes)) == plain
    assert generated(drafter=ngram(**sizes), steps_ahead=2) == plain


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_captured_steps_verify_and_propose(mode: CUDAGraphMode, steps_ahead: int) -> None:
    """Graphs hold a token and all drafts of every request; what does not fill them runs eagerly."""
    api, own = FakeGraphs(), {"drafter": device_guesser(3), "steps_ahead": steps_ahead}
    params = [GREEDY] * len(PROMPTS)
    found = generated(params=params, graph_api=api, cudagraph_mode=mode, capture_progress=False, **own)
    assert found == generated(params=params)
    assert api.num_replays > 3


@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_moments_and_forks_in_between(steps_ahead: int) -> None:
    """Rewound, the same tokens follow; a fork gets its parent's. Steps on their way are waited for first."""
    drafter = device_guesser(3)
    expected = generated([PROMPTS[0]], [GREEDY])[0][0]
    with engine(drafter=drafter, steps_ahead=steps_ahead, kv_cache_bytes=1 << 16) as own:
        own.add_request("a", PROMPTS[0], GREEDY)
        while not any(result.token_ids for result in own.step()):
            pass
        with own.remember() as moment:
            own.fork("a", "b")
            for _ in range(2):
                done = run(own)
                assert {r: out.token_ids for r, out in done.items()} in (
                    {"a": expected, "b": expected},
                    {"a": expected},
                )
                own.rewind(moment)


def run(own: Engine) -> dict[str, RequestOutput]:
    """What everybody has in the end."""
    done: dict[str, RequestOutput] = {}
    while own.has_unfinished():
        done |= {result.req_id: result for result in own.step() if result.finished}
    return done


def test_a_rewind_brings_back_what_a_drafter_on_the_host_kept() -> None:
    seen = list[int]()

    def propose(kept: int, histories: Any, budgets: Any) -> Any:
        seen.append(kept)
        return kept + 1, tuple(() for _ in histories)

    with engine(drafter=HostDrafter(2, propose, lambda: 0)) as own:
        own.add_request("a", [1, 2, 3], replace(GREEDY, max_tokens=4))
        own.step()
        with own.remember() as moment:
            run(own)
            first = list(seen)
            own.rewind(moment)
            run(own)
    assert first == [0, 1, 2, 3]
    assert seen == [0, 1, 2, 3, 1, 2, 3]


def test_a_host_drafter_that_fails_loses_nothing() -> None:
    """The error comes out, and the next step goes on: guesses are no part of what is known."""
    calls = list[int]()

    def propose(kept: None, histories: Any, budgets: Any) -> Any:
        calls.append(len(histories))
        if len(calls) == 2:
            raise RuntimeError("out of guesses")
        return None, tuple((11,)[:most] for most in budgets)

    with engine(drafter=HostDrafter(2, propose)) as own:
        own.add_request("a", [1, 2, 3], GREEDY)
        own.step()
        with pytest.raises(RuntimeError, match="out of guesses"):
            own.step()
        assert run(own)["a"].token_ids == generated([[1, 2, 3]], [GREEDY])[0][0]


@pytest.mark.parametrize("stop", [("996",), ("9", "nothing"), ("69", "9999"), ("0",)])
@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_a_stop_string_ends_a_request_at_its_token_among_several(
    stop: tuple[str, ...], steps_ahead: int
) -> None:
    """Tokens and reports behind it are dropped, text is cut; so with a stop id further on, which comes too late."""
    model, params = MODEL
    loaded = LoadedModel("tiny", model, params, tokenizer=small_tokenizer())
    wanted = replace(GREEDY, stop=stop, stop_token_ids=(7,), logprobs=1, min_tokens=2)
    results = []
    for drafter in (None, device_guesser(4)):
        sizes = {"max_model_len": 32, "block_size": 4, "kv_cache_bytes": 24 * 1024, "max_num_reqs": 4}
        with Engine(loaded, dtype=torch.float64, drafter=drafter, steps_ahead=steps_ahead, **sizes) as own:
            found = own.generate(list(PROMPTS), wanted, progress=False)
            results.append([(*told(result), result.text) for result in found])
    assert results[0] == results[1]
    assert any(result[2] in stop for result in results[0]) or stop == ("0",)


def test_what_does_not_go_together_is_refused() -> None:
    model, params = MODEL
    host = ngram_on_host(num_drafts=2, min_n=1, max_n=2)
    with pytest.raises(InvalidParameterError, match="still on their way"):
        engine(drafter=host, steps_ahead=1)
    with pytest.raises(InvalidParameterError, match="give the weights"):
        engine(drafter=host, draft_params=params)
    with pytest.raises(InvalidParameterError, match="give the weights"):
        engine(drafter=draft_model(model, model, num_drafts=2))


def test_log_probabilities_have_a_row_for_every_token() -> None:
    params = replace(GREEDY, logprobs=1)
    (result,) = generated([[1, 2, 3]], [params], drafter=device_guesser(3))
    assert np.shape(result[3][0]) == (20, 2)
    assert [ids[0] for ids in result[3][0]] == list(result[0])


def fails_behind(token: int) -> LogitsProcessor:
    """A processor that fails where a history ends with this token."""

    def apply(logits: Tensor, history: Any, params: Any) -> Tensor:
        last = history.token_ids.gather(1, (history.lengths - 1)[:, None].long())
        if (last == token).any():
            raise RuntimeError("no")
        return logits

    return LogitsProcessor(apply)


def repeats(token: int) -> HostDrafter:
    """A drafter on the host that always says the same."""
    return HostDrafter(
        2, lambda kept, histories, budgets: (kept, ((token,) * 2,) * len(histories)), lambda: 0
    )


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_processor_that_fails_behind_drafts_ends_whom_it_fails_for(steps_ahead: int) -> None:
    """And nobody where the draft that it fails behind falls."""
    params = [replace(GREEDY, logits_processors=[fails_behind(7)], max_tokens=6), GREEDY]
    prompts = PROMPTS[:2]
    for drafter in (device_guesser(3), None if steps_ahead else repeats(7)):
        if drafter is not None:
            own = {"drafter": drafter, "steps_ahead": steps_ahead}
            assert generated(prompts, params, **own) == generated(prompts, params)


def test_a_drafter_of_another_model_is_refused() -> None:
    model, _ = MODEL
    other, params = tiny_llama(vocab_size=VOCAB, groups=(0, 0, 0))
    with pytest.raises(DrafterError, match="make the drafter for this model"):
        engine(drafter=draft_model(other, model, num_drafts=2), draft_params=params)


def test_a_host_drafter_may_not_call_the_engine() -> None:
    def propose(kept: Any, histories: Any, budgets: Any) -> Any:
        own.add_request("b", [1], GREEDY)
        return kept, ((),) * len(histories)

    with engine(drafter=HostDrafter(1, propose, lambda: 0)) as own:
        own.add_request("a", [1, 2], GREEDY)
        with pytest.raises(ReentrantCallError):
            for _ in range(4):
                own.step()
        own.abort("a")
        assert not own.has_unfinished()


@pytest.mark.parametrize("wrong", [VOCAB, -2, 1.5, "a", 2**40])
def test_drafts_that_are_no_tokens_are_refused_and_stop_nobody(wrong: Any) -> None:
    expected = generated([[1, 2, 3]], [GREEDY])[0][0]
    with engine(drafter=repeats(wrong)) as own:
        own.add_request("a", [1, 2, 3], GREEDY)
        errors, tokens = 0, ()
        for _ in range(60):
            try:
                for result in own.step():
                    tokens = result.token_ids
            except DrafterError:
                errors += 1
            if not own.has_unfinished():
                break
        assert errors and tokens == expected


@pytest.mark.parametrize("wrong", [{"drafter": True}, {"drafter": ngram}, {"draft_params": {"embed": 1}}])
def test_what_is_no_drafter_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidParameterError, match="give a Drafter"):
        engine(**wrong)


@pytest.mark.parametrize("drafts", [torch.zeros(1, 5), torch.zeros(3, 2), None])
def test_proposals_of_another_shape_are_refused(drafts: Any) -> None:
    def propose(*given: Any, kernels: Any) -> Any:
        return None if drafts is None else Proposal(drafts.int())

    with engine(drafter=Drafter(2, propose)) as own, pytest.raises(DrafterError, match="give a Proposal"):
        own.generate([[1, 2, 3]], GREEDY, progress=False)
