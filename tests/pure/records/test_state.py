"""The ledger's columns have names."""

import torch

from purestep.pure.records.state import LEDGER_COLUMNS, NUM_HOST_COLUMNS, Ledger


def test_columns_are_read_by_name() -> None:
    """Each name reads its own row of the table; flags are read as such."""
    table = torch.arange(len(LEDGER_COLUMNS) * 3, dtype=torch.int32).view(len(LEDGER_COLUMNS), 3)
    ledger = Ledger(table)
    for index, name in enumerate(LEDGER_COLUMNS):
        column = getattr(ledger, name)
        expected = table[index] > 0 if name in ("active", "has_nan") else table[index]
        assert torch.equal(column, expected), name


def test_the_host_writes_every_column_but_the_counter_of_steps() -> None:
    """Which is the last one."""
    assert LEDGER_COLUMNS[NUM_HOST_COLUMNS:] == ("step",)
