import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from purestep.pure.scheduler import find_stop

TEXT = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=3), max_size=3)


@given(TEXT, STOPS)
def test_it_is_what_a_search_after_each_character_finds(text: str, stops: list[str]) -> None:
    """Chunk law: how much text a token brings changes nothing."""
    expected = None
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            expected = end - len(longest), longest
            break

    assert find_stop(text, stops) == expected


@given(TEXT, TEXT, STOPS)
def test_only_the_end_of_the_old_text_needs_to_be_searched_again(
    old: str, new: str, stops: list[str]
) -> None:
    """Starting one less than the longest stop before the new text finds the same."""
    assume(find_stop(old, stops) is None)
    start = max(0, len(old) - max(map(len, stops), default=0) + 1)

    assert find_stop(old + new, stops, start) == find_stop(old + new, stops)


@pytest.mark.parametrize(
    ("text", "stops", "start", "found"),
    [
        ("one two", ("two", "one"), 0, (0, "one")),
        ("one two", ("two", "one"), 1, (4, "two")),
        ("abc", ("bc", "abc"), 0, (0, "abc")),
        ("abcd", ("abcd", "b"), 0, (1, "b")),
        ("abc", (), 0, None),
        ("", ("a",), 0, None),
    ],
)
def test_examples(text: str, stops: tuple[str, ...], start: int, found: tuple[int, str] | None) -> None:
    assert find_stop(text, stops, start) == found
