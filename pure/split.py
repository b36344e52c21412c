"""A batch as decodes and then prefills, for attention back ends that treat them apart."""

import numpy as np
from jaxtyping import Bool, Int

from purestep.pure.record import record


@record(static=True)
class DecodePrefillSplit:
    """How many requests at the front are decodes, how many behind them are prefills, and their query tokens."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    query_start_loc: Int[np.ndarray, " reqs+1"],
    *,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    is_prefilling: Bool[np.ndarray, " reqs"] | None = None,
) -> DecodePrefillSplit:
    """The split at the first request that is no decode; the batch is in that order already.

    A decode runs at most `decode_threshold` query tokens. `require_uniform` asks more: as many tokens as the first
    request, and a batch in which all do, but for empty ones of padding, is all decodes. Otherwise `is_prefilling`,
    where given, makes short extensions of an unfinished prompt prefills too.

    Source: vllm/v1/attention/backends/utils.py split_decodes_and_prefills.
    """
    lengths = np.diff(query_start_loc)
    is_prefill = lengths > decode_threshold
    is_uniform = require_uniform and not is_prefill[:1].any()
    if is_uniform:
        is_prefill = lengths != lengths[:1]
    if is_uniform and not (is_prefill & (lengths != 0)).any():
        is_prefill = np.zeros_like(is_prefill)
    elif is_prefilling is not None:
        is_prefill = is_prefill | is_prefilling
    num_reqs, num_tokens = len(lengths), int(query_start_loc[-1])
    first = int(np.argmax(is_prefill)) if is_prefill.any() else num_reqs
    num_decode_tokens = int(query_start_loc[first])
    return DecodePrefillSplit(first, num_reqs - first, num_decode_tokens, num_tokens - num_decode_tokens)
