"""What the engine gives back."""

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.results import SampleLogprobs
from tests.state.test_engine import PROMPTS, engine


@pytest.mark.parametrize(("logprobs", "candidates"), [(0, 1), (3, 4), (-1, 65)])
def test_log_probabilities_have_a_row_a_token_and_the_sampled_token_first(
    logprobs: int, candidates: int
) -> None:
    """Then as many as were asked for, or the whole vocabulary."""
    with engine() as own:
        result = own.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3, logprobs=logprobs))[0]
    found = result.logprobs
    assert found is not None
    assert found.token_ids.shape == found.logprobs.shape == (3, candidates) and found.ranks.shape == (3,)
    assert tuple(found.token_ids[:, 0]) == result.token_ids
    assert (found.logprobs[:, 1:] <= found.logprobs[:, :1]).all()


def test_columns_of_unequal_length_are_no_log_probabilities() -> None:
    """In tests, as for every record."""
    ids, values = np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)
    SampleLogprobs(ids, values, np.zeros(3, np.int32))
    for wrong in ((ids, values[:, :1]), (ids[:2], values), (ids, values.astype(np.float64))):
        with pytest.raises(TypeCheckError):
            SampleLogprobs(*wrong, np.zeros(3, np.int32))
