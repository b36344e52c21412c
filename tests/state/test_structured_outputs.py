"""Structured output: every text is one that its grammar allows, whatever runs beside it and however it is scheduled."""

import json
import re
import sys
from copy import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import GrammarError, InvalidParameterError, NoTokenError
from purestep.pure.record import replace
from purestep.pure.records.logits_processor import LogitsProcessor
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.structured_outputs import StructuredOutputsParams
from purestep.state.engine import Engine
from purestep.state.grammars import Grammars, common_length, one_of
from purestep.state.loading.loaded import LoadedModel
from tests.bugs.tiny_engine import MODEL, Tokens, drained
from tests.grammars import EOS, MARK, TEXTS, needs_xgrammar
from tests.profiles import examples
from tests.smollm2 import needs_smollm2
from tests.state.fake_graphs import FakeGraphs
from tests.state.shaped import (
    DRAWN,
    FORMS,
    GREEDY,
    LOADED,
    PLAIN,
    PROMPT,
    TOKENIZER,
    VOCAB,
    alone,
    engine,
    is_allowed,
    shaped,
)


@pytest.fixture(autouse=True, scope="module")
def _xgrammar() -> None:
    needs_xgrammar()


@cache
def one_compiler() -> Grammars:
    """Compiling is dear, and knows nothing of samples."""
    grammars = Grammars(LOADED, vocab_size=VOCAB)
    grammars.compile(StructuredOutputsParams(choice=["ab"]))
    return grammars


def fresh_grammars() -> Grammars:
    """Without a matcher; its compiler is everybody's."""
    own = copy(one_compiler())
    own._matchers = {}
    return own


ASKED = st.tuples(
    st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=9).map(tuple),
    st.sampled_from([*FORMS, None]),
    st.sampled_from([GREEDY, DRAWN]),
)


@examples(0.15)
@given(
    st.lists(ASKED, min_size=1, max_size=4),
    st.sampled_from([3, 8, 64]),
    st.sampled_from([9, 40]),
    st.integers(0, 1),
)
def test_every_request_gets_what_it_gets_alone_and_what_its_grammar_allows(
    unchecked_records: None,
    asked: list[tuple[Tokens, str | None, SamplingParams]],
    budget: int,
    num_blocks: int,
    steps_ahead: int,
) -> None:
    """Beside others and none, in chunks, thrown out of a small cache, a step ahead: tokens, log-probabilities, text."""
    params = [own if form is None else shaped(form, own) for _, form, own in asked]
    sizes = {"max_num_batched_tokens": budget, "kv_cache_bytes": num_blocks * 1024}
    with engine(**sizes, steps_ahead=steps_ahead) as own:
        for i, ((prompt, _, _), wanted) in enumerate(zip(asked, params, strict=True)):
            own.add_request(str(i), prompt, wanted, stream=0)
        found = drained(own)
    for i, ((prompt, form, _), wanted) in enumerate(zip(asked, params, strict=True)):
        result, expected = found[str(i)], alone(prompt, wanted)
        assert (result.token_ids, result.text, result.finish_reason) == (
            expected.token_ids, expected.text, expected.finish_reason,
        )  # fmt: skip
        if result.logprobs is not None and expected.logprobs is not None:
            np.testing.assert_allclose(result.logprobs.logprobs, expected.logprobs.logprobs, atol=1e-4)
        if form is not None and result.finish_reason == "stop":
            assert is_allowed(form, result.text)
        if form in ("choice", "json"):
            assert result.finish_reason in ("stop", "length") and result.outputs[0].error is None


@given(
    st.sampled_from(list(FORMS)),
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 8),
            st.integers(0, 2**30),
            st.integers(0, 5),
            st.lists(st.integers(0, VOCAB - 1), max_size=2),
        ),
        max_size=8,
    ),
)
def test_a_mask_is_a_fold_over_the_outputs(
    form: str, asked: list[tuple[int, int, int, int, list[int]]]
) -> None:
    """Histories of several samples, shorter and longer and other ones, in any order: as a new matcher gives it.

    So behind drafts, of which some may stand, until the grammar refuses one or is at its end.
    """
    params = StructuredOutputsParams(**FORMS[form])
    kept = fresh_grammars()
    for sample, length, choice, num_right, wild in asked:
        text = legal(params, length + num_right, choice)
        outputs, drafts = text[:length], np.array([*text[length:], *wild], np.int32)
        expected = list[list[int]]()
        for place in range(1 + len(drafts)):
            try:
                expected += masks_behind(fresh_grammars(), 0, params, [*outputs, *drafts[:place]])
            except GrammarError:
                break
        assert masks_behind(kept, sample, params, outputs, drafts) == expected
    kept.forget(but=lambda sample: sample == 1)
    assert kept._matchers.keys() <= {1}


@cache
def legal(params: StructuredOutputsParams, length: int, choice: int) -> np.ndarray:
    """Some outputs that a grammar allows, and its end if it comes so soon."""
    grammars = fresh_grammars()
    outputs = list[int]()
    for _ in range(length):
        masks = masks_behind(grammars, 0, params, outputs)
        if not masks:
            break
        outputs.append(masks[0][choice % len(masks[0])])
        choice //= 3
    return np.array(outputs, np.int32)


def masks_behind(
    grammars: Grammars, sample: int, params: StructuredOutputsParams, outputs: Any, drafts: Any = ()
) -> list[list[int]]:
    """The ids that are allowed behind these outputs, and behind each of these drafts."""
    into = np.zeros((1 + len(drafts), 2), np.int32)
    own = np.array(outputs, np.int32), np.array(drafts, np.int32)
    return [allowed_ids(mask) for mask in into[: grammars.masks(sample, params, *own, into)]]


def allowed_ids(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_a_sample_may_have_the_number_and_another_grammar_than_one_before_a_rewind() -> None:
    with engine() as own:
        moment = own.remember()
        for form in ("regex", "choice", "regex"):
            own.add_request("r", PROMPT, shaped(form))
            assert drained(own)["r"].token_ids == alone(PROMPT, shaped(form)).token_ids
            own.rewind(moment)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("form", list(FORMS))
def test_forks_and_moments_go_on_where_they_are_in_the_grammar(form: str, steps_ahead: int) -> None:
    expected = alone(PROMPT, shaped(form)).token_ids
    with engine(steps_ahead=steps_ahead) as own:
        own.add_request("r", PROMPT, shaped(form))
        own.step()
        own.step()
        with own.remember() as moment:
            for _ in range(2):
                own.fork("r", "twin")
                own.step()
                own.fork("twin", "cousin")
                found = {name: result.token_ids for name, result in drained(own).items()}
                assert found == {"r": expected, "twin": expected, "cousin": expected}
                own.rewind(moment)
            own.update_weights(own.params)  # keys and values are void: the step that was on its way too
            assert drained(own)["r"].token_ids == expected


def test_samples_of_one_prompt_each_obey_the_grammar() -> None:
    with engine() as own:
        (result,) = own.generate([PROMPT], shaped("choice", replace(DRAWN, n=6)), progress=False)
    assert len({output.text for output in result.outputs}) > 1
    assert all(is_allowed("choice", o.text) and o.finish_reason == "stop" for o in result.outputs)


@pytest.mark.parametrize("capture_halves", [False, True])
def test_masks_apply_behind_captured_executions(capture_halves: bool) -> None:
    """Padded, beside requests without grammars, and with processors and chosen ids in the same step."""
    odd = shaped("regex", replace(GREEDY, logits_processors=[LogitsProcessor(lambda x, *_: x + 0)]))
    params = [shaped("json"), PLAIN, odd]
    api = FakeGraphs()
    with engine(graph_api=api, capture_progress=False, capture_halves=capture_halves) as own:
        before = api.num_replays
        results = own.generate([PROMPT] * 3, params, progress=False)
        assert (api.num_replays > before) == capture_halves
        again = own.generate([PROMPT] * 2, [shaped("json"), PLAIN], progress=False)
    assert [result.token_ids for result in again] == [results[i].token_ids for i in range(2)]
    plain = [alone(PROMPT, own).token_ids for own in (shaped("json"), PLAIN, shaped("regex"))]
    assert [result.token_ids for result in results] == plain


@pytest.mark.parametrize(
    "wrong", [{"json": {"type": "nope"}}, {"json": "{"}, {"regex": "(a"}, {"grammar": "x"}]
)
def test_a_grammar_that_can_not_be_compiled_is_refused_and_the_others_are_served(wrong: Any) -> None:
    bad = replace(GREEDY, structured_outputs=wrong)
    with engine() as own:
        before = own._turns.now
        with pytest.raises(GrammarError, match=r"can not be compiled: \S"):
            own.add_request("bad", PROMPT, bad)
        assert own._turns.now is before
        results = own.generate([PROMPT, PROMPT], [bad, shaped("regex")], progress=False, on_error="return")
    assert isinstance(results[0].error, GrammarError)
    assert results[1].token_ids == alone(PROMPT, shaped("regex")).token_ids


@pytest.mark.parametrize(
    ("form", "min_tokens", "reason"),
    [
        ({"choice": ["no", "aa"]}, 3, "fewer tokens, .* lower min_tokens"),
        ({"choice": ["null:null," * 4]}, 48, "fewer tokens, .* lower min_tokens"),
        ({"regex": "(ab)?c"}, 4, "fewer tokens, .* lower min_tokens"),
        ({"json": {"enum": [1, 12, None]}}, 5, "fewer tokens, .* lower min_tokens"),
        ({"grammar": 'root ::= "{" "}"'}, 3, "fewer tokens, .* lower min_tokens"),
        ({"regex": r"[^\s\S]"}, 0, "allows no text"),
        ({"regex": "z+"}, 0, "allows no text"),  # the tokenizer has no z
        ({"json": {"not": {}}}, 0, "keyword 'not', which xgrammar does not heed"),
        ({"json": {"properties": {"a": {"items": [{"uniqueItems": True}]}}}}, 0, "keyword 'uniqueItems'"),
        ({"json": {"allOf": [{"type": "integer"}, {"minimum": 5}]}}, 0, "keyword 'allOf' of several"),
    ],
)
def test_a_form_that_no_text_can_have_is_refused_and_nothing_has_changed(
    form: dict[str, Any], min_tokens: int, reason: str
) -> None:
    bad = replace(GREEDY, structured_outputs=form, min_tokens=min_tokens, max_tokens=None)
    with engine() as own:
        before = own._turns.now
        with pytest.raises(GrammarError, match=reason):
            own.add_request("bad", PROMPT, bad)
        assert own._turns.now is before


@pytest.mark.parametrize(
    ("form", "min_tokens"),
    [
        ({"choice": ["no", "null"]}, 4),
        ({"regex": "(ab)?c"}, 3),
        ({"regex": "a+"}, 40),
        ({"json": {"const": {"not": 1}, "default": {"if": 2}}}, 0),
        ({"json": {"type": "object", "properties": {"not": {"type": "null"}}, "required": ["not"]}}, 0),
    ],
)
def test_a_form_that_some_text_has_is_not_refused(form: dict[str, Any], min_tokens: int) -> None:
    with engine() as own:
        own.add_request(
            "r", PROMPT, replace(GREEDY, structured_outputs=form, min_tokens=min_tokens, max_tokens=None)
        )


@given(
    st.lists(st.text("abcno", min_size=1, max_size=4), min_size=1, max_size=3, unique=True), st.integers(1, 5)
)
def test_a_choice_is_refused_exactly_where_its_longest_spelling_is_too_short(
    texts: list[str], min_tokens: int
) -> None:
    """Every letter is a token, so the longest spelling has as many tokens as letters."""
    grammars, params = one_compiler(), StructuredOutputsParams(choice=texts)
    if max(map(len, texts)) >= min_tokens:
        grammars.check(params, min_tokens=min_tokens)
    else:
        with pytest.raises(GrammarError, match="fewer tokens"):
            grammars.check(params, min_tokens=min_tokens)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({}, "none of json, regex, choice, grammar are given"),
        ({"regex": "a", "choice": ["a"]}, "exactly one"),
        ({"regex": ""}, "not empty"),
        ({"choice": []}, "not empty"),
        ({"choice": ["a", ""]}, "not empty"),
    ],
)
def test_what_is_no_form_is_refused(wrong: Any, reason: str) -> None:
    with engine() as own, pytest.raises(InvalidParameterError, match=reason):
        own.add_request("r", PROMPT, replace(GREEDY, structured_outputs=wrong))


@pytest.mark.parametrize("wrong", [{"json": {1, 2}}, {"choice": "abc"}, {"xml": "a"}, "json"])
def test_what_can_not_be_a_form_is_no_parameter(wrong: Any) -> None:
    with pytest.raises(InvalidParameterError, match="structured_outputs"):
        SamplingParams(structured_outputs=wrong)


def test_without_xgrammar_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with engine() as own:
        with pytest.raises(GrammarError, match="xgrammar is not installed: pip install xgrammar"):
            own.add_request("r", PROMPT, shaped("json"))
        assert own.generate(PROMPT, PLAIN, progress=False)[0].token_ids == alone(PROMPT, PLAIN).token_ids


@pytest.mark.parametrize(
    ("lacks", "reason"), [({"eos_token_ids": ()}, "end-of-sequence"), ({"tokenizer": None}, "texts of all")]
)
def test_a_model_that_can_not_end_or_spell_a_text_is_refused(lacks: dict[str, Any], reason: str) -> None:
    whole = {"tokenizer": TOKENIZER, "eos_token_ids": (EOS,)} | lacks
    loaded = LoadedModel("tiny", MODEL, LOADED.params, **whole)
    sizes = {"kv_cache_bytes": 40 * 1024, "block_size": 4, "max_model_len": 48}
    with Engine(loaded, **sizes) as own, pytest.raises(GrammarError, match=reason):
        own.add_request("r", PROMPT, shaped("json"))


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_where_no_token_is_left_that_request_fails_and_the_others_go_on(steps_ahead: int) -> None:
    """The grammar is at its end, and min_tokens forbids the end, which is not seen before: it has too many texts."""
    starved = replace(GREEDY, structured_outputs={"regex": "[0-9a-u]{1,3}"}, min_tokens=4)
    with engine(steps_ahead=steps_ahead) as own:
        results = own.generate([PROMPT] * 3, [starved, shaped("regex"), PLAIN], progress=False)
    (output,) = results[0].outputs
    assert re.fullmatch("[0-9a-u]{1,3}", output.text) and output.finish_reason == "error"
    assert isinstance(output.error, NoTokenError) and "structured_outputs" in str(output.error)
    assert results[1].token_ids == alone(PROMPT, shaped("regex")).token_ids
    assert results[2].token_ids == alone(PROMPT, PLAIN).token_ids


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_outputs_that_the_grammar_refuses_end_that_request_alone(
    monkeypatch: pytest.MonkeyPatch, steps_ahead: int
) -> None:
    masks = Grammars.masks

    def forgetful(self: Grammars, sample: int, params: Any, outputs: Any, drafts: Any, into: Any) -> int:
        count = masks(self, sample, params, outputs, drafts, into)
        if sample == 0 and len(outputs) == 2:
            into[:] = -1  # as if every token were allowed
        return count

    monkeypatch.setattr(Grammars, "masks", forgetful)
    odd = replace(shaped("regex"), logit_bias={2 + TEXTS.index("}"): 100.0})
    with engine(steps_ahead=steps_ahead) as own:
        own.add_request("odd", PROMPT, odd)
        own.add_request("even", PROMPT, shaped("regex"))
        results = drained(own)
        assert own.num_free_blocks == own.limits.num_blocks[0] - 1
    (output,) = results["odd"].outputs
    assert output.finish_reason == "error" and output.text.endswith("}") and len(output.token_ids) == 3
    assert isinstance(output.error, GrammarError) and "output 2 is token" in str(output.error)
    assert results["even"].token_ids == alone(PROMPT, shaped("regex")).token_ids


def test_behind_its_end_a_grammar_says_nothing() -> None:
    """With ignore_eos the request goes on, as if it had none."""
    params = replace(shaped("choice"), structured_outputs={"choice": ["no"]}, ignore_eos=True, max_tokens=5)
    with engine() as own:
        (result,) = own.generate(PROMPT, params, progress=False)
        rest = own.generate(
            (*PROMPT, *result.token_ids[:-3]), replace(GREEDY, ignore_eos=True, max_tokens=3), progress=False
        )[0]
    ended = result.token_ids.index(EOS)
    assert TOKENIZER.decode(result.token_ids[:ended]) == "no"
    assert result.token_ids[-3:] == rest.token_ids and result.finish_reason == "length"


def test_special_tokens_are_no_text() -> None:
    """A special token whose name the grammar would allow is not taken for that text."""
    params = StructuredOutputsParams(regex="(<mark>|ab)")
    (allowed,) = masks_behind(Grammars(LOADED, vocab_size=VOCAB), 0, params, ())
    assert MARK not in allowed and 2 + TEXTS.index("ab") in allowed


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_choice_is_just_its_texts(texts: list[str]) -> None:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(["a"]))
    compiled = compiler.compile_grammar(one_of(tuple(texts)))
    for text in [*texts, texts[0] + "a", texts[0][:-1]]:
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        assert (matcher.accept_string(text) and matcher.is_completed()) == (text in texts)


@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_the_common_length_is_where_columns_part(first: list[int], second: list[int]) -> None:
    length = common_length(np.array(first, np.int32), np.array(second, np.int32))
    assert first[:length] == second[:length]
    assert first[length : length + 1] != second[length : length + 1] or length == len(first) == len(second)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_smollm2_writes_json_and_matches_expressions(steps_ahead: int) -> None:
    needs_smollm2()
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 16}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    own = SamplingParams(temperature=0.0, max_tokens=48)
    with Engine(max_model_len=128, steps_ahead=steps_ahead) as smollm2:
        as_json, date, pick, plain = smollm2.generate(
            [
                "Describe a person as JSON: ",
                "The date is ",
                "The capital of France is ",
                "The capital of France is",
            ],
            [
                replace(own, structured_outputs={"json": schema}),
                replace(own, structured_outputs={"regex": r"[12][0-9]{3}-[01][0-9]-[0-3][0-9]"}),
                replace(own, structured_outputs={"choice": ["Berlin", "Paris", "Rome"]}),
                replace(own, max_tokens=4),
            ],
            progress=False,
        )
    person = json.loads(as_json.text)
    assert person == {"name": "John", "age": 30} and as_json.finish_reason == "stop"
    assert re.fullmatch(r"[12][0-9]{3}-[01][0-9]-[0-3][0-9]", date.text)
    assert (pick.text, plain.text[:6]) == ("Paris", " Paris")
