"""Reading log-probabilities of chosen and of likely tokens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference.logprobs import gather_ids, gather_logprobs, lowered, score

VOCAB = 6
ROW = st.lists(st.sampled_from([-3.0, -2.0, -1.0, 0.0]), min_size=VOCAB, max_size=VOCAB)
ROWS = st.lists(st.tuples(ROW, st.integers(0, VOCAB - 1)), min_size=1, max_size=4)


@given(ROWS, st.integers(0, VOCAB + 1))
def test_chosen_then_largest(rows: list[tuple[list[float], int]], num_logprobs: int) -> None:
    """Column 0 is the chosen token, then the largest, equal ones by id; ranks count what is as likely."""
    logprobs, chosen = torch.tensor([row for row, _ in rows]), torch.tensor([token for _, token in rows])
    ids, values, ranks = gather_logprobs(logprobs, chosen, num_logprobs)
    for (row, token), our_ids, our_values, rank in zip(rows, ids, values, ranks, strict=True):
        largest = sorted(range(VOCAB), key=lambda v: (-row[v], v))[:num_logprobs]
        assert our_ids.tolist() == [token, *largest]
        assert our_values.tolist() == [row[v] for v in [token, *largest]]
        assert int(rank) == sum(value >= row[token] for value in row)
    assert (ids.dtype, ranks.dtype) == (torch.int32, torch.int64)


@given(ROWS, st.integers(0, VOCAB), st.integers(0, VOCAB))
def test_fewer_are_a_prefix_of_more(rows: list[tuple[list[float], int]], a: int, b: int) -> None:
    """A batch may gather for the request that wants most: the others find theirs in front, ties or not."""
    logprobs, chosen = torch.tensor([row for row, _ in rows]), torch.tensor([token for _, token in rows])
    few, many = (gather_logprobs(logprobs, chosen, n) for n in sorted((a, b)))
    width = few[0].shape[1]
    assert torch.equal(many[0][:, :width], few[0])
    assert torch.equal(many[1][:, :width], few[1])


@given(ROWS, st.lists(st.integers(-1, VOCAB - 1), min_size=4, max_size=4))
def test_named_ids(rows: list[tuple[list[float], int]], ids: list[int]) -> None:
    """Values at the ids asked for; padding reads -inf."""
    logprobs = torch.tensor([row for row, _ in rows])
    ours = gather_ids(logprobs, torch.tensor(ids).expand(len(rows), -1))
    assert ours.tolist() == [[row[v] if v >= 0 else -float("inf") for v in ids] for row, _ in rows]


@given(st.lists(st.floats(-80, 80) | st.just(-float("inf")), min_size=1, max_size=VOCAB), st.data())
def test_scores_are_log_probabilities_of_the_same_tokens(row: list[float], data: st.DataObject) -> None:
    logits = torch.tensor([row], dtype=torch.float64)
    chosen, n = torch.tensor([data.draw(st.integers(0, len(row) - 1))]), data.draw(st.integers(0, len(row)))
    ids, logprobs, ranks, by = score(logits, chosen, n)
    of_logits = gather_logprobs(logits, chosen, n)
    assert torch.equal(ids, of_logits[0]) and torch.equal(ranks, of_logits[2])
    if max(row) > -float("inf"):
        expected = logits.log_softmax(-1)[0, ids[0].long()]
        assert torch.allclose(logprobs[0], expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(lowered(of_logits[1], by), logprobs)
    else:
        assert logprobs.isnan().all()


def test_ties_of_a_large_vocabulary_are_ordered() -> None:
    """A thousand equal values come by ascending id."""
    ids, _, _ = gather_logprobs(torch.zeros(2, 1000), torch.tensor([7, 999]), 500)
    assert ids.tolist() == [[7, *range(500)], [999, *range(500)]]
