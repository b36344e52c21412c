"""A request of a random schedule, from arrival to finish, with the row that it has on a device of plain lists.

Its next token is a function of its id and its history, so that any two schedules of the same requests can be compared.
"""

import zlib
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.sampling_rows import stop_ids_of


def toy_token(req_id: str, history: Sequence[int], vocab_size: int) -> int:
    """What the toy model says next."""
    return zlib.crc32(repr((req_id, tuple(history))).encode()) % vocab_size


@attrs.define(eq=False)
class Life:
    """A request from arrival to finish, as the scheduler sees it, and its row on the device."""

    req_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    limits: BatchLimits
    stream: int
    tokens: list[int]  # prompt and settled outputs
    blocks: list[list[int]]  # per KV group
    computed: int = 0  # after every step begun, if the device does not stop
    settled: int = 0
    known: int = 0  # tokens, those on their way included
    in_batch: bool = False
    has_blocks: bool = False
    is_over: bool = False  # the scheduler knows that it stopped
    admission: int = 0  # another one each time that its row is written anew
    num_unsettled: int = 0
    drafts: tuple[int, ...] = ()  # the host's word on this step's; -1 where the device has its own
    device_tokens: list[int] = attrs.field(factory=list)
    device_computed: int = 0
    device_active: bool = True

    @property
    def limit(self) -> int:
        """Tokens at which it ends."""
        most, budget = self.limits.max_model_len, self.params.max_tokens
        return most if budget is None else min(len(self.prompt) + budget, most)

    def admit(self, computed: int) -> None:
        """Its row is written: the device knows what the scheduler knows for certain."""
        self.admission += 1
        self.in_batch = True
        self.computed = self.settled = self.device_computed = computed
        self.known, self.device_tokens, self.device_active = len(self.tokens), list(self.tokens), True

    def leave(self) -> None:
        """It gives its row up and keeps what is settled."""
        self.in_batch = False
        self.computed, self.known = self.settled, len(self.tokens)

    def run(self, num_tokens: int, next_token: "NextToken", guess: "NextToken") -> tuple[int, ...]:
        """One step on the device: the tokens that are kept. It verifies drafts of its own where it is given none."""
        self.computed += num_tokens
        self.known = max(self.known, self.computed + (self.computed >= self.known))
        self.num_unsettled += 1
        if not self.device_active:
            return ()
        end = self.device_computed + num_tokens - len(self.drafts)
        if end < len(self.device_tokens):
            self.device_computed = end
            return ()
        first, drafts = len(self.device_tokens), list(self.drafts)
        for place, draft in enumerate(drafts):
            drafts[place] = draft if draft >= 0 else guess(self)
        for draft in (*drafts, None):
            token = next_token(self)
            self.device_tokens.append(token)
            stops, num_stops = stop_ids_of(self.params, self.limits.eos_token_ids)
            num_outputs = len(self.device_tokens) - len(self.prompt)
            stopped = token in stops[:num_stops] and num_outputs >= self.params.min_tokens
            self.device_active = not stopped and len(self.device_tokens) < self.limit
            if token != draft or not self.device_active:
                break
        self.device_computed = len(self.device_tokens) - 1
        return tuple(self.device_tokens[first:])


NextToken = Callable[[Life], int]


def toy(life: Life) -> int:
    """A function of a request's id and its history."""
    return toy_token(life.req_id, life.device_tokens, life.limits.vocab_size)


@attrs.frozen
class Begun:
    """A step under way: (life, admission, kept tokens, computed ones, still active, scheduled ones) of each request.

    `width` is 1 more than the drafts that a row may have verified.
    """

    results: tuple[tuple[Life, int, tuple[int, ...], int, bool, int], ...]
    width: int = 1

    def output(self) -> StepOutput:
        """What the host is told, in the order of the batch."""
        _, _, tokens, computed, active, _ = zip(*self.results, strict=True)
        padded = [[*own, *[-1] * (self.width - len(own))] for own in tokens]
        return StepOutput(
            sampled_token_ids=np.array(padded, np.int32),
            num_computed_tokens=np.array(computed, np.int32),
            active=np.array(active, np.bool_),
            has_nan=np.zeros(len(tokens), np.bool_),
        )
