"""Moments of an engine: going back to one gives the results that followed from it, whatever ran in between."""

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from purestep.kernels.donating import donating
from purestep.pure.errors import InvalidRequestError, OutOfBlocksError, OutOfRowsError, StaleStateError
from purestep.pure.models.initialize import random_params
from purestep.pure.record import replace
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from purestep.state.loading.tokenizer import Tokenizer, wrap
from purestep.state.results import RequestOutput
from tests.bugs.tiny_engine import CONFIG, GREEDY, drained, engine
from tests.laws import digest
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs, capture_samplers, unrolled

PROMPTS = [(5, 9, 2, 7), (1, 1, 3), (40, 8, 22, 17, 5, 6, 30, 2, 9), (5, 9, 2, 8), tuple(range(20))]
KINDS = [
    replace(GREEDY, max_tokens=9),
    SamplingParams(seed=3, max_tokens=12, logprobs=2),
    SamplingParams(max_tokens=8, temperature=0.7, repetition_penalty=1.3),
    SamplingParams(seed=5, n=2, max_tokens=7),
    replace(GREEDY, max_tokens=14, logit_bias={3: 2.0}, stop_token_ids=(4,)),
]


def words() -> Tokenizer:
    """A tokenizer whose 64 tokens are words."""
    return wrap(Backend(models.WordLevel(vocab={f"w{i}": i for i in range(64)}, unk_token="w0")))


def seen(outputs: dict[str, RequestOutput]) -> dict[str, Any]:
    """Of all results, what does not depend on when they were had: tokens, ends, log-probabilities within rounding."""
    return {
        req_id: [(o.token_ids, o.text, o.finish_reason, o.stop_reason, _rounded(o)) for o in output.outputs]
        for req_id, output in outputs.items()
    }


def _rounded(output: Any) -> Any:
    if output.logprobs is None:
        return None
    return output.logprobs.token_ids.tolist(), np.round(output.logprobs.logprobs, 3).tolist()


def add(own: Engine, rng: Random, names: str) -> None:
    for name in names:
        own.add_request(name, rng.choice(PROMPTS), rng.choice(KINDS))


def something_else(own: Engine, rng: Random) -> None:
    """Whatever may be done to an engine."""
    for _ in range(rng.randrange(1, 6)):
        doings: list[Callable[[], object]] = [
            own.step,
            own.step,
            lambda: own.generate(rng.choice(PROMPTS), rng.choice(KINDS), progress=False),
            lambda: own.abort(rng.sample("abcxyz", 2)),
            lambda: own.remember(),
            lambda: next(iter(own.stream(rng.sample(PROMPTS, 2), KINDS[0]))),
        ]
        rng.choice(doings)()
        free = [name for name in "xyz" if name not in own._turns.now.book.numbers]
        parents = [name for name in "abc" if name in own._turns.now.book.numbers]
        if free and parents and rng.random() < 0.4:
            with suppress(
                OutOfRowsError, InvalidRequestError
            ):  # there is no room, or its first sample has ended
                own.fork(rng.choice(parents), rng.choice(free))
        elif free:
            own.add_request(rng.choice(free), rng.choice(PROMPTS), rng.choice(KINDS))


@examples(0.1)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from([0, 1, 2]),
    st.integers(0, 7),
    st.booleans(),
    st.sampled_from([40, 20]),
    st.sampled_from([1, 1, 3]),
)
def test_a_rewound_engine_gives_the_results_that_it_gave(
    rng: Random, steps_ahead: int, num_steps: int, caching: bool, kibibytes: int, unroll: int
) -> None:
    """Tokens, ends, log-probabilities; twice, whatever ran in between; several steps in one replay, too.

    Where blocks are few, requests are preempted, and moments may leave none at all: what then goes on is the rest.
    """
    sizes = {"max_num_reqs": 5, "max_num_batched_tokens": 16, "kv_cache_bytes": kibibytes * 1024}
    settings: dict[str, Any] = {"steps_ahead": steps_ahead, "enable_prefix_caching": caching, **sizes}
    with suppress(OutOfBlocksError), engine(**settings, **unrolled(unroll, 5)) as own:
        if unroll > 1:
            capture_samplers(own, unroll)
        add(own, rng, "abc")
        told = {output.req_id for _ in range(num_steps) for output in own.step() if output.finished}
        with own.remember() as moment:
            expected = {}
            for attempt in range(3):
                results = {name: r for name, r in drained(own).items() if name not in told}
                expected = expected or seen(results)
                assert seen(results) == expected, f"attempt {attempt}"
                if attempt < 2:
                    something_else(own, rng)
                    own.rewind(moment)
        drained(own)
        own.abort("abcxyz")
        assert own.num_free_blocks == own.limits.num_blocks[0] - 1


def test_text_and_log_probabilities_are_those_that_were_there() -> None:
    """To the last bit, where the same steps follow; a stop string may begin before the moment and end behind it."""
    params = SamplingParams(seed=1, max_tokens=12, logprobs=3)
    with engine(tokenizer=words()) as own:
        text = own.generate(PROMPTS[2], params, progress=False)[0].text.split()
        for num_steps in range(1, 7):
            stop = " ".join(text[4:6])[1:]
            own.add_request("r", PROMPTS[2], replace(params, stop=(stop,)), stream=0)
            for _ in range(num_steps):
                own.step()
            moment = own.remember()
            first = drained(own).get("r")
            own.rewind(moment)
            again = drained(own).get("r")
            if first is None or again is None:
                assert first is again is None and num_steps == 6
                continue
            assert (first.text, first.stop_reason) == (" ".join(text[:4]) + " " + text[4][0], stop)
            assert (first.token_ids, first.text, first.finish_reason) == (again.token_ids, again.text, "stop")
            assert first.logprobs is not None and again.logprobs is not None
            assert digest(first.logprobs) == digest(again.logprobs)


def test_a_graph_is_rewound_as_an_eager_step_is() -> None:
    for steps_ahead in (0, 1):
        api = FakeGraphs()
        sizes = {"capture_sizes": (1, 2, 4), "max_num_reqs": 4, "capture_progress": False}
        with engine(graph_api=api, steps_ahead=steps_ahead, **sizes) as own:
            for name, prompt in zip("abc", PROMPTS, strict=False):
                own.add_request(name, prompt, GREEDY)
            for _ in range(3):
                own.step()
            moment, replays = own.remember(), api.num_replays
            expected = seen(drained(own))
            own.generate(PROMPTS[3], GREEDY, progress=False)
            own.rewind(moment)

            assert seen(drained(own)) == expected
            assert api.num_replays > replays


def test_streams_and_calls_that_began_later_are_void_and_say_so() -> None:
    with engine() as own:
        before = own.remember()
        with pytest.raises(StaleStateError, match="rewound to a moment at which it had not begun"):
            for _ in own.stream(PROMPTS[:2], GREEDY):
                own.rewind(before)

        assert not own.has_unfinished()
        assert own.generate(PROMPTS[0], GREEDY, progress=False)[0].finish_reason == "length"


def test_a_stream_may_be_rewound_from_inside_to_where_it_was() -> None:
    with engine() as own:
        lengths, moment = [], None
        for output in own.stream(PROMPTS[0], GREEDY):
            lengths.append(len(output.token_ids))
            if len(lengths) == 3:
                moment = own.remember()
            if len(lengths) == 5 and moment is not None:
                own.rewind(moment)

    assert lengths == [1, 2, 3, 4, 5, 4, 5, 6]


# Blocks


def test_a_moment_holds_its_blocks_until_nobody_has_it() -> None:
    def left(own: Engine) -> int:
        own.abort("r")
        return own.limits.num_blocks[0] - 1 - own.num_free_blocks

    with engine(enable_prefix_caching=False) as own:
        for drop in ("close", "with", "forget"):
            own.add_request("r", range(18), GREEDY)
            own.step()
            moment = own.remember()
            assert repr(moment) == "EngineMoment(1 running, 0 waiting, holds [5] blocks)"
            assert left(own) == 5
            if drop == "close":
                moment.close()
                moment.close()
                assert repr(moment) == "EngineMoment(closed)"
            if drop == "with":
                with moment:
                    pass
            del moment
            assert left(own) == 0


def test_what_a_moment_holds_is_shared_and_only_an_open_block_is_copied() -> None:
    with engine(enable_prefix_caching=False, block_horizon=1) as own:
        own.add_request("r", range(18), GREEDY)
        own.step()
        free = own.num_free_blocks
        moments = [own.remember() for _ in range(3)]
        own.step()
        assert own.num_free_blocks == free - 1  # 18 tokens: four full blocks, and one to be copied
        batch = own._turns.now.leased.absorbed
        assert [len(pairs) for pairs in batch.block_copies] == [1]
        own.step()
        assert not own._turns.now.leased.absorbed.block_copies
        for moment in moments:
            moment.close()
        assert own.num_free_blocks == free


def test_a_moment_that_is_dropped_at_once_costs_no_copy() -> None:
    with engine(enable_prefix_caching=False, block_horizon=1) as own:
        own.add_request("r", range(18), GREEDY)
        own.step()
        own.remember()
        own.step()
        assert not own._turns.now.leased.absorbed.block_copies


def test_an_engine_that_moments_leave_no_block_says_so_and_goes_on_without_them() -> None:
    with engine(kv_cache_bytes=8 * 1024, enable_prefix_caching=False, max_model_len=24) as own:  # 7 blocks
        own.add_request("r", range(16), replace(GREEDY, max_tokens=4))
        own.step()
        moment = own.remember()
        own.abort("r")
        own.add_request("s", range(2, 20), replace(GREEDY, max_tokens=2))
        with pytest.raises(OutOfBlocksError, match=r"moments hold \[4\] of \[7\] blocks"):
            own.step()
        moment.close()
        assert drained(own)["s"].finish_reason == "length"


def test_moments_do_not_keep_an_engine_alive() -> None:
    own = engine()
    own.add_request("r", PROMPTS[0], GREEDY)
    own.step()
    moment = own.remember()
    buffers = moment.device.buffers_of(own._turns.now.leased)
    del own, buffers
    other = engine()
    with pytest.raises(StaleStateError, match="buffers that are gone"):
        moment.device.buffers_of(other._turns.now.leased)
    other.close()


# What comes between


def test_after_new_weights_a_moment_goes_on_under_them_from_its_tokens() -> None:
    other = random_params(CONFIG, seed=2, std=0.5)
    for keep_kv in (False, True):
        with engine() as own:
            own.add_request("r", PROMPTS[2], replace(GREEDY, max_tokens=8))
            for _ in range(3):
                own.step()
            moment = own.remember()
            own.update_weights(other, keep_kv=keep_kv)
            after = drained(own)["r"]
            own.rewind(moment)
            assert drained(own)["r"].token_ids == after.token_ids
            own.generate(range(20), GREEDY, progress=False)
            own.rewind(moment)
            assert drained(own)["r"].token_ids == after.token_ids
            own.update_weights(own.params, keep_kv=True)
            own.rewind(moment)
            assert drained(own)["r"].token_ids == after.token_ids


def test_a_moment_outlives_a_step_that_fails() -> None:
    calls = [0]

    def attend(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 12:
            raise RuntimeError("out of luck")
        return donating.attend(*args, **kwargs)

    for steps_ahead in (0, 1):
        calls[0] = 0
        with engine(kernels=replace(donating, attend=attend), steps_ahead=steps_ahead) as own:
            own.add_request("r", PROMPTS[4], SamplingParams(seed=2, max_tokens=12))
            for _ in range(3):
                own.step()
            moment = own.remember()
            with pytest.raises(RuntimeError, match="out of luck"):
                drained(own)
            own.rewind(moment)
            first = drained(own)["r"].token_ids
            own.rewind(moment)
            assert drained(own)["r"].token_ids == first
        with engine() as own:
            assert (
                own.generate(PROMPTS[4], SamplingParams(seed=2, max_tokens=12, stream=0), progress=False)[
                    0
                ].token_ids
                == first
            )


def test_a_moment_is_refused_where_it_does_not_belong() -> None:
    with engine() as own, engine() as other:
        moment, closed = own.remember(), own.remember()
        closed.close()
        before = digest(own._turns.swept().queue)
        with pytest.raises(StaleStateError, match="of another engine"):
            other.rewind(moment)
        with pytest.raises(StaleStateError, match="is closed"):
            own.rewind(closed)
        assert digest(own._turns.now.queue) == before
        own.close()
        for refused in (own.remember, lambda: own.rewind(moment), lambda: own.fork("a", "b")):
            with pytest.raises(StaleStateError, match="closed"):
                refused()
        moment.close()
