"""A step's output as upstream's scheduler takes it."""

import numpy as np
import pytest

from purestep.pure.model_runner_output import model_runner_output
from purestep.pure.record import replace
from purestep.pure.records.outputs import KeptMass, KVConnectorOutput, LogprobsTensors
from tests.laws import assert_pure
from tests.tiny import column, host_output


def test_every_request_has_a_list_that_the_caller_may_cut_and_padding_has_none() -> None:
    """Who kept nothing has an empty one, and is named if it never will."""
    output = replace(host_output([4, -1, -1, 9], [1, 1, 1, 1]), has_nan=np.array([False, True, False, True]))
    report = KVConnectorOutput(finished_sending=frozenset({"x"}))
    result = assert_pure(
        model_runner_output, ("a", "b", "c"), output, kv_connector_output=report, routed_experts="some"
    )
    assert result.req_ids == ("a", "b", "c")
    assert result.req_id_to_index == {"a": 0, "b": 1, "c": 2}
    assert result.sampled_token_ids == [[4], [], []]
    assert result.num_nans_in_logits == {"b": 1}
    assert result.kv_connector_output is report and result.routed_experts == "some"
    assert result.logprobs is None and result.prompt_logprobs_dict == {}


def test_log_probabilities_have_a_row_for_every_request() -> None:
    """Kept or not, as upstream; what lies behind the requests is padding."""
    tensors = LogprobsTensors(np.arange(8, dtype=np.int32).reshape(4, 2), np.ones((4, 2)), column(1, 2, 3, 4))
    output = replace(host_output([4, -1, 2, -1], [1, 1, 1, 1]), logprobs_tensors=tensors)
    logprobs = model_runner_output(("a", "b", "c"), output).logprobs
    assert logprobs is not None
    assert logprobs.sampled_token_ranks.tolist() == [1, 2, 3]
    assert logprobs.slice_request(2, 1).logprob_token_ids.tolist() == [[4, 5]]


@pytest.mark.parametrize("width", [1, 2])
def test_chosen_ids_and_kept_mass_have_the_rows_of_log_probabilities(width: int) -> None:
    """One for every request; where drafts were verified, one for every kept token."""
    tokens = np.array([[4, 5], [-1, -1], [6, -1], [7, 7]], np.int32)[:, :width]
    output = replace(
        host_output([4, -1, 6, 7], [1, 1, 1, 1]),
        sampled_token_ids=tokens,
        id_logprobs=np.arange(8 * width, dtype=np.float32).reshape(-1, 2),
        kept_mass=KeptMass(*np.arange(8 * width, dtype=np.float32).reshape(2, -1)),
    )
    result = assert_pure(model_runner_output, ("a", "b", "c"), output)
    rows = [0, 1, 2] if width == 1 else [0, 1, 4]
    assert result.id_logprobs is not None and result.kept_mass is not None and result.logprobs is None
    assert result.id_logprobs[:, 0].tolist() == [2 * row for row in rows]
    assert result.kept_mass.drawn_logprobs.tolist() == rows
    assert result.kept_mass.log_mass.tolist() == [4 * width + row for row in rows]
