"""What a SchedulerOutput derives from its columns."""

from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.tiny import column


def test_empty_ones() -> None:
    """Nothing is scheduled; finished ids may be told all the same."""
    cached = CachedRequestData.make_empty()
    assert (cached.num_reqs, cached.req_ids, len(cached.num_computed_tokens)) == (0, (), 0)
    output = SchedulerOutput.make_empty(frozenset({"a"}))
    assert output.total_num_scheduled_tokens == 0
    assert output.num_scheduled_tokens_by_id == {}
    assert output.finished_req_ids == {"a"}


def test_counts_by_id_keep_the_order() -> None:
    """Upstream's dict, in the order of the batch."""
    new = NewRequestData("b", (1, 2), SamplingParams(), ((1,),))
    cached = CachedRequestData(("a",), column(4), column(1))
    output = SchedulerOutput((new,), cached, ("b", "a"), column(2, 1))
    assert list(output.num_scheduled_tokens_by_id.items()) == [("b", 2), ("a", 1)]
    assert output.total_num_scheduled_tokens == 3


def test_context_phase() -> None:
    """Known and without output."""
    cached = CachedRequestData(("a", "b"), column(4, 4), column(1, 0))
    assert [cached.is_context_phase(r) for r in ("a", "b", "c")] == [False, True, False]
    assert cached.num_reqs == 2
