"""What the host says on its way to the device: one copy, and none for an empty plan."""

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from purestep.pure.record import replace
from purestep.pure.records.plan import Inbox


def stage(inbox: Inbox, device: torch.device) -> Inbox:
    """The inbox with tensors on `device`. Its words and floats are the same bits, and go up once."""
    if device.type != "cuda":
        return inbox.to(device)
    constraints = inbox.to(device).constraints if inbox.constraints is not None else None
    words = upload(inbox.data, device)
    floats = None if inbox.floats is None else words.view(torch.float32)
    return replace(inbox, data=words, constraints=constraints, floats=floats)


def upload(words: Int32[np.ndarray, "..."], device: torch.device) -> Int32[Tensor, "..."]:
    """A copy of the words on `device`. To a GPU they go through pinned memory, without waiting for the device.

    The pinned buffer is a fresh one: torch keeps it from reuse until the copy has passed, so the host may write the
    next words at once.
    """
    if device.type != "cuda":
        return torch.from_numpy(words.copy()).to(device)
    pinned = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
    pinned.numpy()[:] = words
    return pinned.to(device, non_blocking=True)
