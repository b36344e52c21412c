"""What xgrammar passes over in a JSON schema: such a schema is refused, or texts that it forbids would be written."""

import json
from collections.abc import Iterator
from typing import Any

from purestep.pure.errors import GrammarError

UNHEEDED = ("not", "if", "uniqueItems", "contains", "minContains", "maxContains", "$dynamicRef")
OF_SCHEMAS = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
)  # by names of any kind
OF_VALUES = ("const", "enum", "default", "examples")  # what lies in these is no schema
CHOICES = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")  # what stands beside them is not looked at
LENGTHS = ("minLength", "maxLength")
LIMITS = (  # of a type, which has to be said
    *LENGTHS,
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern"),
    *("minItems", "maxItems", "minProperties", "maxProperties"),
)


def check_schema(schema: str) -> None:
    """Refuse what is no JSON, which xgrammar takes up to where it ceases to be, and what it does not heed.

    Not seen are types beside `enum` and `const`, and branches of `oneOf` that overlap, which are taken for `anyOf`.

    Raises:
        GrammarError: naming what is not heeded.
    """
    try:
        word = next(_unheeded(json.loads(schema)), None)
    except RecursionError:
        return  # the compiler says what is wrong
    except ValueError as error:
        raise GrammarError(
            f"structured_outputs: json={schema!r} can not be compiled: it is no JSON ({error})"
        ) from None
    if word is not None:
        raise GrammarError(
            f"structured_outputs: json={schema!r} has the keyword {word}, which xgrammar does not heed, so texts "
            "that it forbids would be written: leave it out, or say the same by other keywords or a grammar"
        )


def _unheeded(schema: Any) -> Iterator[str]:
    """Keywords that are passed over, in the schema and in those within it."""
    for own in schema if isinstance(schema, list) else ():
        yield from _unheeded(own)
    if not isinstance(schema, dict):
        return
    yield from _beside_others(schema)
    for word, value in schema.items():
        if word in UNHEEDED and value is not False:
            yield repr(word)
        if word == "allOf" and isinstance(value, list) and len(value) > 1:
            yield "'allOf' of several"
        if word in OF_SCHEMAS and isinstance(value, dict):
            yield from _unheeded(list(value.values()))
        elif word not in OF_VALUES:
            yield from _unheeded(value)


def _beside_others(schema: dict[str, Any]) -> Iterator[str]:
    """Keywords that are passed over for what stands beside them, or does not."""
    limits = [word for word in LIMITS if word in schema]
    if limits and (chosen := next((word for word in CHOICES if word in schema), None)):
        yield f"{limits[0]!r} beside {chosen!r}"
    if limits and "type" not in schema:
        yield f"{limits[0]!r} without 'type'"
    if any(word in schema for word in LENGTHS) and (form := {"pattern", "format"} & schema.keys()):
        yield f"{next(word for word in LENGTHS if word in schema)!r} beside {min(form)!r}"
    named, required = schema.get("properties", {}), schema.get("required", ())
    if isinstance(named, dict) and isinstance(required, list):
        for name in required:
            if name not in named:
                yield f"'required' of {name!r}, which 'properties' do not have"
