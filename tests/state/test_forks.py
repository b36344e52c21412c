"""Forks in the engine: what goes on under two ids has one history up to there, and the fork changes nothing of it."""

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import DuplicateRequestError, InvalidRequestError, OutOfBlocksError, OutOfRowsError
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from tests.bugs.tiny_engine import GREEDY, alone, drained, engine
from tests.laws import digest
from tests.profiles import examples
from tests.state.fake_graphs import capture_samplers, unrolled
from tests.state.test_engine_moment import PROMPTS, words

SAMPLED = SamplingParams(seed=3, max_tokens=12, logprobs=1)


@examples(0.2)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from([0, 1, 2]),
    st.integers(0, 8),
    st.sampled_from([GREEDY, SAMPLED, replace(SAMPLED, presence_penalty=0.5, logit_bias={3: 2.0})]),
    st.booleans(),
    st.sampled_from([1, 1, 2]),
)
def test_a_fork_has_its_parents_history_and_changes_nothing_of_it(
    rng: Random, steps_ahead: int, num_steps: int, params: SamplingParams, caching: bool, unroll: int
) -> None:
    """Forked anywhere, forks forked too: all that keep the stream get what the first one gets alone."""
    prompt = rng.choice(PROMPTS)
    sizes = {"max_num_reqs": 6, "max_num_batched_tokens": rng.choice([4, 16]), **unrolled(unroll, 6)}
    with engine(steps_ahead=steps_ahead, enable_prefix_caching=caching, **sizes) as own:
        if unroll > 1:
            capture_samplers(own, unroll)
        own.add_request("a", prompt, params, stream=0)
        own.add_request("other", rng.choice(PROMPTS), params)
        results, shared, same = {}, dict[str, tuple[int, ...]](), {"a"}
        for _ in range(num_steps):
            results |= {output.req_id: output for output in own.step()}
            live = [name for name in "abcd" if name in own._turns.now.book.numbers]
            if live and rng.random() < 0.5 and len(shared) < 3:
                parent, name = rng.choice(live), "bcd"[len(shared)]
                shared[name] = results[parent].token_ids if parent in results else ()
                if rng.random() < 0.5:
                    own.fork(parent, name, keep_stream=True)
                    same |= {name} if parent in same else set()
                else:
                    own.fork(parent, name, stream=7)
        results |= drained(own)
    expected = alone(prompt, params, steps_ahead=0).token_ids
    assert {results[name].token_ids for name in same} == {expected}
    for name, known in shared.items():
        assert results[name].token_ids[: len(known)] == known
        assert results[name].prompt_token_ids == prompt


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_a_fork_that_keeps_the_stream_repeats_its_parent_and_another_does_not(steps_ahead: int) -> None:
    params = SamplingParams(seed=3, max_tokens=24, logprobs=2, ignore_eos=True)
    with engine(steps_ahead=steps_ahead, tokenizer=words()) as own:
        own.add_request("a", PROMPTS[2], params)
        for _ in range(6):
            (so_far,) = own.step() or [None]
        assert so_far is not None
        own.fork("a", "same", keep_stream=True)
        own.fork("a", "seven", stream=7)
        own.fork("a", "new")
        own.fork("a", "seven again", stream=7)
        results = drained(own)

    a, same, seven, new, again = (results[n] for n in ("a", "same", "seven", "new", "seven again"))
    assert (same.token_ids, same.text) == (a.token_ids, a.text)
    assert digest(same.logprobs) == digest(a.logprobs)
    assert len({a.token_ids, seven.token_ids, new.token_ids}) == 3
    assert seven.token_ids == again.token_ids
    shared = len(so_far.token_ids)
    for fork in (seven, new):
        assert fork.token_ids[:shared] == so_far.token_ids
        assert fork.text.startswith(so_far.text)
        assert fork.logprobs is not None and len(fork.logprobs.ranks) == len(fork.token_ids)


def test_a_sample_of_several_can_be_forked() -> None:
    with engine() as own:
        own.add_request("a", PROMPTS[0], SamplingParams(seed=1, n=3, max_tokens=9))
        for _ in range(4):
            own.step()
        own.fork("a", "b", sample=2, keep_stream=True)
        results = drained(own)
    assert [output.index for output in results["b"].outputs] == [0]
    assert results["b"].token_ids == results["a"].outputs[2].token_ids


def test_what_waits_can_be_forked_too() -> None:
    """Before it ever ran, and after it was preempted."""
    params, sizes = replace(GREEDY, max_tokens=9), {"kv_cache_bytes": 8 * 1024, "max_model_len": 24}
    with engine(max_num_reqs=3, block_horizon=1, enable_prefix_caching=False, **sizes) as own:  # 7 blocks
        own.add_request("a", PROMPTS[2], params)
        own.fork("a", "b")
        own.add_request("c", PROMPTS[2], params)
        results, waits = {}, list[str]()
        while not waits:
            results |= {output.req_id: output for output in own.step()}
            states = [state for _, state in own._turns.now.queue.waiting.states.items()]
            waits = [state.request.req_id for state in states if state.num_preemptions]
            assert own.has_unfinished(), "nobody was preempted"
        own.fork(waits[0], "d")
        results |= drained(own)
    assert sorted(results) == ["a", "b", "c", "d"]
    assert {result.token_ids for result in results.values()} == {alone(PROMPTS[2], params).token_ids}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (("x", "y"), InvalidRequestError, "fork of 'x': no request of this id runs or waits"),
        (("done", "y"), InvalidRequestError, "fork of 'done': no request of this id runs or waits"),
        (("a", "a"), DuplicateRequestError, "fork of 'a' as 'a': this id is in use"),
        (("a", "n#0"), DuplicateRequestError, "this id is in use"),
        (("a", 5), InvalidRequestError, "req_id=5: an id is text"),
    ],
)
def test_a_fork_is_refused_by_name_and_changes_nothing(
    call: tuple[str, str], error: type[Exception], message: str
) -> None:
    with engine() as own:
        own.add_request("done", PROMPTS[0], replace(GREEDY, max_tokens=1))
        own.add_request("a", PROMPTS[0], GREEDY)
        own.add_request("n", PROMPTS[1], SamplingParams(n=2, seed=1, max_tokens=4))
        own.step()
        own.step()
        before = own._turns.now
        with pytest.raises(error, match=message):
            own.fork(*call)
        with pytest.raises(InvalidRequestError, match="fork of sample 2 of 'n', which has 2"):
            own.fork("n", "y", sample=2)
        with pytest.raises(InvalidRequestError, match=r"stream=1\.5"):
            own.fork("a", "y", stream=1.5)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="stream=1 and keep_stream: give one of them"):
            own.fork("a", "y", stream=1, keep_stream=True)
        assert own._turns.now is before


def test_a_fork_without_room_is_refused_by_name_and_changes_nothing() -> None:
    with engine(max_num_reqs=1) as own:
        own.add_request("a", PROMPTS[0], GREEDY)
        own.step()
        before = own._turns.now
        with pytest.raises(OutOfRowsError, match="rows for 1 of max_num_reqs=1"):
            own.fork("a", "b")
        assert own._turns.now is before
    with engine(kv_cache_bytes=8 * 1024, max_model_len=29, enable_prefix_caching=False) as own:  # 7 blocks
        own.add_request("a", range(26), GREEDY)
        own.step()
        before = own._turns.now
        with pytest.raises(OutOfBlocksError, match="all 7 blocks of KV group 0 are held"):
            own.fork("a", "b")
        assert own._turns.now is before


def test_a_beam_of_moments_and_forks_finds_the_best_continuation_of_three_tokens() -> None:
    """A small tree search: two branches a node, every leaf's score recomputed by forcing its tokens."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, logprobs=0, ignore_eos=True)
    with engine(max_num_reqs=8, enable_prefix_caching=False) as own:
        own.add_request("n", PROMPTS[0], params)
        own.step()
        leaves, scores = ["n"], {}
        for depth in range(3):
            for leaf in list(leaves):
                own.fork(leaf, f"{leaf}{depth}", stream=depth)
                leaves.append(f"{leaf}{depth}")
            scores = {output.req_id: output for output in own.step()}
        assert sorted(scores) == sorted(leaves) and len(leaves) == 8
        tokens = {name: output.token_ids for name, output in scores.items()}
    assert all(len(ids) == 4 for ids in tokens.values())
    assert len({ids[0] for ids in tokens.values()}) == 1  # the history before the first fork
    for name, ids in tokens.items():
        parents = [other for other in tokens if other != name and name.startswith(other)]
        for parent in parents:
            shared = 1 + int(name[len(parent)])
            assert ids[:shared] == tokens[parent][:shared]


@pytest.mark.parametrize("steps_ahead", [1, 2])
def test_more_samples_than_rows_are_served_whatever_is_begun_ahead(steps_ahead: int) -> None:
    """Rows of samples that have ended are held by steps on their way; those that wait get theirs in time."""
    config = tiny_config(vocab_size=64, hidden_size=32, num_layers=1, max_position_embeddings=256)
    model, params = llama(config), random_params(config, seed=1, std=0.3)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(64, (n,), generator=generator).tolist() for n in (1, 7, 33, 64, 90, 5, 16, 3, 3)]
    wanted = SamplingParams(seed=5, top_k=20, top_p=0.9, n=2, max_tokens=20)
    sizes: dict[str, Any] = dict(
        kv_cache_bytes=2**22, max_model_len=128, max_num_reqs=6, max_num_batched_tokens=32
    )
    found = []
    for ahead in (0, steps_ahead):
        with Engine((model, params), steps_ahead=ahead, **sizes) as engine:
            results = engine.generate(prompts, wanted, progress=False)
        found.append([[output.token_ids for output in result.outputs] for result in results])
    assert found[0] == found[1]
