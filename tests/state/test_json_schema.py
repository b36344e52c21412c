"""Schemas whose every keyword is heeded pass; the others are refused by what is not."""

import json
from typing import Any

import pytest

from purestep.pure.errors import GrammarError
from purestep.state.json_schema import check_schema

INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "string", "pattern": "^a+$"},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": False},
        {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}], "default": None, "title": "limits"},
        {
            "$defs": {"kind": {"enum": ["a", "b"], "type": "string"}},
            "type": "object",
            "properties": {"kind": {"$ref": "#/$defs/kind"}, "minimum": INTEGER, "required": INTEGER},
            "required": ["kind", "minimum"],
            "additionalProperties": False,
        },
    ],
)
def test_what_is_heeded_passes(schema: Any) -> None:
    check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": INTEGER}, "'not'"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "'uniqueItems'"),
        ({"allOf": [INTEGER, {"type": "number"}]}, "'allOf' of several"),
        ({"minimum": 5}, "'minimum' without 'type'"),
        ({"properties": {"a": {"maxLength": 1}}}, "'maxLength' without 'type'"),
        ({"type": "integer", "enum": [1], "minimum": 5}, "'minimum' beside 'enum'"),
        ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": INTEGER}}, "'minimum' beside '$ref'"),
        ({"type": "integer", "anyOf": [INTEGER], "maximum": 5}, "'maximum' beside 'anyOf'"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "'maxLength' beside 'pattern'"),
        ({"type": "string", "format": "email", "minLength": 2}, "'minLength' beside 'format'"),
        ({"type": "object", "required": ["q"]}, "'required' of 'q', which 'properties' do not have"),
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, "'required' of 'b'"),
    ],
)
def test_what_is_passed_over_is_refused_by_name(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        check_schema(json.dumps(schema))
    assert f"has the keyword {reason}" in str(caught.value)


@pytest.mark.parametrize("text", ['{"not":{}} x', '{"a":1}{', "", "integer", '{"type": "integer"'])
def test_text_that_is_no_json_is_refused(text: str) -> None:
    """Also where it begins as some, which a compiler might take for the whole."""
    with pytest.raises(GrammarError, match="it is no JSON"):
        check_schema(text)
