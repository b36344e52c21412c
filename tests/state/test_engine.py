"""The engine: results independent of how they were asked for, errors that touch nobody else, memory that comes back."""

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.pure.errors import (
    DeviceMemoryError,
    DuplicateRequestError,
    InvalidParameterError,
    InvalidRequestError,
    PromptTooLongError,
    StaleStateError,
)
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.pure.records.logits_processor import LogitsProcessor
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.buffers import leaves
from purestep.state.engine import Engine
from tests.profiles import examples

CONFIG = tiny_config()
MODEL = llama(CONFIG)
PARAMS = random_params(CONFIG, seed=1, std=0.5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPTS = [(5, 9, 2, 7), (1, 1, 3), (40, 8, 22, 17, 5, 6, 30, 2, 9), (5, 9, 2, 8)]


def engine(**changes: Any) -> Engine:
    settings = {"kv_cache_bytes": 40 * 1024, "block_size": 4, "max_model_len": 48, "max_num_reqs": 8}
    return Engine((MODEL, PARAMS), **(settings | changes))


def tokens(prompts: Any, params: Any = GREEDY, **changes: Any) -> list[tuple[int, ...]]:
    with engine(**changes) as own:
        return [result.token_ids for result in own.generate(prompts, params, progress=False)]


@examples(0.06)
@given(
    st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=20), min_size=1, max_size=5),
    st.integers(3, 32),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_prompt_gets_the_same_tokens_alone_and_in_any_company(
    prompts: list[list[int]], budget: int, num_reqs: int, caching: bool
) -> None:
    together = tokens(
        prompts,
        max_num_batched_tokens=budget,
        max_num_reqs=num_reqs,
        enable_prefix_caching=caching,
        kv_cache_bytes=14 * 1024,  # too few blocks for all: some are preempted
    )

    assert together == [tokens([prompt])[0] for prompt in prompts]


def test_a_streamed_answer_ends_as_the_generated_one_and_only_grows() -> None:
    with engine() as own:
        seen = [result.token_ids for result in own.stream(PROMPTS[0], GREEDY)]

    assert seen[-1] == tokens(PROMPTS[0])[0]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(seen))


def test_leaving_a_stream_early_frees_its_blocks() -> None:
    with engine() as own:
        free = own.num_free_blocks
        for _ in own.stream(PROMPTS, GREEDY):
            break

        assert not own.has_unfinished()
        assert own.num_free_blocks == free


def test_online_use_gives_the_tokens_of_offline_use() -> None:
    with engine() as own:
        for i, prompt in enumerate(PROMPTS):
            own.add_request(f"r{i}", prompt, GREEDY)
        results = {}
        while own.has_unfinished():
            results |= {output.req_id: output for output in own.step()}

    assert [results[f"r{i}"].token_ids for i in range(len(PROMPTS))] == tokens(PROMPTS)


def test_generate_keeps_the_results_of_online_requests_for_step() -> None:
    with engine() as own:
        own.add_request("online", PROMPTS[1], replace(GREEDY, max_tokens=2))
        own.generate(PROMPTS[0], GREEDY, progress=False)

        delivered = [output for output in own.step() if output.finished]

    assert [output.token_ids for output in delivered] == [tokens(PROMPTS[1])[0][:2]]


def test_samples_of_a_prompt_differ_and_come_again() -> None:
    params = SamplingParams(n=4, seed=11, max_tokens=8)
    with engine() as own:
        first = own.generate(PROMPTS[2], params, progress=False)[0]
        second = own.generate(PROMPTS[2], params, progress=False)[0]

    samples = [output.token_ids for output in first.outputs]
    assert len(set(samples)) == 4
    assert samples == [output.token_ids for output in second.outputs]


def test_prompts_that_share_a_seed_draw_from_different_streams() -> None:
    assert len(set(tokens([PROMPTS[0]] * 8, SamplingParams(seed=3, max_tokens=8)))) == 8


def test_without_a_seed_two_calls_differ() -> None:
    params = SamplingParams(max_tokens=12)
    with engine() as own:
        first, second = (own.generate(PROMPTS[0], params, progress=False)[0].token_ids for _ in range(2))

    assert first != second


def test_samples_share_the_blocks_of_their_prompt() -> None:
    prompt = list(range(24))
    with engine(enable_prefix_caching=False) as own:
        own.add_request("r", prompt, SamplingParams(n=4, seed=1, max_tokens=8, ignore_eos=True))
        free = own.num_free_blocks
        while all(len(output.token_ids) < 2 for output in own.step()[0].outputs[1:]):
            pass
        used = free - own.num_free_blocks

    assert used < 4 * 7  # 24 tokens and a few more are 7 blocks of 4; six of them are shared
    assert used <= 6 + 4 * 3


def test_a_second_prompt_with_the_same_beginning_finds_it_cached() -> None:
    prompt = list(range(20))
    with engine() as own:
        first = own.generate(prompt, GREEDY, progress=False)[0]
        second = own.generate(prompt, GREEDY, progress=False)[0]

    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 19)
    assert first.token_ids == second.token_ids


BAD = {
    "empty prompt": ((), GREEDY, InvalidRequestError),
    "over-long prompt": (tuple([1] * 48), GREEDY, PromptTooLongError),
    "unknown token": ((1, 64), GREEDY, InvalidRequestError),
    "negative token": ((1, -1), GREEDY, InvalidRequestError),
    "text without a tokenizer": ("hello", GREEDY, InvalidRequestError),
    "no whole number": ((1, 2.5), GREEDY, InvalidRequestError),
    "a number of many digits": ((1, 10**5000), GREEDY, InvalidRequestError),
    "NaN temperature": ((1,), SamplingParams(temperature=float("nan")), InvalidParameterError),
    "negative top_p": ((1,), SamplingParams(top_p=-0.1), InvalidParameterError),
    "log-probabilities of an unknown id": (
        (1,),
        SamplingParams(logprob_token_ids=[64]),
        InvalidParameterError,
    ),
    "a processor that raises": (
        (1,),
        SamplingParams(logits_processors=[LogitsProcessor(lambda logits, history, params: 1 / 0)]),
        InvalidParameterError,
    ),
    "an empty prompt and a processor": (
        (),
        SamplingParams(logits_processors=[LogitsProcessor(lambda logits, history, params: 1 / 0)]),
        InvalidRequestError,
    ),
    "a processor that returns other logits": (
        (1,),
        SamplingParams(logits_processors=[LogitsProcessor(lambda logits, history, params: logits[:, 1:])]),
        InvalidParameterError,
    ),
    "unknown id in bias": ((1,), SamplingParams(logit_bias={64: 1.0}), InvalidParameterError),
    "unknown id in allowed set": ((1,), SamplingParams(allowed_token_ids=[99]), InvalidParameterError),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_by_name_while_its_neighbours_finish(name: str) -> None:
    prompt, params, error = BAD[name]
    with engine() as own:
        own.add_request("good", PROMPTS[0], GREEDY)
        own.step()
        with pytest.raises(error):
            own.add_request("bad", prompt, params)
        results = own.generate([PROMPTS[1], prompt], [GREEDY, params], progress=False, on_error="return")

        assert results[0].token_ids == tokens(PROMPTS[1])[0]
        assert isinstance(results[1].error, error)
        with pytest.raises(error):
            own.generate([PROMPTS[1], prompt], [GREEDY, params], progress=False)
        good = [output for output in own.step() if output.req_id == "good"][-1]
        assert good.token_ids == tokens(PROMPTS[0])[0]
        assert not own.has_unfinished()


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    with engine() as own:
        own.add_request("r", PROMPTS[0], GREEDY)
        with pytest.raises(DuplicateRequestError, match="'r' is in use"):
            own.add_request("r", PROMPTS[1], GREEDY)
        own.abort("r")
        own.add_request("r", PROMPTS[1], GREEDY)


def test_a_prompt_that_can_never_fit_the_cache_is_refused_with_the_numbers() -> None:
    with (
        engine(kv_cache_bytes=4 * 1024) as own,
        pytest.raises(PromptTooLongError, match="12"),
    ):
        own.add_request("r", [1] * 20, GREEDY)


@pytest.mark.parametrize("kv_cache_bytes", [0, 1, 1024])
def test_a_cache_without_a_block_is_refused(kv_cache_bytes: int) -> None:
    with pytest.raises(InvalidParameterError, match="kv_cache_bytes"):
        engine(kv_cache_bytes=kv_cache_bytes)


def test_abort_gives_what_there_is_and_frees_the_blocks() -> None:
    with engine() as own:
        free = own.num_free_blocks
        own.add_request("r", PROMPTS[0], GREEDY)
        own.step()
        own.step()

        (aborted,) = own.abort(["r", "unknown"])

        assert (aborted.finish_reason, aborted.token_ids) == ("abort", tokens(PROMPTS[0])[0][:2])
        assert own.num_free_blocks == free
        assert own.step() == []


def test_a_result_that_nobody_was_told_of_is_not_lost() -> None:
    """`generate` tells its own results alone: what has ended beside it may be aborted before `step` tells it."""
    with engine() as own:
        own.add_request("r", PROMPTS[0], GREEDY)
        own.generate(PROMPTS[1], replace(GREEDY, max_tokens=12), progress=False)
        own.add_request("r", PROMPTS[2], GREEDY)  # the id is free again

        ended, running = own.abort("r")

        assert (ended.finish_reason, ended.token_ids) == ("length", tokens(PROMPTS[0])[0])
        assert (running.finish_reason, running.token_ids) == ("abort", ())
        assert own.abort("r") == [] and own.step() == []


def test_a_call_takes_no_id_whose_result_nobody_was_told_of() -> None:
    with engine() as own:
        own.add_request("call1-0", PROMPTS[0], GREEDY)
        own.generate(PROMPTS[1], replace(GREEDY, max_tokens=12), progress=False)
        own.generate(PROMPTS[2], GREEDY, progress=False)
        (result,) = own.step()
    assert (result.req_id, result.token_ids) == ("call1-0", tokens(PROMPTS[0])[0])


def test_an_id_that_is_named_twice_is_aborted_once() -> None:
    with engine() as own:
        own.add_request("r", PROMPTS[0], GREEDY)
        assert [output.req_id for output in own.abort(["r", "r"])] == ["r"]


@pytest.mark.parametrize(
    "call",
    [
        lambda own: own.abort(None),
        lambda own: own.abort(5),
        lambda own: own.abort([["r"]]),
        lambda own: own.fork(["r"], "s"),
        lambda own: own.fork(None, "s"),
        lambda own: own.fork("r", ["s"]),
        lambda own: own.fork("r", "s", sample=[0]),
        lambda own: own.fork("r", "s", sample="0"),
        lambda own: own.fork("r", "s", stream=1.5),
        lambda own: own.rewind(None),
        lambda own: own.rewind("r"),
    ],
)
def test_a_move_with_what_is_of_the_wrong_kind_is_refused_and_changes_nothing(
    call: Callable[[Engine], Any],
) -> None:
    with engine() as own:
        own.add_request("r", PROMPTS[0], GREEDY)
        own.step()
        before = own._turns.now
        with pytest.raises(InvalidRequestError):
            call(own)
        assert own._turns.now is before


def interrupting(after: int) -> Any:
    """Kernels that raise KeyboardInterrupt in their n-th attention, as Ctrl-C does in the midst of a step."""
    calls = [0]

    def attend(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == after:
            raise KeyboardInterrupt
        return donating.attend(*args, **kwargs)

    return replace(donating, attend=attend)


@pytest.mark.parametrize("after", [1, 2, 5, 8])
def test_ctrl_c_leaves_the_engine_usable_with_all_blocks_free(after: int) -> None:
    with engine(kernels=interrupting(after)) as own:
        free = own.num_free_blocks
        own.add_request("online", PROMPTS[2], GREEDY)
        with pytest.raises(KeyboardInterrupt):
            own.generate(PROMPTS, GREEDY, progress=False)

        results = {}
        while own.has_unfinished():
            results |= {output.req_id: output for output in own.step()}
        assert results["online"].token_ids == tokens(PROMPTS[2])[0]
        assert own.num_free_blocks == free
        assert own.generate(PROMPTS[0], GREEDY, progress=False)[0].token_ids == tokens(PROMPTS[0])[0]


def test_a_running_request_goes_on_under_new_weights_as_if_its_tokens_were_its_prompt() -> None:
    other = random_params(CONFIG, seed=2, std=0.5)
    with engine() as own:
        own.add_request("r", PROMPTS[2], replace(GREEDY, max_tokens=8))
        own.step()
        (before,) = own.step()
        own.update_weights(Params(other.tree))
        while own.has_unfinished():
            (after,) = own.step()

    with Engine((MODEL, other), kv_cache_bytes=2**20, max_model_len=48) as fresh:
        rest = fresh.generate(PROMPTS[2] + before.token_ids, replace(GREEDY, max_tokens=6), progress=False)[0]
    assert after.token_ids == before.token_ids + rest.token_ids


def test_kept_keys_and_values_are_shared_when_the_caller_says_so() -> None:
    prompt = list(range(16))
    with engine() as own:
        own.generate(prompt, GREEDY, progress=False)
        own.update_weights(own.params, keep_kv=True)

        assert own.generate(prompt, GREEDY, progress=False)[0].num_cached_tokens == 15


def test_weights_of_another_shape_are_refused_and_nothing_changes() -> None:
    wrong = pytree.tree_map(lambda leaf: leaf.double(), PARAMS.tree)
    with engine() as own:
        with pytest.raises(InvalidParameterError, match=r"\['embed'\].*float64"):
            own.update_weights(wrong)
        assert own.params is PARAMS


def test_closing_or_dropping_the_engine_frees_every_buffer() -> None:
    for drop in (False, True):
        own = engine()
        own.generate(PROMPTS, GREEDY, progress=False)
        refs = [weakref.ref(leaf) for _, leaf in leaves(own._turns.now.leased.value)]
        if drop:
            del own
        else:
            own.close()
        gc.collect()

        assert [ref() for ref in refs] == [None] * len(refs)


def test_a_closed_engine_says_so() -> None:
    own = engine()
    own.close()
    own.close()

    with pytest.raises(StaleStateError, match="closed"):
        own.generate(PROMPTS[0], GREEDY, progress=False)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"priority": None}, {"priority": [1] * 10**5}, {"stream": 1.5}, {"sampling_params": {}}),
        *({"req_id": 7}, {"req_id": 10**5000}, {"req_id": [1] * 10**5}, {"prompt": 10**5000}),
    ],
    ids=[
        *(
            "no priority",
            "priorities",
            "stream",
            "parameters",
            "id",
            "digits",
            "prompt as id",
            "digits as prompt",
        )
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_before_it_meets_others(wrong: dict[str, Any]) -> None:
    request: dict[str, Any] = {"req_id": "r", "prompt": PROMPTS[0], "sampling_params": GREEDY} | wrong
    with engine() as own:
        own.add_request("good", PROMPTS[1], GREEDY)
        with pytest.raises(InvalidRequestError) as refused:
            own.add_request(**request)
        assert len(str(refused.value)) < 400

        assert own.generate(PROMPTS[0], GREEDY, progress=False)[0].token_ids == tokens(PROMPTS[0])[0]


def test_numbers_of_numpy_are_as_good_as_pythons(unchecked_records: None) -> None:
    plain = SamplingParams(seed=5, n=2, top_k=8, temperature=0.5, max_tokens=4)
    numpys = replace(plain, seed=np.int64(5), n=np.int64(2), top_k=np.int32(8), temperature=np.float32(0.5))
    with engine() as own:
        first, second = (own.generate(np.array(PROMPTS[0]), p, progress=False)[0] for p in (plain, numpys))
        own.generate(PROMPTS[0], GREEDY, progress=False)

    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]


def test_calls_within_calls_all_get_their_results() -> None:
    seen, inner = [], []
    with engine() as own:
        for result in own.stream(PROMPTS[0], GREEDY):
            seen.append(result)
            if len(inner) < 2:
                inner.append(own.generate(PROMPTS[1], GREEDY, progress=False)[0].token_ids)

        assert seen[-1].token_ids == tokens(PROMPTS[0])[0]
        assert inner == [tokens(PROMPTS[1])[0]] * 2
        assert own.step() == [] and not own.has_unfinished()


def test_a_call_leaves_requests_alone_whose_ids_look_like_its_own() -> None:
    with engine() as own:
        for name in ("call0-0", "call1-0"):
            own.add_request(name, PROMPTS[1], GREEDY)
        own.generate(PROMPTS[0], GREEDY, progress=False)

        results = {}
        while own.has_unfinished():
            results |= {output.req_id: output for output in own.step()}
        assert {name: r.finish_reason for name, r in results.items()} == {
            "call0-0": "length",
            "call1-0": "length",
        }


def test_an_id_like_that_of_a_finished_sample_belongs_to_whoever_uses_it_now() -> None:
    with engine(max_num_reqs=1) as own:
        own.add_request("a", PROMPTS[0], replace(GREEDY, n=2))
        while "a#0" in own._turns.now.queue.live:
            own.step()
        own.add_request("a#0", PROMPTS[1], GREEDY)
        own.abort("a")

        results = {}
        while own.has_unfinished():
            results |= {output.req_id: output for output in own.step()}
        assert results["a#0"].token_ids == tokens(PROMPTS[1])[0]


def test_a_request_whose_rules_leave_no_token_ends_as_an_error() -> None:
    params = SamplingParams(
        temperature=0.0, allowed_token_ids=[5], bad_words_token_ids=[[5, 5]], max_tokens=8
    )
    with engine() as own:
        bad, good = own.generate([PROMPTS[0], PROMPTS[1]], [params, GREEDY], progress=False)

    assert (bad.finish_reason, bad.token_ids) == ("error", (5,))
    assert good.token_ids == tokens(PROMPTS[1])[0]


def test_a_given_stream_is_used_with_or_without_a_seed() -> None:
    results = []
    with engine() as own:
        for name in ("r", "s"):
            own.add_request(name, PROMPTS[0], SamplingParams(max_tokens=8), stream=7)
            while own.has_unfinished():
                results += [output.token_ids for output in own.step() if output.finished]

    assert results[0] == results[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "foo"},
        {"device": "cuda:99"},
        {"dtype": torch.int32},
        {"block_size": 0},
        *({"seed": seed} for seed in (1.5, "a", None, [1], 2**63)),
    ],
)
def test_an_engine_that_can_not_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match=str(next(iter(wrong)))):
        engine(**wrong)


@pytest.mark.parametrize(
    ("positions", "error"),
    [(2**31 - 1, DeviceMemoryError), (2**31, InvalidParameterError), (2**70, InvalidParameterError)],
)
def test_a_model_of_endless_positions_is_refused_by_name_unless_fewer_are_asked_for(
    positions: int, error: type[Exception]
) -> None:
    """A token table of all positions would not fit, and positions are int32."""
    model = replace(MODEL, max_position_embeddings=positions)
    with pytest.raises(error, match="max_model_len"):
        Engine((model, PARAMS), kv_cache_bytes=2**20)
    with Engine((model, PARAMS), kv_cache_bytes=2**20, max_model_len=48) as own:
        assert own.generate(PROMPTS[0], GREEDY, progress=False)[0].token_ids == tokens(PROMPTS[0])[0]


def test_a_cache_that_does_not_fit_is_refused_before_its_blocks_are_counted_out() -> None:
    with pytest.raises(DeviceMemoryError, match="kv_cache_bytes"):
        Engine((MODEL, PARAMS), kv_cache_bytes=2**60)


def test_stop_strings_need_text() -> None:
    with engine() as own, pytest.raises(InvalidParameterError, match="stop strings"):
        own.add_request("r", PROMPTS[0], replace(GREEDY, stop=("x",)))


def test_a_closed_engine_takes_nothing() -> None:
    own = engine()
    own.close()

    with pytest.raises(StaleStateError, match="closed"):
        own.add_request("r", PROMPTS[0], GREEDY)
    with pytest.raises(StaleStateError, match="closed"):
        own.update_weights(PARAMS)


def test_a_seed_may_be_numpys() -> None:
    drawn = SamplingParams(max_tokens=3)
    assert tokens(PROMPTS, drawn, seed=np.int64(3)) == tokens(PROMPTS, drawn, seed=3)
