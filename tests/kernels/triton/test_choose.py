"""Tokens without a distribution in memory: those of temperature, truncation, noise and draw one after the other."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.record import replace
from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import equal

from purestep.kernels.triton import cuda_donating  # isort: skip
import purestep.kernels.triton.choose  # isort: skip
from purestep.kernels.triton.choose import choose_by, judge  # isort: skip

pytestmark = quiet

OURS = cuda_donating()
INF, NAN = math.inf, math.nan
# Sub-blocks and lists so small that tokens are drawn from lists, and from whole rows where lists overflow.
WAYS = [(2, 4), (2, 16), (128, 2048)]
CUT = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 5, 12]),
    st.sampled_from([0.2, 0.75, 0.999, 1.0]),
    st.sampled_from([0.0, 0.1, 0.9]),
)


def parameters(cuts: list[tuple[float, int, float, float]], seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """temperature, top_k, top_p, min_p, output index; seeds and streams, words of whatever sign."""
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    columns = [
        torch.tensor(column, dtype=dtype, device=DEVICE)
        for column, dtype in zip(zip(*cuts, strict=True), dtypes, strict=True)
    ]
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (2, len(cuts), 2), generator=generator).to(torch.int32).to(DEVICE)
    index = torch.randint(0, 2**20, (len(cuts),), generator=generator).to(torch.int32).to(DEVICE)
    return [*columns, index], words[0], words[1]


def close_to_another(
    logits: Tensor, columns: list[Tensor], seed: Tensor, stream: Tensor, tokens: Tensor
) -> Tensor:
    """Rows in which the rule draws another token once its cut moves by what roundings move it."""
    others = []
    for top_p in (columns[2] - 1e-5, columns[2] + 1e-5):
        moved = [columns[0], columns[1], torch.where(columns[2] < 1, top_p, 1.0), columns[3]]
        others.append(
            reference.choose(reference, logits, *moved, seed, stream, columns[4], purpose=0, truncated=True)[
                0
            ]
        )
    return (others[0] != tokens) | (others[1] != tokens)


@few(30)
@given(
    st.lists(
        st.sampled_from([-INF, 0.0, 1.0, 2.0, 3.0]) | st.floats(-20, 20, width=32), min_size=12, max_size=12
    ),
    CUT,
    st.sampled_from(WAYS),
    st.integers(0, 2**31),
)
def test_draws_what_the_reference_draws(
    row: list[float], cut: tuple[float, int, float, float], way: tuple[int, int], seed: int
) -> None:
    assume(max(row) > -INF)
    logits = torch.tensor([row, row[::-1]], device=DEVICE)
    columns, seeds, streams = parameters([cut, cut], seed)
    ours, best = choose_by(
        logits, tuple(columns), seeds, streams, purpose=3, truncated=True, sub_block=way[0], capacity=way[1]
    )
    expected, top = reference.choose(
        reference, logits, *columns[:4], seeds, streams, columns[4], purpose=3, truncated=True
    )
    assert equal(best, top)
    near = close_to_another(logits, columns, seeds, streams, expected)
    assert equal(ours[~near], expected[~near])


@pytest.mark.parametrize("racers", [1024, 12, 1])
@pytest.mark.parametrize("truncated", [True, False])
def test_rows_of_many_chunks(truncated: bool, racers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows, cut rows and whole rows in one batch, in rows that do not follow each other closely; a program a
    chunk, or a few of them a program."""
    monkeypatch.setattr(purestep.kernels.triton.choose, "RACERS", racers)
    logits = (torch.randn(6, 9007, generator=torch.Generator().manual_seed(1)) * 4).to(DEVICE)[:, :9003]
    cuts = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.8, 50, 0.95, 0.0),
        (1.3, 3, 1.0, 0.1),
        (0.5, 0, 0.9, 0.0),
    ]
    columns, seeds, streams = parameters([*cuts, (2.0, 0, 1.0, 0.2)], 5)
    ours, best = OURS.choose(
        OURS, logits, *columns[:4], seeds, streams, columns[4], purpose=0, truncated=truncated
    )
    expected, top = reference.choose(
        reference, logits, *columns[:4], seeds, streams, columns[4], purpose=0, truncated=truncated
    )
    assert equal(ours, expected) and equal(best, top)


def test_rows_without_a_distribution_do_not_spoil_their_neighbours() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    columns, seeds, streams = parameters([(0.8, 50, 0.95, 0.0)] * 4, 6)
    clean, _ = OURS.choose(OURS, logits, *columns[:4], seeds, streams, columns[4], purpose=0, truncated=True)
    logits[0, 7], logits[1, 9], logits[3] = NAN, INF, -INF
    spoilt, best = OURS.choose(
        OURS, logits, *columns[:4], seeds, streams, columns[4], purpose=0, truncated=True
    )
    assert spoilt[2] == clean[2]
    assert best.tolist()[:2] == [7, 9]
    none = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    _, _, bad = judge(OURS, logits, best, logits, spoilt, none[:, None], none, none, none)
    assert bad.tolist() == [True, True, False, True]


@few(20)
@given(st.integers(0, 2**31))
def test_judges_as_the_reference_does(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(torch.int32).to(DEVICE)

    logits = torch.randn(5, 9, generator=generator).to(DEVICE)
    logits[0, 3], logits[1, 2] = NAN, INF
    processed = torch.where(integers(0, 3, 5, 9) == 0, -INF, logits)
    best, tokens = reference.greedy(logits), integers(0, 9, 5).to(torch.int64)
    table = integers(-1, 9, 5, 14)
    rules = (table[:, 4:12], integers(0, 9, 5), integers(0, 5, 5), integers(0, 5, 5))
    for ours, expected in zip(
        judge(OURS, logits, best, processed, tokens, *rules),
        reference.judge(reference, logits, best, processed, tokens, *rules),
        strict=True,
    ):
        assert equal(ours, expected)


def test_a_part_that_was_replaced_is_used() -> None:
    logits = torch.randn(2, 30, device=DEVICE)
    columns, seeds, streams = parameters([(1.0, 5, 1.0, 0.0)] * 2, 0)
    kernels = replace(OURS, draw=lambda logits, noise: logits.argmin(-1))
    ours, _ = kernels.choose(
        kernels, logits, *columns[:4], seeds, streams, columns[4], purpose=0, truncated=False
    )
    assert equal(ours, logits.argmin(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("reqs", [1, 8, 64, 256])
def test_vocabularies_of_models(reqs: int) -> None:
    logits = torch.randn(reqs, 128256, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3)) * 2
    columns, seeds, streams = parameters([(0.8, 50, 0.95, 0.0)] * reqs, 7)
    ours, best = OURS.choose(
        OURS, logits, *columns[:4], seeds, streams, columns[4], purpose=0, truncated=True
    )
    expected, top = reference.choose(
        reference, logits, *columns[:4], seeds, streams, columns[4], purpose=0, truncated=True
    )
    near = close_to_another(logits, columns, seeds, streams, expected)
    assert near.sum() <= max(reqs // 50, 1)
    assert equal(best, top) and equal(ours[~near], expected[~near])
