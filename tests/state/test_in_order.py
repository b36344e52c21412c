"""Results one by one, in the order of the prompts."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from purestep.pure.errors import InvalidRequestError
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.in_order import in_order
from purestep.state.loading.gguf_tokenizer import gguf_tokenizer
from purestep.state.results import RequestOutput
from tests.profiles import examples
from tests.state.loading.test_gguf_tokenizer import metadata
from tests.state.test_engine import GREEDY, PROMPTS, engine, tokens


def ignored(*, finished: int, tokens: int) -> None:
    """Nobody watches."""


@examples(0.1)
@given(
    prompts=st.lists(st.lists(st.integers(0, 63), max_size=9), min_size=1, max_size=5),
    seed=st.none() | st.integers(0, 9),
    n=st.integers(1, 2),
    num_reqs=st.integers(2, 4),
)
@example(prompts=[[], [5, 9, 2]], seed=3, n=1, num_reqs=2)  # a refused prompt takes its place all the same
def test_the_results_are_those_of_generate(
    prompts: list[list[int]], seed: int | None, n: int, num_reqs: int
) -> None:
    """In number, order and tokens, whatever the seed; an empty prompt is refused in its place."""
    params = SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=4)
    with engine(max_num_reqs=num_reqs) as own:
        expected = own.generate(prompts, params, progress=False, on_error="return")
    with engine(max_num_reqs=num_reqs) as own:
        results = list(in_order(own, prompts, params, report=ignored))
    assert [told(result) for result in expected] == [told(result) for result in results]


def told(result: RequestOutput) -> tuple[Any, ...]:
    return result.prompt_token_ids, type(result.error), [output.token_ids for output in result.outputs]


def test_a_result_waits_for_those_before_it_and_for_nothing_else() -> None:
    """The second prompt ends at its first token, and comes second; the fourth still runs when the third is given."""
    stop = GREEDY.max_tokens
    first_token = tokens(PROMPTS[1])[0][0]
    params = SamplingParams(temperature=0.0, max_tokens=stop, stop_token_ids=[first_token])
    seen: list[int] = []

    def report(*, finished: int, tokens: int) -> None:
        seen.append(finished)

    with engine(max_num_reqs=2) as own:
        results = in_order(own, PROMPTS, params, report=report)
        lengths = [len(next(results).token_ids) for _ in range(2)]
        assert lengths == [stop, 1]
        assert own.has_unfinished()
        assert len(list(results)) == 2 and not own.has_unfinished()
    assert seen == sorted(seen) and seen[0] == 1 and seen[-1] == 4


def test_text_with_half_a_character_is_refused() -> None:
    """By name, as any prompt that can not be served."""
    own = engine(tokenizer=gguf_tokenizer(metadata()))
    with own, pytest.raises(InvalidRequestError, match="half of a character"):
        own.add_request("a", "x\ud800")
