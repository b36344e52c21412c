"""An engine that replays several steps at once gives what it gives one by one.

Whatever is sampled is the same. Log-probabilities are the same but for rounding: single steps may run without those
rows that have ended, and the bits of a product on the CPU depend on its rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch.utils._pytree as pytree
from hypothesis import assume, given
from hypothesis import strategies as st

from purestep.pure.drafters.ngram import ngram
from purestep.pure.errors import InvalidParameterError
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from purestep.state.results import CompletionOutput, PromptLogprobs, RequestOutput
from tests.bugs.tiny_engine import CONFIG, GREEDY, alone, drained, engine
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs, capture_samplers, unrolled
from tests.state.test_engine_moment import words

pytestmark = pytest.mark.usefixtures("unchecked_records")

PROMPTS = [(5, 9, 2, 7), (1, 1, 3), (40, 8, 22, 17, 5, 6, 30, 2, 9), (5, 9, 2, 8)]
LONG = replace(GREEDY, max_tokens=14)
DRAWN = SamplingParams(seed=3, max_tokens=17)
PARAMETERS = st.sampled_from(
    [
        LONG,
        replace(DRAWN, n=2),
        replace(DRAWN, stop_token_ids=(3, 17, 40), min_tokens=2),
        replace(DRAWN, stop_token_ids=tuple(range(20, 34)), temperature=0.8),  # more than the device knows
        replace(LONG, stop=("w1", "w30", "w4 w4")),
        replace(DRAWN, logprobs=2, kept_mass=True, top_k=9, max_tokens=12),
        replace(DRAWN, repetition_penalty=1.4, logprobs=0, max_tokens=6),
        replace(DRAWN, logit_bias={3: 2.0}, max_tokens=5),  # runs eagerly
        replace(DRAWN, prompt_logprobs=1, max_tokens=5),
    ]
)


class Near(float):
    """A number that equals those within 1e-5."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        same = math.isnan(self) and math.isnan(other)  # type: ignore[arg-type]
        return same or math.isclose(self, other, rel_tol=0, abs_tol=1e-5)  # type: ignore[arg-type]


def told(results: Sequence[RequestOutput]) -> list[Any]:
    """All that is told of them but how long they took."""
    return [
        (r.num_cached_tokens, numbers(r.prompt_logprobs), [sample(o) for o in r.outputs]) for r in results
    ]


def sample(output: CompletionOutput) -> Any:
    ends = output.token_ids, output.finish_reason, output.stop_reason, repr(output.error), output.text
    return *ends, numbers(output.logprobs), numbers(output.kept_mass)


def numbers(record: Any) -> list[Any]:
    """The shapes of its arrays, and what they hold."""
    found = list[Any]()
    for leaf in pytree.tree_leaves(record.table if isinstance(record, PromptLogprobs) else record):
        if leaf is not None:
            items = np.asarray(leaf).ravel().tolist()
            found += [np.shape(leaf), [Near(x) if isinstance(x, float) else x for x in items]]
    return found


def both(unroll: int, doing: Callable[[Engine], Any], **changes: Any) -> tuple[Any, Any]:
    """What is done with an engine that unrolls, and with one that does not, whose graphs are of the same batches."""
    done = []
    for num_steps in (unroll, 1):
        sizes = unrolled(unroll) | {"unroll": num_steps, "tokenizer": words()}
        with engine(**(sizes | changes)) as own:
            for several in {1, num_steps}:
                capture_samplers(own, several)
            done.append(doing(own))
            assert own.num_free_blocks == own.limits.num_blocks[0] - 1
    return done[0], done[1]


@examples(0.012)  # an example makes two engines with all their graphs
@given(
    st.lists(st.tuples(st.sampled_from(PROMPTS), PARAMETERS), min_size=1, max_size=4),
    st.integers(2, 8),
    st.integers(0, 2),
)
def test_results_are_those_of_single_steps(
    asked: list[tuple[tuple[int, ...], SamplingParams]],
    unroll: int,
    steps_ahead: int,
) -> None:
    """Tokens, text, ends, log-probabilities; and in the prefix cache is, behind them, what would be there."""

    def doing(own: Engine) -> Any:
        prompts, params = zip(*asked, strict=True)
        first = own.generate(list(prompts), list(params), progress=False)
        longer = [(*result.prompt_token_ids, *o.token_ids, 1, 2) for result in first for o in result.outputs]
        over_run = [(*prompt[:-2], *alone(prompt[:-2], LONG).token_ids) for prompt in longer[:1]]
        return told(first) + told(own.generate(longer + over_run, LONG, progress=False))

    found, expected = both(unroll, doing, steps_ahead=steps_ahead)
    assert found == expected


def test_steps_are_replayed_at_once_and_one_by_one_where_fewer_are_left() -> None:
    for unroll, num_replays in ((1, 13), (4, 1 + 3), (8, 1 + 1 + 4), (2, 1 + 6)):
        settings = unrolled(8) | {"unroll": unroll}
        with engine(**settings) as own:
            result = own.generate(PROMPTS[2], LONG, progress=False)[0]
            assert own.turns.num_tokens == 14
        assert settings["graph_api"].num_replays == num_replays
        assert result.token_ids == alone(PROMPTS[2], LONG).token_ids


def test_what_is_captured_is_counted_and_little() -> None:
    """Random and greedy decoding of few requests, whatever else is captured."""
    with engine(max_num_reqs=64, kv_cache_bytes=2**20, graph_api=FakeGraphs(), unroll=2) as own:
        report, captured = own.capture_report, own.turns.bound.captured
        assert captured is not None and report is not None
        several = [key for key in captured.keys if key.num_steps > 1]
    assert report.num_graphs == 44 + len(several)
    assert {key.num_steps for key in several} == {2}
    assert sorted(key.descriptor.num_tokens for key in several) == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]


def test_unroll_is_a_number_of_steps_and_not_for_drafts() -> None:
    for wrong in (0, 1.5, True):
        with pytest.raises(InvalidParameterError, match="unroll"):
            engine(unroll=wrong)
    with pytest.raises(InvalidParameterError, match="unroll=4 with a drafter"):
        engine(unroll=4, graph_api=FakeGraphs(), drafter=ngram(num_drafts=2, min_n=1, max_n=3))
    with pytest.raises(InvalidParameterError, match="unroll=4 without graphs"):
        engine(unroll=4)
    engine(unroll=1, drafter=ngram(num_drafts=2, min_n=1, max_n=3)).close()


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_who_comes_in_between_waits_for_what_is_on_its_way_and_nothing_else(steps_ahead: int) -> None:
    settings = unrolled(4)
    with engine(**settings, steps_ahead=steps_ahead) as own:
        own.add_request("a", PROMPTS[0], replace(LONG, max_tokens=30))
        for _ in range(4):
            own.step()
        own.add_request("b", PROMPTS[1], LONG)
        turns = 0
        while not any(output.req_id == "b" for output in own.step()):
            turns += 1
        results = drained(own)
    assert turns == steps_ahead
    assert results["a"].token_ids == alone(PROMPTS[0], replace(LONG, max_tokens=30)).token_ids
    assert results["b"].token_ids == alone(PROMPTS[1], LONG).token_ids


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_request_that_is_aborted_on_the_way_has_the_beginning(steps_ahead: int) -> None:
    with engine(**unrolled(4), steps_ahead=steps_ahead) as own:
        for name, prompt in zip("ab", PROMPTS, strict=False):
            own.add_request(name, prompt, replace(LONG, max_tokens=30))
        for _ in range(4):
            own.step()
        (gone,) = own.abort("a")
        result = drained(own)["b"]
        assert own.num_free_blocks == own.limits.num_blocks[0] - 1
    whole = alone(PROMPTS[0], replace(LONG, max_tokens=30)).token_ids
    assert 0 < len(gone.token_ids) < 30 and whole[: len(gone.token_ids)] == gone.token_ids
    assert result.token_ids == alone(PROMPTS[1], replace(LONG, max_tokens=30)).token_ids


@pytest.mark.parametrize(("place", "steps_ahead"), [(1, 0), (3, 1), (7, 0), (8, 2)])
def test_logits_that_are_nan_end_a_request_where_they_would(place: int, steps_ahead: int) -> None:
    """The embedding of its token at this place is NaN: that token is its last one, and others notice nothing."""
    config = replace(tiny_config(), tied_embeddings=False)
    model, params = llama(config), random_params(config, seed=1, std=0.5)
    prompts = [PROMPTS[2], PROMPTS[1]]
    asked = [replace(LONG, repetition_penalty=1.5), LONG]
    with Engine((model, params), kv_cache_bytes=2**20, max_model_len=48) as own:
        whole, other = (result.token_ids for result in own.generate(prompts, asked, progress=False))
    token = whole[place]
    assert token not in (*whole[:place], *PROMPTS[2], *PROMPTS[1], *other)
    tree = params.tree | {"embed": params.tree["embed"].clone()}
    tree["embed"][token] = float("nan")

    found = []
    for unroll in (4, 1):
        sizes = unrolled(4) | {"unroll": unroll, "kv_cache_bytes": 2**20, "max_model_len": 48}
        with Engine((model, Params(tree)), steps_ahead=steps_ahead, **sizes) as own:
            capture_samplers(own, unroll)
            found.append(told(own.generate(prompts, asked, progress=False)))
    assert found[0] == found[1]
    (_, _, [(tokens, reason, *_)]), (_, _, [(others, *_)]) = found[0]
    assert (tokens, reason, others) == (whole[: place + 1], "error", other)


@examples(0.012)  # an example makes two engines with all their graphs
@given(
    st.integers(2, 6),
    st.integers(1, 5),
    st.sampled_from([DRAWN, replace(DRAWN, stop_token_ids=(3, 17, 40, 9)), LONG]),
    st.sampled_from(["update", "update and keep", "fork", "remember"]),
)
def test_what_is_done_between_turns_is_done_between_steps(
    unroll: int, num_turns: int, params: SamplingParams, what: str
) -> None:
    """Other weights, a fork, a moment: as in an engine of single steps that has got as far."""
    other = random_params(CONFIG, seed=2, std=0.5)
    known = list[int]()

    def so_far(own: Engine) -> int:
        return max((len(tape) for tape in own.turns.now.book.tokens), default=0)

    def doing(own: Engine) -> Any:
        own.add_request("a", PROMPTS[2], params, stream=0)
        if known:  # the second engine: as far as the first one got
            while own.has_unfinished() and so_far(own) < known[0]:
                own.step()
            assert so_far(own) == known[0]
        else:
            for _ in range(num_turns):
                own.step()
            known.append(so_far(own))
        assume("a" in own.turns.now.book.numbers)  # else it has ended
        if what == "fork":
            own.fork("a", "b", stream=7)
        elif what == "remember":
            with own.remember() as here:
                first = told(list(drained(own).values()))
                own.rewind(here)
                assert told(list(drained(own).values())) == first
            return first
        else:
            own.update_weights(other, keep_kv=what == "update and keep")
        return {name: told([result]) for name, result in sorted(drained(own).items())}

    found, expected = both(unroll, doing, steps_ahead=0)
    assert found == expected


def test_a_stream_grows_by_as_many_tokens() -> None:
    with engine(**unrolled(4)) as own:
        lengths = [len(result.token_ids) for result in own.stream(PROMPTS[0], LONG)]
    assert lengths == [1, 2, 6, 10, 14]
    assert np.diff(lengths).max() == 4
