"""Log-probabilities of a prompt: its chunks make up one table, and no row of it was not computed."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference import compositions, reference
from purestep.kernels.types import Kernels
from purestep.pure.models.model import Piece
from purestep.pure.prompt_logprobs import (
    PromptChunk,
    PromptScores,
    prompt_chunks,
    prompt_table,
    score_prompt,
)
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.outputs import LogprobsTensors
from purestep.pure.records.params import Params
from purestep.pure.update import update_states
from tests.bugs.tiny_engine import MODEL
from tests.laws import assert_pure
from tests.profiles import examples
from tests.tiny import GREEDY, cached_requests, new_request, scheduled, settled

LIMITS = BatchLimits(3, 32, 20, (4,), (32,))


def scores(first_row: int, values: list[float]) -> PromptScores:
    """Rows with these log-probabilities, and tokens and ranks told by them."""
    column = np.array(values, np.float32)
    ids = np.stack([column, column + 1], 1).astype(np.int32)
    return PromptScores(
        first_row, LogprobsTensors(ids, np.stack([column, column], 1), column.astype(np.int32))
    )


@examples(0.3)
@given(st.data())
def test_chunks_score_every_prompt_token_but_the_first_once(data: st.DataObject) -> None:
    """In whatever chunks the prompt is run; the last chunk is the one with which it is all computed."""
    prompt = tuple(data.draw(st.lists(st.integers(0, 19), min_size=1, max_size=12)))
    computed = data.draw(st.integers(0, len(prompt) - 1))
    params = replace(GREEDY, prompt_logprobs=data.draw(st.sampled_from([0, 3, -1])))
    blocks = (tuple(range(1, 5)),)
    batch, found, start = InputBatch.make_empty(LIMITS), [], computed
    while start < len(prompt):
        count = data.draw(st.integers(1, len(prompt) - start))
        if start == computed:
            new = (
                new_request("other", (1, 2, 3), ((9, 10, 11, 12),)),
                new_request("r", prompt, blocks, params, num_computed_tokens=computed),
            )
            output = scheduled(*new, counts={"other": 3, "r": count})
        else:
            cached = cached_requests(batch, "other", "r")
            output = scheduled(cached=cached, counts={"other": 1, "r": count})
        batch = update_states(batch, output)
        (chunk,) = assert_pure(prompt_chunks, batch, {"r": ()})
        assert chunk.index == 1
        assert chunk.num_rows == len(prompt) - 1
        assert chunk.num_logprobs == (20 if params.prompt_logprobs == -1 else params.prompt_logprobs)
        found.append(chunk)
        batch, start = settled(batch), start + count
    assert [chunk.is_last for chunk in found] == [False] * (len(found) - 1) + [True]
    assert [token for chunk in found for token in chunk.targets] == list(prompt[computed + 1 :])
    rows = [chunk.first_row + i for chunk in found for i in range(len(chunk.targets))]
    assert rows == list(range(computed, len(prompt) - 1))
    assert prompt_chunks(batch, {"nobody": ()}) == ()


def other_head(
    piece: Piece, weights: Tensor, carried: tuple[Tensor, ...], inputs: object, *, kernels: Kernels
) -> tuple[Tensor, ...]:
    """A head that is more than a weight."""
    return (kernels.logits(kernels, carried[0], weights) * 2,)


@pytest.mark.parametrize("kind", ["a weight", "another", "none"])
@pytest.mark.parametrize("most", [3, 512])
def test_a_score_is_the_log_probability_of_the_token_that_follows(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever makes logits of hidden states, and of however many rows they may be there at once."""
    monkeypatch.setattr(compositions, "MAX_SCORED_ROWS", most)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (4, 9))
    logits = hidden @ weight.T
    if kind == "a weight":
        model = MODEL
    elif kind == "another":
        model = replace(MODEL, head=Piece("head", other_head, path=("embed",)))
        logits = logits * 2
    else:
        model, hidden = replace(MODEL, head=None), logits
    params, targets = Params({"embed": weight}), torch.tensor([3, 0, 8, 3], dtype=torch.int32)
    how: dict[str, Any] = {"num_logprobs": 2, "kernels": reference}
    rows = assert_pure(score_prompt, model, params, hidden, targets, **how)
    expected = logits.log_softmax(-1)
    own = expected[torch.arange(4), targets.long()]
    torch.testing.assert_close(rows.logprobs[:, 0], own, rtol=0, atol=1e-14)  # another order of the same sum
    assert torch.equal(rows.logprob_token_ids[:, 1], expected.argmax(-1).int())


def test_a_row_that_nobody_computed_is_absent_and_the_later_of_two_counts() -> None:
    """Ids -1, NaN, rank 0: never a number that was not computed."""
    parts = [scores(2, [5.0, 6.0]), scores(3, [7.0, 8.0]), scores(6, [])]
    table = assert_pure(prompt_table, parts, num_rows=6, num_logprobs=1)
    assert table.logprob_token_ids.tolist() == [[-1, -1]] * 2 + [[5, 6], [7, 8], [8, 9]] + [[-1, -1]]
    assert table.selected_token_ranks.tolist() == [0, 0, 5, 7, 8, 0]
    assert np.isnan(table.logprobs).all(1).tolist() == [True, True, False, False, False, True]
    assert prompt_table([], num_rows=0, num_logprobs=4).logprobs.shape == (0, 5)


def test_a_chunk_is_a_plain_value() -> None:
    assert PromptChunk("r", 0, 0, (1,), 1, 1, True) == PromptChunk("r", 0, 0, (1,), 1, 1, True)
