"""What the scheduler knows: requests that wait, requests that run, and the blocks they hold.

Running requests are columns in the order in which they are served, so that a steady step costs a few additions. What
concerns one request alone is a cold record, replaced when the request comes, leaves or grows.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32, Int64

from purestep.kernels.record import record
from purestep.pure.arrays import Tape
from purestep.pure.persistent import Map
from purestep.pure.records.block_pool import BlockPool
from purestep.pure.records.sampling_params import SamplingParams

Blocks = tuple[Int32[np.ndarray, " _blocks"], ...]  # ids, per KV group
FinishReason = Literal["stop", "length", "abort", "error"]


@record(static=True)
class SchedulerConfig:
    """Limits of a scheduler. The number of blocks includes the null block."""

    num_blocks: tuple[int, ...]  # per KV group
    block_sizes: tuple[int, ...]  # per KV group
    max_num_reqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    block_horizon: int = (
        1  # tokens that a row is given blocks for when it needs any; 1: no more than it needs
    )
    long_prefill_token_threshold: int | None = None  # tokens of one request in one step at most
    async_scheduling: bool = False  # whether a step may be scheduled before the last one's tokens are known
    num_spec_tokens: int = 0  # drafts of one request that a step verifies at most
    drafts_on_device: bool = False  # they are made there; else the scheduler is told of them

    @property
    def capacity(self) -> int:
        """Tokens that the cache holds if one request has it all."""
        return min((n - 1) * size for n, size in zip(self.num_blocks, self.block_sizes, strict=True))


@record(static=True)
class Request:
    """What a caller asks for. Among the waiting the lowest priority is served first, then the earliest arrival."""

    req_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    priority: int = 0
    arrival: int = 0
    stream: int = 0  # names its random stream where its parameters do not
    salt: str | None = None  # requests share cached blocks only with those of the same salt
    adapter: Any = None  # likewise; its repr tells adapters apart
    eos_token_ids: tuple[int, ...] = ()
    fork_of: str | None = None  # a request with the same prompt, whose blocks it shares


@record(static=True)
class Finished:
    """A request that is done."""

    req_id: str
    reason: FinishReason
    stop_reason: int | str | None  # the stop id; None for end-of-sequence ids
    token_ids: tuple[int, ...]  # its outputs
    num_cached_tokens: int  # of the prompt, not computed because the cache or the forked request had them
    num_preemptions: int


@record
class RequestState:
    """A live request. `ticket` tells apart two lives of one id; `tokens` are complete while the request waits."""

    request: Request
    ticket: int
    tokens: Tape  # prompt and outputs, as far as they are not in the log
    parent: int | None  # ticket of the request it was forked from
    num_cached_tokens: int | None = None  # None: never ran
    num_preemptions: int = 0
    num_in_flight: int = 0  # steps of its last run whose output is still on its way, while it waits
    chain: tuple[bytes, tuple[tuple[bytes, ...], ...]] | None = None  # root key, and block keys per KV group


@record
class Residence:
    """What a request holds while it runs."""

    slot: int  # its place in every line of the log
    log_start: int  # the log's first line about it
    blocks: tuple[Tape, ...]  # per KV group
    num_borrowed: tuple[int, ...]  # per KV group: leading blocks that others computed
    num_offered: int  # tokens whose blocks the prefix cache has been offered
    may_offer: bool  # False: its blocks mix versions of the parameters
    sources: tuple[int | None, ...] = ()  # per KV group: held, to be copied into the next block that it gets


@record
class RunningFacts:
    """Columns that stay the same while a request runs."""

    ticket: Int64[np.ndarray, " rows"]
    slot: Int32[np.ndarray, " rows"]
    num_prompt: Int32[np.ndarray, " rows"]
    length_limit: Int32[np.ndarray, " rows"]  # tokens at which it ends
    min_length: Int32[np.ndarray, " rows"]  # tokens below which no stop id counts


@record
class RunningCounts:
    """Columns that steps change. settled <= truth on the device <= computed, known <= all."""

    num_tokens: Int32[
        np.ndarray, " rows"
    ]  # with those on their way from the device, if all drafts are accepted
    num_known: Int32[np.ndarray, " rows"]
    num_computed: Int32[np.ndarray, " rows"]  # with those that steps on their way compute
    num_settled: Int32[np.ndarray, " rows"]  # computed for certain
    num_covered: Int32[np.ndarray, " rows"]  # that its blocks have room for
    next_offer: Int32[np.ndarray, " rows"]  # settled tokens at which the prefix cache is offered blocks
    ran: Bool[np.ndarray, " rows"]  # in the last step that was scheduled


@record
class Running:
    """The requests that have blocks, by priority, arrival and ticket: the last one is preempted first."""

    req_ids: tuple[str, ...]
    states: tuple[RequestState, ...]
    residences: tuple[Residence, ...]
    facts: RunningFacts
    counts: RunningCounts
    stop_rows: Int64[np.ndarray, " stops"]  # pairs of a row and an id that stops it
    stop_ids: Int32[np.ndarray, " stops"]

    def __len__(self) -> int:
        return len(self.req_ids)


@record
class Waiting:
    """The requests that have no blocks."""

    states: Map[int, RequestState]  # by ticket
    line: Any  # Heap of (priority, 0 if preempted else 1, arrival, ticket); tickets may have left
    forks: Mapping[int, tuple[int, ...]] = MappingProxyType({})  # by parent's ticket: not in line yet
    blocked: tuple[int, Any] | None = None  # the first in line, and the pools that could not take it

    def __len__(self) -> int:
        return len(self.states)


@record
class TokenLog:
    """Sampled tokens, a line per step and a place per running request, -1 where there was none.

    A line for all costs one copy, where a list for each would cost a call for each.
    """

    lines: Tape  # laid end to end
    width: int
    free_slots: tuple[int, ...]

    @property
    def num_lines(self) -> int:
        """How many steps it covers."""
        return len(self.lines) // self.width


@record
class StepInFlight:
    """A scheduled step whose output is not known yet, in the order of its batch."""

    req_ids: tuple[str, ...]
    ticket: Int64[np.ndarray, " reqs"]
    num_scheduled: Int32[np.ndarray, " reqs"]  # drafts included
    samples: Bool[
        np.ndarray, " reqs"
    ]  # whether its tokens are kept: one, and one for each draft that is accepted
    num_drafts: Int32[np.ndarray, " reqs"] | None = None  # None: nobody has any
    entry: Int64[np.ndarray, " reqs"] | None = (
        None  # of the output, where forks learn what their parents learn
    )
    num_steps: int = 1  # several: who ends on the way computes and brings fewer tokens than scheduled


@record
class News:
    """What the next SchedulerOutput has to tell, and what the last one told: the same is told by the same objects."""

    req_ids: tuple[str, ...]
    num_scheduled_tokens: Int32[np.ndarray, " reqs"]
    finished_req_ids: frozenset[str] = frozenset()
    preempted_req_ids: frozenset[str] = frozenset()


@record(static=True)
class KVVersion:
    """Which parameters KV is made with. The cache hits where `root` is the same."""

    version: int = 0
    root: tuple[int, int] = (
        0,
        0,
    )  # the version that the cache was last emptied for, and the mixtures by then
    num_mixtures: int = 0  # changes of parameters that kept KV


@record
class Queue:
    """The scheduler's whole state. Make one with `scheduler.make_queue`."""

    config: SchedulerConfig
    running: Running
    waiting: Waiting
    live: Map[str, int]  # ticket of every request that waits or runs
    pools: tuple[BlockPool, ...]  # per KV group
    log: TokenLog
    news: News
    in_flight: tuple[StepInFlight, ...] = ()  # oldest first
    moments: Mapping[Any, Blocks] = MappingProxyType({})  # by name, what each of them holds
    drafts: Mapping[int, tuple[int, ...]] = MappingProxyType({})  # by ticket, for the next step of each
    kv_version: KVVersion = KVVersion()
    next_ticket: int = 0
