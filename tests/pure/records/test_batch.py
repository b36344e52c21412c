"""The batch that knows nobody."""

import attrs

from purestep.pure.records.batch import BatchLimits, Clock, InputBatch

LIMITS = BatchLimits(max_num_reqs=3, max_model_len=8, vocab_size=5, block_sizes=(4, 2), num_blocks=(9, 9))


def test_the_empty_batch() -> None:
    """Every row is free in every column, nothing runs, and arrays are frozen."""
    batch = InputBatch.make_empty(LIMITS)
    assert batch.rows.requests == batch.rows.tokens == (None,) * 3
    assert batch.rows.block_ids == ((None,) * 3,) * 2
    assert (batch.row_of, batch.parked, batch.req_ids) == ({}, {}, ())
    assert batch.layout.bounds.num_reqs == 0
    assert batch.clock == Clock(0, 0)
    for field in attrs.fields(type(batch.columns)):
        column = getattr(batch.columns, field.name)
        assert column.tolist() == [-1 if field.name == "num_logprobs" else 0] * 3
        assert not column.flags.writeable


def test_the_null_row_lies_behind_the_others() -> None:
    """Device tables have one row more than there are requests."""
    assert LIMITS.null_row == LIMITS.max_num_reqs
