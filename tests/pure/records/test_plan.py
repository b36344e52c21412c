"""The inbox: what counts as empty, and the same record on the device."""

import numpy as np
import pytest
import torch

from purestep.pure.arrays import filled
from purestep.pure.record import replace
from purestep.pure.records.layout import LayoutBounds
from purestep.pure.records.plan import Inbox, InboxShape
from purestep.pure.records.sampling_rows import TokenConstraints
from tests.laws import assert_pure, equal

NOTHING = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    "inbox",
    [
        Inbox(NOTHING, InboxShape(), bounds=LayoutBounds()),
        Inbox(NOTHING, InboxShape(), has_constraints=True),
        *(Inbox(NOTHING, shape=InboxShape(**{name: 1})) for name in ("ledger", "sampling", "tokens")),
        *(Inbox(NOTHING, shape=InboxShape(**{name: (0, 1)})) for name in ("blocks", "copies", "zeros")),
        Inbox(NOTHING, shape=InboxShape(layout=0)),
    ],
)
def test_any_part_makes_it_not_empty(inbox: Inbox) -> None:
    """Bounds without words are a part as well, and so is a layout of nobody."""
    assert not inbox.is_empty
    assert Inbox.make_empty().is_empty and Inbox(NOTHING, InboxShape()).is_empty


def test_to_a_device_and_back_to_it() -> None:
    """Tensors with the same numbers; the frozen arrays of the host are copied, not shared."""
    ids = filled(2, 3, np.int32)
    bias, words = filled(2, 0.5, np.float32), filled(2, 3, np.int32)[:, None]
    rules = TokenConstraints(ids, ids, bias, ids, ids, ids, words, ids, ids)
    host = Inbox(filled(4, 7, np.int32), InboxShape(tokens=1), rules, None, True)
    there = assert_pure(Inbox.to, host, "cpu")
    assert there.data.tolist() == [7] * 4
    assert there.constraints is not None
    assert there.constraints.bias_values.tolist() == [0.5, 0.5]
    assert (there.shape, there.bounds, there.has_constraints) == (host.shape, None, True)
    again = there.to("cpu")
    assert torch.equal(again.data, there.data)
    assert equal(replace(again, constraints=None), replace(there, constraints=None))
