"""Random bits: the published generator, in the documented layout, whatever the batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference.philox import philox_4x32_10, uniforms

WORD = st.integers(0, 2**32 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
MASK = 2**32 - 1


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """The generator as published, in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def philox(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3, k0, k1 = (torch.tensor(word) for word in counter + key)
    return [int(word) for word in philox_4x32_10((c0, c1, c2, c3), (k0, k1))]


def draw_row(seed: int, stream: int, output_index: int, purpose: int, width: int) -> Tensor:
    row = torch.tensor([seed]), torch.tensor([stream]), torch.tensor([output_index], dtype=torch.int32)
    return uniforms(*row, purpose=purpose, width=width)[0]


@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
def test_bits_are_philox(counter: list[int], key: list[int]) -> None:
    """Every counter and key give the bits of the definition, words with the top bit set among them."""
    assert philox(counter, key) == philox_by_hand(counter, key)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter: str, key: str, words: str) -> None:
    """The answers that the authors publish with Random123."""
    numbers = [[int(word, 16) for word in text.split()] for text in (counter, key, words)]
    assert philox(numbers[0], numbers[1]) == numbers[2]


def test_words_may_be_int32_bit_patterns() -> None:
    """A negative int32 stands for the word with the same bits, as other implementations hold it."""
    minus_one = torch.tensor(-1, dtype=torch.int32)
    ones = philox_4x32_10((minus_one, minus_one, minus_one, minus_one), (minus_one, minus_one))
    assert [int(word) for word in ones] == philox_by_hand([MASK] * 4, [MASK] * 2)


@given(INT64, INT64, st.integers(0, 2**28 - 1), st.integers(0, 15), st.integers(0, 200))
def test_layout_is_the_documented_one(seed: int, stream: int, index: int, purpose: int, column: int) -> None:
    """Column c is word c % 4 of the block at (c // 4, index | purpose << 28, stream), the seed being the key."""
    counter = [column // 4, index | purpose << 28, stream & MASK, (stream >> 32) & MASK]
    word = philox_by_hand(counter, [seed & MASK, (seed >> 32) & MASK])[column % 4]
    value = float(draw_row(seed, stream, index, purpose, 201)[column])
    assert value == ((word >> 9) + 0.5) / 2**23


@given(st.lists(st.tuples(INT64, INT64, st.integers(0, 2**28 - 1)), min_size=1, max_size=8), st.data())
def test_neither_batch_nor_width_matters(rows: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """A request's numbers are its own: alone or among others, in any order, cut to any width."""
    seed, stream, index = (torch.tensor(column) for column in zip(*rows, strict=True))
    batch = uniforms(seed, stream, index.to(torch.int32), purpose=3, width=37)
    place, width = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(1, 37))
    assert torch.equal(draw_row(*rows[place], 3, width), batch[place, :width])


def test_extreme_words_stay_inside_the_interval() -> None:
    """The formula at the smallest and at the largest k: never 0, never 1, and the noise is finite."""
    numbers = uniforms(torch.arange(64), torch.zeros(64), torch.zeros(64), purpose=0, width=1 << 17)
    assert 0 < numbers.min() < 2.0**-22
    assert 1 - 2.0**-22 < numbers.max() < 1
    assert (-numbers.log()).log().isfinite().all()


def chi_square(counts: Tensor) -> float:
    """Against equal expectations."""
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


def test_values_are_uniform() -> None:
    numbers = draw_row(7, 0, 0, 0, 1 << 16)
    counts = torch.histc(numbers, 64, 0.0, 1.0)
    assert chi_square(counts) < 63 + 4 * (2 * 63) ** 0.5


@pytest.mark.parametrize("varied", ["seed", "stream", "output_index", "purpose"])
def test_different_draws_are_independent(varied: str) -> None:
    """Same seed, other stream, output or purpose: other noise, jointly uniform with every other.

    The joint counts of neighbouring draws fill an 8 x 8 table evenly, and no two of 64 draws are correlated.
    """
    width, rows = 4096, []
    for value in range(64 if varied != "purpose" else 16):
        name = {"seed": 7, "stream": 11, "output_index": 5, "purpose": 0} | {varied: value}
        rows.append(draw_row(name["seed"], name["stream"], name["output_index"], name["purpose"], width))
    drawn = torch.stack(rows)
    pairs = (drawn[:-1] * 8).floor() * 8 + (drawn[1:] * 8).floor()
    assert chi_square(torch.histc(pairs, 64, 0.0, 64.0)) < 63 + 4 * (2 * 63) ** 0.5
    correlations = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert correlations.abs().max() < 5 / width**0.5
