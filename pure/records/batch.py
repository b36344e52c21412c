"""The host's record of who is in which row: columns that a steady step shares, cold records that it never touches."""

from types import MappingProxyType

import numpy as np
from jaxtyping import Int32

from purestep.kernels.record import record
from purestep.pure.arrays import Tape, frozen
from purestep.pure.persistent import Column
from purestep.pure.records.layout import Layout
from purestep.pure.records.sampling_params import SamplingParams

NO_DRAFTS = frozen(np.zeros((0, 3), np.int32))
BlockPairs = tuple[tuple[tuple[int, int], ...], ...]  # per KV group: (source, target)


@record(static=True)
class BatchLimits:
    """What a batch can hold. The device tables have one row more than `max_num_reqs`: the null row of padding."""

    max_num_reqs: int
    max_model_len: int
    vocab_size: int
    block_sizes: tuple[int, ...]  # per KV group
    num_blocks: tuple[int, ...]  # per KV group, the null block included
    eos_token_ids: tuple[int, ...] = ()  # the model's
    seed: int = 0  # of requests that bring none
    kernel_block_sizes: tuple[int, ...] = ()  # per KV group, divisors of block_sizes; (): the same
    num_drafts: int = 0  # the most that a row has; 0: nothing is speculated
    # For benchmarks alone: how often the first, the first two, ... drafts are to stand, whatever the model says.
    acceptance_rates: tuple[float, ...] = ()

    @property
    def table_block_sizes(self) -> tuple[int, ...]:
        """Tokens of one entry in the device's block tables, per KV group."""
        return self.kernel_block_sizes or self.block_sizes

    @property
    def num_kernel_blocks(self) -> tuple[int, ...]:
        """Entries of the device's block tables that one block of the scheduler takes, per KV group."""
        sizes = zip(self.block_sizes, self.table_block_sizes, strict=True)
        return tuple([size // kernel_size for size, kernel_size in sizes])

    @property
    def null_row(self) -> int:
        """The row that padded indices name: known length 0, never active."""
        return self.max_num_reqs


@record
class CachedRequestState:
    """What stays the same between admissions of a request. Another object means: the device row is written anew.

    `num_computed_tokens` is that at admission; the present counts are columns of the batch.
    """

    req_id: str
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stream: int
    num_computed_tokens: int


@record
class Fork:
    """A request that was given another one's history: what steps begun by then tell of that, they tell of this too."""

    parent: CachedRequestState
    child: CachedRequestState
    num_begun: int


@record
class Parked:
    """A request that the batch knows but that has no row: preempted, or left out of a step with nothing on its way."""

    request: CachedRequestState
    tokens: Tape
    block_ids: tuple[Tape, ...]
    num_computed_tokens: int


@record
class Rows:
    """Cold records by row, None where the row is free."""

    requests: tuple[CachedRequestState | None, ...]
    tokens: tuple[Tape | None, ...]  # prompt and settled outputs
    block_ids: tuple[tuple[Tape | None, ...], ...]  # by KV group, then row


@record
class Columns:
    """Hot numbers by row, read-only and shared while unchanged."""

    num_prompt_tokens: Int32[np.ndarray, " rows"]
    num_tokens: Int32[np.ndarray, " rows"]  # prompt and settled outputs
    num_computed_tokens_bound: Int32[np.ndarray, " rows"]  # after every step begun, if no row stops
    num_computed_tokens_settled: Int32[np.ndarray, " rows"]  # what the device has reported
    room: Int32[np.ndarray, " rows"]  # tokens that the row's blocks can hold
    sampler_features: Int32[np.ndarray, " rows"]  # bits, see pure/records/layout.py
    num_logprobs: Int32[np.ndarray, " rows"]  # -1: none wanted
    released_at: Int32[np.ndarray, " rows"]  # the last step that may still write a row that was given up


@record
class Holders:
    """How many rows hold each block, as counted in a batch with these requests and block lists."""

    requests: tuple[CachedRequestState | None, ...]
    block_ids: tuple[tuple[Tape | None, ...], ...]  # by KV group, then row
    counts: tuple[Column, ...]  # by KV group; what block 0 has means nothing


@record(static=True)
class Clock:
    """Steps begun, and steps whose output is known to the host."""

    num_begun: int = 0
    num_settled: int = 0


@record
class InputBatch:
    """Every request known to the runner. Rows are stable from admission to finish or preemption.

    settled <= truth on the device <= bound, for the computed tokens of every row.
    """

    limits: BatchLimits
    rows: Rows
    columns: Columns
    row_of: MappingProxyType[str, int]
    parked: MappingProxyType[str, Parked]
    req_ids: tuple[str, ...]  # this step's batch, by index
    layout: Layout
    holders: Holders
    block_copies: BlockPairs = ()  # this step's, before anything is written
    blocks_to_zero: tuple[tuple[int, ...], ...] = ()
    clock: Clock = Clock()
    forks: tuple[Fork, ...] = ()  # made since the last step began, or before steps that are not settled
    drafts: Int32[np.ndarray, "drafts 3"] = (
        NO_DRAFTS  # this step's, as far as the host has them: (row, place, token id)
    )

    @staticmethod
    def make_empty(limits: BatchLimits) -> "InputBatch":
        """No request is known."""
        num_rows = limits.max_num_reqs
        nobody: tuple[None, ...] = (None,) * num_rows
        rows = Rows(nobody, nobody, (nobody,) * len(limits.block_sizes))
        zeros = frozen(np.zeros(num_rows, np.int32))
        holders = tuple([Column.make(num_blocks, 0) for num_blocks in limits.num_blocks])
        return InputBatch(
            limits=limits,
            rows=rows,
            columns=Columns(zeros, zeros, zeros, zeros, zeros, zeros, frozen(zeros - 1), zeros),
            row_of=MappingProxyType({}),
            parked=MappingProxyType({}),
            req_ids=(),
            layout=Layout.make_empty(),
            holders=Holders(rows.requests, rows.block_ids, holders),
        )
