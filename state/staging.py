"""A plan on its way to the device: one copy, and none for an empty one."""

import torch

from purestep.pure.record import replace
from purestep.pure.records.plan import Inbox


def stage(inbox: Inbox, device: torch.device) -> Inbox:
    """The inbox with tensors on `device`. To a GPU it goes through pinned memory, without waiting for the device.

    The pinned buffer is a fresh one: torch keeps it from reuse until the copy has passed, so the host may write the
    next plan at once.
    """
    if device.type != "cuda":
        return inbox.to(device)
    pinned = torch.empty(inbox.data.shape, dtype=torch.int32, pin_memory=True)
    pinned.numpy()[:] = inbox.data
    words = pinned.to(device, non_blocking=True)
    constraints = inbox.to(device).constraints if inbox.constraints is not None else None
    return replace(inbox, data=words, constraints=constraints)
