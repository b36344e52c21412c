"""Structured output with a drafter: drafts are masked each at its place, so that tokens are those without a drafter."""

from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.drafters.eagle3 import tapped
from purestep.pure.errors import (
    GrammarError,
    InvalidRequestError,
    NoTokenError,
    OutOfBlocksError,
    OutOfRowsError,
)
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter, HostDrafter, Proposal
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from purestep.state.grammars import Grammars
from purestep.state.loading.loaded import LoadedModel
from tests.bugs.tiny_engine import Tokens, drained
from tests.grammars import TEXTS, needs_xgrammar
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs
from tests.state.shaped import (
    DRAWN,
    FORMS,
    GREEDY,
    LOADED,
    PLAIN,
    PROMPT,
    VOCAB,
    alone,
    engine,
    is_allowed,
    shaped,
)
from tests.state.test_drafters import BARE, WEIGHTED, with_weights

Asked = tuple[Tokens, str | None, SamplingParams]
ASKED = st.tuples(
    st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=9).map(tuple),
    st.sampled_from([*FORMS, None]),
    st.sampled_from([GREEDY, DRAWN]),
)


@pytest.fixture(autouse=True, scope="module")
def _xgrammar() -> None:
    needs_xgrammar()


def wanted(asked: Asked) -> SamplingParams:
    _, form, own = asked
    return own if form is None else shaped(form, own)


def guesses(texts: Sequence[Tokens], history: Tokens, most: int, seed: int) -> Tokens:
    """What follows this history in one of the texts, as far as it goes: some of it is wrong, or left out."""
    rng = Random(seed * 1000 + len(history))
    follows = next((text[len(history) :] for text in texts if text[: len(history)] == history), ())
    drafts = [rng.randrange(VOCAB) if rng.randrange(4) < seed % 3 else token for token in follows[:most]]
    return tuple(drafts[: rng.choice((most, most, rng.randint(0, most)))])


def prophet(num_drafts: int, texts: Sequence[Tokens], seed: int, *, on_device: bool) -> Drafter | HostDrafter:
    """A drafter that guesses so. With a seed that 3 divides it is never wrong, but may say less than it could."""

    def on_host(kept: None, histories: Any, budgets: Any) -> Any:
        pairs = zip(histories, budgets, strict=True)
        return None, tuple([guesses(texts, tuple(map(int, own)), most, seed) for own, most in pairs])

    def propose(params: Any, executed: Any, state: Any, output: Any, *, kernels: Any) -> Proposal:
        rows = state.layout.row_of_index.tolist()
        lengths = state.ledger.num_known_tokens[rows].tolist()
        drafts = torch.full((len(rows), num_drafts), -1, dtype=torch.int32)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            own = guesses(texts, tuple(state.token_ids[row, :length].tolist()), num_drafts, seed)
            drafts[index, : len(own)] = torch.tensor(own, dtype=torch.int32)
        return Proposal(drafts)

    return Drafter(num_drafts, propose) if on_device else HostDrafter(num_drafts, on_host)


def texts_of(asked: Sequence[Asked]) -> list[Tokens]:
    return [(*own[0], *alone(own[0], wanted(own)).token_ids) for own in asked]


@examples(0.3)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=4),
    num_drafts=st.integers(1, 4),
    seed=st.integers(0, 100),
    steps_ahead=st.sampled_from([None, 0, 1, 2]),
    budget=st.sampled_from([3, 8, 64]),
    num_blocks=st.sampled_from([10, 40]),
    when=st.integers(1, 9),
)
def test_tokens_are_those_without_a_drafter_and_what_the_grammar_allows(
    unchecked_records: None,
    asked: list[Asked],
    num_drafts: int,
    seed: int,
    steps_ahead: int | None,
    budget: int,
    num_blocks: int,
    when: int,
) -> None:
    """Drafts of the host (no steps ahead) and the device, beside plain requests, preempted, forked, aborted."""
    drafter = prophet(num_drafts, texts_of(asked), seed, on_device=steps_ahead is not None)
    sizes = {"max_num_batched_tokens": budget, "kv_cache_bytes": num_blocks * 1024}
    with engine(drafter=drafter, steps_ahead=steps_ahead, **sizes) as own:
        for i, each in enumerate(asked):
            own.add_request(str(i), each[0], wanted(each), stream=0)
        found = {result.req_id: result for _ in range(when) if own.has_unfinished() for result in own.step()}
        with suppress(InvalidRequestError, OutOfBlocksError, OutOfRowsError):
            own.fork("0", "twin", keep_stream=True)
        (aborted,) = own.abort("1") or [None]
        found |= drained(own)
        assert own.num_free_blocks == own.limits.num_blocks[0] - 1
    for result in (
        aborted,
        found.pop("1", None),
    ):  # the end of one that had ended by then is not told any more
        if result is not None:
            expected = alone(asked[1][0], wanted(asked[1]))
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
    for name, result in found.items():
        each = asked[0 if name == "twin" else int(name)]
        expected = alone(each[0], wanted(each))
        assert (result.token_ids, result.text, result.finish_reason) == (
            expected.token_ids, expected.text, expected.finish_reason,
        )  # fmt: skip
        if each[1] is not None and result.finish_reason == "stop":
            assert is_allowed(each[1], result.text)
    assert {str(i) for i in range(len(asked))} - {"1"} <= found.keys()


@pytest.mark.parametrize("steps_ahead", [None, 0, 1, 2])
@pytest.mark.parametrize("form", list(FORMS))
def test_right_drafts_save_steps(form: str, steps_ahead: int | None) -> None:
    """Masks behind drafts are those of the history with them: else none but the first would stand."""
    params = shaped(form, replace(DRAWN, max_tokens=12))
    expected = alone(PROMPT, params).token_ids
    assert len(expected) > 2
    drafter = prophet(3, [(*PROMPT, *expected)], 0, on_device=steps_ahead is not None)
    with engine(drafter=drafter, steps_ahead=steps_ahead) as own:
        own.add_request("r", PROMPT, params, stream=0)
        assert drained(own)["r"].token_ids == expected
        steps = own._turns.now.batch.clock.num_begun
    assert steps <= 1 + len(expected) // 2 + 2 * (steps_ahead or 0)


@pytest.mark.parametrize("steps_ahead", [0, 2])
@pytest.mark.parametrize("kind", [*WEIGHTED, *BARE])
def test_every_kind_of_drafter_goes_with_grammars(kind: str, steps_ahead: int) -> None:
    """One that draws its guesses changes what is drawn, not what the grammar allows."""
    drafter, weights = (BARE[kind](), None) if kind in BARE else with_weights(kind)
    if isinstance(drafter, HostDrafter):
        steps_ahead = 0
    model = tapped(LOADED.model, (0, 1)) if kind == "eagle-3" else LOADED.model
    loaded = LoadedModel("tiny", model, LOADED.params, tokenizer=LOADED.tokenizer, eos_token_ids=(0,))
    params = [shaped("json"), PLAIN, shaped("grammar", DRAWN), shaped("regex"), shaped("choice", DRAWN)]
    sizes = {"kv_cache_bytes": 2**16, "block_size": 4, "max_model_len": 48, "max_num_reqs": 4}
    draft_params = None if weights is None else Params(weights)
    how: Any = {"drafter": drafter, "draft_params": draft_params, "steps_ahead": steps_ahead}
    with Engine(loaded, **how, **sizes) as own:
        for i, each in enumerate(params):
            own.add_request(str(i), PROMPT, each, stream=0)
        found = drained(own)
    for i, each in enumerate(params):
        if each.greedy or kind != "drawing draft model":
            assert found[str(i)].token_ids == alone(PROMPT, each).token_ids
    assert is_allowed("choice", found["4"].text) and found["4"].finish_reason == "stop"


@pytest.mark.parametrize("capture_halves", [False, True])
@pytest.mark.parametrize("steps_ahead", [None, 1])
def test_masks_of_drafts_apply_behind_captured_executions(
    capture_halves: bool, steps_ahead: int | None
) -> None:
    """Where the batch is padded to the shape of a graph, and the graph samples."""
    asked: list[Asked] = [(PROMPT, "json", GREEDY), (PROMPT, None, PLAIN), (PROMPT, "choice", DRAWN)]
    drafter, api = prophet(2, texts_of(asked), 1, on_device=steps_ahead is not None), FakeGraphs()
    how: Any = {"graph_api": api, "capture_progress": False, "capture_halves": capture_halves}
    with engine(drafter=drafter, steps_ahead=steps_ahead, **how) as own:
        before = api.num_replays
        for i, each in enumerate(asked):
            own.add_request(str(i), PROMPT, wanted(each), stream=0)
        found = drained(own)
    assert (api.num_replays > before) or not capture_halves
    assert [found[str(i)].token_ids for i in range(3)] == [
        alone(PROMPT, wanted(each)).token_ids for each in asked
    ]


@pytest.mark.parametrize("steps_ahead", [None, 1])
def test_where_no_token_is_left_behind_drafts_that_stand_the_request_ends_as_without(
    steps_ahead: int | None,
) -> None:
    """The grammar is at its end, and min_tokens forbids the end, which is not seen before: it has too many texts."""
    starved = replace(shaped("choice"), structured_outputs={"regex": "[0-9a-u]{1,3}"}, min_tokens=4)
    expected = alone(PROMPT, starved)
    drafter = prophet(3, [(*PROMPT, *expected.token_ids, 0, 0)], 0, on_device=steps_ahead is not None)
    with engine(drafter=drafter, steps_ahead=steps_ahead) as own:
        results = own.generate([PROMPT] * 2, [starved, shaped("regex")], progress=False)
    (output,) = results[0].outputs
    assert (output.text, output.finish_reason) == (expected.text, "error")
    assert output.token_ids == expected.token_ids and len(output.token_ids) == 3
    assert isinstance(output.error, NoTokenError) and "structured_outputs" in str(output.error)
    assert results[1].token_ids == alone(PROMPT, shaped("regex")).token_ids


@pytest.mark.parametrize("steps_ahead", [None, 1])
def test_outputs_that_the_grammar_refuses_end_that_request_alone(
    monkeypatch: pytest.MonkeyPatch, steps_ahead: int | None
) -> None:
    even, masks = alone(PROMPT, shaped("regex")).token_ids, Grammars.masks

    def forgetful(self: Grammars, sample: int, params: Any, outputs: Any, drafts: Any, into: Any) -> int:
        count = masks(self, sample, params, outputs, drafts, into)
        if sample == 0 and 0 <= 2 - len(outputs) < count:
            into[2 - len(outputs)] = -1  # as if every token were allowed
        return count

    monkeypatch.setattr(Grammars, "masks", forgetful)
    brace = 2 + TEXTS.index("}")
    odd = replace(shaped("regex"), logit_bias={brace: 100.0})
    drafter = prophet(2, [(*PROMPT, *even)], 0, on_device=steps_ahead is not None)
    with engine(drafter=drafter, steps_ahead=steps_ahead) as own:
        own.add_request("odd", PROMPT, odd)
        own.add_request("even", PROMPT, shaped("regex"))
        results = drained(own)
        assert own.num_free_blocks == own.limits.num_blocks[0] - 1
    (output,) = results["odd"].outputs
    assert output.finish_reason == "error" and output.token_ids == (*even[:2], brace)
    assert isinstance(output.error, GrammarError) and "output 2 is token" in str(output.error)
    assert results["even"].token_ids == even
