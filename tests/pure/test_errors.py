"""What error messages show of values that callers gave."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import short


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("not shown")


VALUES = st.recursive(
    st.none() | st.text() | st.integers() | st.binary() | st.floats(),
    lambda inner: st.lists(inner) | st.dictionaries(st.integers(), inner) | st.tuples(inner, inner),
)


@given(VALUES)
def test_any_value_is_shown_in_short(value: Any) -> None:
    assert len(short(value)) <= 200


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        ("cmpl-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", "'cmpl-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9'"),
        (list(range(10**6)), "[0, 1, 2, 3, 4, 5, ...]"),
        (Shy(), "<Shy "),
        (10**5000, "<int>"),
    ],
    ids=["number", "id", "prompt", "refuses", "digits"],
)
def test_examples(value: object, text: str) -> None:
    assert short(value).startswith(text)


def test_nested_values_are_cut() -> None:
    assert short([[["y" * 1000] * 50] * 50] * 50).endswith("...")
