"""What a request's text is to look like. Source: vllm/sampling_params.py StructuredOutputsParams (names)."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from purestep.kernels.record import record
from purestep.pure.errors import InvalidParameterError


def _schema(value: Any) -> str | None:
    """A JSON schema as text; properties stay in their order, in which they will be written."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidParameterError(
            f"structured_outputs: json={value!r} is no JSON schema: {error}"
        ) from None


def _choice(value: Iterable[str] | None) -> tuple[str, ...] | None:
    if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
        raise InvalidParameterError(f"structured_outputs: choice={value!r}: give a list of texts")
    return None if value is None else tuple(value)


@record(static=True)
class StructuredOutputsParams:
    """One of these forms; the text is one that it allows, or the beginning of one where the request ends early;
    with ignore_eos, anything may follow one that is whole.

    Raises: InvalidParameterError for a schema that can not be written as JSON, and choices that are no list.
    """

    json: str | None = attrs.field(default=None, converter=_schema)  # a JSON schema, as text or as a mapping
    regex: str | None = None  # of the whole text
    choice: tuple[str, ...] | None = attrs.field(default=None, converter=_choice)  # one of these texts
    grammar: str | None = None  # in EBNF, whose rule `root` is the whole text

    @property
    def form(self) -> tuple[str, Any]:
        """The name of the form that is given, and its value."""
        ((name, value),) = given_forms(self)
        return name, value


FORMS = ("json", "regex", "choice", "grammar")


def given_forms(params: StructuredOutputsParams) -> list[tuple[str, Any]]:
    """Names and values of all forms that are given."""
    return [(name, getattr(params, name)) for name in FORMS if getattr(params, name) is not None]


def as_structured_outputs(
    value: StructuredOutputsParams | Mapping[str, Any] | None,
) -> StructuredOutputsParams | None:
    """The record, where its fields may come as a mapping.

    Raises: InvalidParameterError for names that are no fields, and as the record.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping) or not set(value) <= set(FORMS):
        raise InvalidParameterError(
            f"structured_outputs={value!r}: give StructuredOutputsParams, or a mapping with one of {', '.join(FORMS)}"
        )
    return StructuredOutputsParams(**value)


def validate_structured_outputs(params: StructuredOutputsParams) -> None:
    """Refuse what is not exactly one form, of its type; the grammar's compiler judges what it says.

    Raises: InvalidParameterError.
    """
    forms = given_forms(params)
    if len(forms) != 1:
        names = [name for name, _ in forms] or "none"
        raise InvalidParameterError(
            f"structured_outputs: {names} of {', '.join(FORMS)} are given: give exactly one of them"
        )
    ((name, value),) = forms
    texts = value if name == "choice" else (value,)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidParameterError(f"structured_outputs: {name}={value!r}: give text that is not empty")
