"""Drafts out of a request's own past: on the device beside the step, or on the host between steps."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from purestep.kernels.types import Kernels
from purestep.pure.errors import DrafterError
from purestep.pure.records.drafter import Drafter, Drafts, Histories, HostDrafter, Proposal, is_count
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.state import ExecuteModelState, StepState


def ngram(*, num_drafts: int, min_n: int, max_n: int) -> Drafter:
    """A drafter on the device: what followed when a request last said the same n words, for the largest n that it did.

    n is tried from max_n down to min_n; of several places the earliest counts.

    Raises:
        DrafterError: numbers that ask for nothing.
    Source: vllm/v1/spec_decode/ngram_proposer_gpu.py.
    """
    _check(num_drafts, min_n, max_n)
    return Drafter(num_drafts, partial(propose_on_device, num_drafts=num_drafts, min_n=min_n, max_n=max_n))


def ngram_on_host(*, num_drafts: int, min_n: int, max_n: int) -> HostDrafter:
    """The same between steps: it needs each step's tokens on the host before the next one is planned.

    Raises:
        DrafterError: as `ngram`.
    Source: vllm/v1/spec_decode/ngram_proposer.py.
    """
    _check(num_drafts, min_n, max_n)
    return HostDrafter(num_drafts, partial(propose_on_host, min_n=min_n, max_n=max_n))


def propose_on_device(
    params: Params,
    executed: ExecuteModelState,
    state: StepState,
    output: StepOutput,
    *,
    kernels: Kernels,
    num_drafts: int,
    min_n: int,
    max_n: int,
) -> Proposal:
    """Drafts out of the tapes, as long as they are after the step."""
    rows, bounds = state.layout.row_of_index, state.layout.bounds
    # A bound for shapes: who has computed its history knows nothing behind what this step could bring. The prompt of
    # others may be longer; they get no drafts, whatever is found here.
    longest = min(bounds.max_seq_len + bounds.num_drafts + 1, state.token_ids.shape[1])
    lengths = state.ledger.num_known_tokens.index_select(0, rows).clamp(max=longest)
    drafts = kernels.propose_ngram(
        state.token_ids[:, :longest],
        rows,
        lengths,
        (lengths * 0 + num_drafts),
        min_n=min_n,
        max_n=max_n,
        num_drafts=num_drafts,
    )
    return Proposal(drafts)


def propose_on_host(
    kept: None, histories: Histories, budgets: Sequence[int], *, min_n: int, max_n: int
) -> tuple[None, Drafts]:
    """Drafts out of histories, each an array or a list of token ids; O(length * max_n) for each."""
    pairs = zip(histories, budgets, strict=True)
    return None, tuple(ngram_drafts(np.asarray(history), budget, min_n, max_n) for history, budget in pairs)


def ngram_drafts(history: np.ndarray, most: int, min_n: int, max_n: int) -> tuple[int, ...]:
    """At most `most` tokens behind the earliest earlier occurrence of the longest ending of `history`."""
    length = len(history)
    if most <= 0 or length < 2:
        return ()
    ends = np.arange(1, length)  # of an occurrence, exclusive
    found = 0
    for back in range(1, min(max_n, length - 1) + 1):
        longer = ends[ends >= back]
        longer = longer[history[longer - back] == history[length - back]]
        if not len(longer):
            break
        ends, found = longer, back
    if found < min_n:
        return ()
    return tuple(history[ends[0] : ends[0] + most].tolist())


def _check(num_drafts: int, min_n: int, max_n: int) -> None:
    if not all(map(is_count, (num_drafts, min_n, max_n))) or min_n > max_n:
        raise DrafterError(
            f"n-gram drafts with num_drafts={num_drafts!r}, min_n={min_n!r} and max_n={max_n!r}: whole numbers of at "
            "least 1 are needed, and min_n <= max_n"
        )
