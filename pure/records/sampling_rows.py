"""Sampling parameters on the device: one packed row per request, and sparse constraints."""

import numpy as np
from jaxtyping import Float, Float32, Int, Int32
from torch import Tensor

from purestep.kernels.record import record
from purestep.pure.arrays import Array
from purestep.pure.records.sampling_params import LOGPROBS_MODES, SamplingParams, normalize

MAX_STOP_IDS = 8
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
INTS = (
    "top_k",
    "seed_low",
    "seed_high",
    "stream_low",
    "stream_high",
    "min_tokens",
    "num_stop_ids",  # of the ids behind: these end the row; the rest is only banned until min_tokens
    "logprobs_mode",  # index into LOGPROBS_MODES
)
NUM_FLOATS = len(FLOATS)
NUM_WORDS = NUM_FLOATS + len(INTS) + MAX_STOP_IDS  # of a packed row


@record
class TokenConstraints:
    """Sparse rules on tokens; the first member of each pair names the row, so that any batch order can use them."""

    bias_row: Int32[Array, " biases"]
    bias_ids: Int32[Array, " biases"]
    bias_values: Float32[Array, " biases"]
    allowed_row: Int32[Array, " allowed"]  # a row named here may only use the ids listed for it
    allowed_ids: Int32[Array, " allowed"]
    words_row: Int32[Array, " words"]
    words: Int32[Array, "words length"]  # token ids of a bad word, -1 behind its end
    stop_row: Int32[Array, " stops"]  # ids banned until min_tokens that do not fit a sampling row
    stop_ids: Int32[Array, " stops"]


@record
class SamplingRows:
    """By row: FLOATS; and in `table` INTS, then the ids banned until min_tokens, padded with -1."""

    floats: Float32[Tensor, "rows floats"]
    table: Int32[Tensor, "rows columns"]
    constraints: TokenConstraints | None = None


@record
class BatchParams:
    """Sampling parameters and lengths of the batch's rows, in the order of the batch.

    Where drafts are verified a request has 1 + drafts entries, one behind the other, and the drafts before each count
    as tokens.
    """

    floats: Float[Tensor, "logits floats"]  # FLOATS
    ints: Int[Tensor, "logits ints"]  # INTS
    banned_ids: Int[Tensor, "logits ids"]  # until min_tokens; the first num_stop_ids of them stop the row
    num_known_tokens: Int[Tensor, " logits"]
    num_output_tokens: Int[Tensor, " logits"]
    drafts: Int[Tensor, "reqs drafts"] | None = None  # those that are verified, -1 behind a request's last

    @property
    def num_places(self) -> int:
        """Entries of each request."""
        return 1 if self.drafts is None else 1 + self.drafts.shape[1]

    @property
    def words(self) -> tuple[Tensor, Tensor]:
        """Low and high words of seeds and of streams, [logits, 2] each."""
        seed, stream = INTS.index("seed_low"), INTS.index("stream_low")
        return self.ints[:, seed : seed + 2], self.ints[:, stream : stream + 2]

    def __getitem__(self, name: str) -> Tensor:
        """One parameter of all requests."""
        return self.floats[:, FLOATS.index(name)] if name in FLOATS else self.ints[:, INTS.index(name)]


def split64(value: int) -> tuple[int, int]:
    """The low and high halves of a 64-bit integer, as int32 bit patterns."""
    low, high = np.array([value & 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.int32).tolist()
    return low, high


def stop_ids_of(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The ids banned until min_tokens, and how many of them, from the front, also end the request."""
    stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids + eos_token_ids
    stops = tuple(dict.fromkeys(stops))
    return stops + tuple(i for i in eos_token_ids if i not in stops), len(stops)


def packed_row(
    params: SamplingParams, *, seed: int, stream: int, eos_token_ids: tuple[int, ...]
) -> list[int]:
    """A request's sampling row as int32 words: NUM_FLOATS of them are the bits of floats."""
    params = normalize(params)
    floats = [params.temperature, params.top_p, params.min_p]
    floats += [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
    ids, num_stop_ids = stop_ids_of(params, eos_token_ids)
    ids = ids[:MAX_STOP_IDS]
    row: list[int] = np.asarray(floats, np.float32).view(np.int32).tolist()
    row += [max(params.top_k, 0), *split64(seed), *split64(stream), params.min_tokens]
    row += [min(num_stop_ids, MAX_STOP_IDS), LOGPROBS_MODES.index(params.logprobs_mode)]
    return row + list(ids) + [-1] * (MAX_STOP_IDS - len(ids))
