"""Outputs on the host, and the empty ones that upstream's protocol asks for."""

import attrs
import numpy as np
import pytest

from purestep.pure.records.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    KVConnectorOutput,
    LogprobsLists,
    make_empty_encoder_model_runner_output,
    with_kv_conn_output_only,
)


@pytest.mark.parametrize(("cumulative", "index", "expected"), [(None, 2, [2, 3]), ((0, 3, 4, 6), 1, [3, 4])])
def test_rows_of_a_request(cumulative: tuple[int, ...] | None, index: int, expected: list[int]) -> None:
    """From its own index, or from where its rows start if requests own several."""
    lists = LogprobsLists(np.arange(12).reshape(6, 2), np.zeros((6, 2)), np.arange(6), cumulative)
    part = lists.slice_request(index, 2)
    assert part.sampled_token_ranks.tolist() == expected
    assert part.logprob_token_ids[:, 0].tolist() == [2 * row for row in expected]
    assert part.logprobs.shape == (2, 2)
    assert part.cu_num_generated_tokens is None


def test_an_encoders_stub_has_a_literal_zero_for_everybody() -> None:
    """As upstream sends it; with nothing scheduled, the one empty output."""
    output = make_empty_encoder_model_runner_output({"b": 3, "a": 1})
    assert output.req_ids == ("b", "a")
    assert output.req_id_to_index == {"b": 0, "a": 1}
    assert output.sampled_token_ids == ((0,), (0,))
    assert output.pooler_output == (None, None)
    assert make_empty_encoder_model_runner_output({}) is EMPTY_MODEL_RUNNER_OUTPUT


def test_a_connectors_report_alone() -> None:
    """The empty output carries it; where there is nothing to report it stays itself."""
    assert with_kv_conn_output_only(None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert with_kv_conn_output_only(KVConnectorOutput(expected_finished_count=3)) is EMPTY_MODEL_RUNNER_OUTPUT
    report = KVConnectorOutput(finished_sending=frozenset({"a"}))
    output = with_kv_conn_output_only(report)
    assert output.kv_connector_output is report
    assert output.req_ids == () and EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output is None


@pytest.mark.parametrize(
    "name", [f.name for f in attrs.fields(KVConnectorOutput) if f.name != "expected_finished_count"]
)
def test_anything_but_the_expected_count_is_a_report(name: str) -> None:
    """Each field alone makes the output one that must be sent."""
    value = {"a": 1} if name.startswith("kv_") else frozenset({1 if name == "invalid_block_ids" else "a"})
    assert not KVConnectorOutput(**{name: value}).is_empty()
    assert KVConnectorOutput().is_empty()
