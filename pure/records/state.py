"""The device's record of a step: kinds of leaves, told apart by who may change them.

overwrite    `ledger`: a new value each step; a clone of it is a snapshot
append-only  `kv`, `token_ids`: what lies below a sequence's length never changes while it is held
once         `kv_scales`: what lies in the cache was stored by them
host-written `block_tables`, `room`, `sampling`, `layout`: replaced only by what an inbox carries
inbox        `inbox`: the plan of the coming step, emptied by `absorb`
"""

from typing import Any

import attrs
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from purestep.kernels.record import record, static
from purestep.pure.records.inputs import StepInputs
from purestep.pure.records.layout import Layout
from purestep.pure.records.plan import Inbox
from purestep.pure.records.sampling_rows import SamplingRows

LEDGER_COLUMNS = (
    "num_computed_tokens",
    "num_known_tokens",
    "num_output_tokens",
    "length_limit",
    "active",
    "has_nan",
    "step",
)
NUM_HOST_COLUMNS = LEDGER_COLUMNS.index(
    "step"
)  # those that a plan writes when a row is admitted or rolled back


@record
class Ledger:
    """Packed small device state, one column per row of the batch and the null row last."""

    table: Int32[Tensor, "columns rows"]
    drafts: Int32[Tensor, "rows drafts"] | None = None  # guesses at what follows, -1 behind a row's last

    @property
    def num_computed_tokens(self) -> Int[Tensor, " rows"]:
        """Tokens whose keys and values are in the cache."""
        return self.table[0]

    @property
    def num_known_tokens(self) -> Int[Tensor, " rows"]:
        """Tokens of the row: prompt and accepted outputs."""
        return self.table[1]

    @property
    def num_output_tokens(self) -> Int[Tensor, " rows"]:
        """Accepted outputs: the index of the next draw."""
        return self.table[2]

    @property
    def length_limit(self) -> Int[Tensor, " rows"]:
        """Known tokens at which the row stops."""
        return self.table[3]

    @property
    def active(self) -> Bool[Tensor, " rows"]:
        """False for rows that hit a stop id, their length limit or NaN logits: they run idle and write nothing."""
        return self.table[4] > 0

    @property
    def has_nan(self) -> Bool[Tensor, " rows"]:
        """Rows whose logits were NaN once."""
        return self.table[5] > 0

    @property
    def step(self) -> Int[Tensor, " rows"]:
        """Steps taken by this state, the same in every row."""
        return self.table[6]


@record
class StepState:
    """All that one step reads and the next one needs."""

    ledger: Ledger
    kv: tuple[Tensor, ...]  # per layer [blocks, 2, block_size, kv_heads, head_dim]; block 0 is the null block
    token_ids: Int32[Tensor, "rows max_model_len"]
    block_tables: tuple[Int32[Tensor, "rows _blocks"], ...]  # per KV group, each of its own width
    room: Int32[Tensor, " rows"]  # tokens that its blocks can hold; it runs idle where a step needs more
    sampling: SamplingRows
    layout: Layout
    inbox: Inbox
    block_sizes: tuple[int, ...] = static()  # per KV group, of the kernels' blocks
    group_of_layer: tuple[int, ...] = static()  # the KV group of each layer of `kv`
    draft_probs: Float[Tensor, "rows drafts vocab"] | None = (
        None  # drafts were drawn from these; None: certain
    )
    drafter: Any = None  # what a drafter on the device keeps from step to step: a tree of tensors
    acceptance_rates: tuple[float, ...] = static(default=())  # as in BatchLimits
    # Of keys and of values in a cache of eight bits, float32: what is read is what is stored times its scale.
    kv_scales: Float[Tensor, "layers 2"] | None = None


@record
class ExecuteModelState:
    """What lies between forward and sampling; it holds the state, which `sample` gives back.

    Source: vllm/v1/worker/gpu_model_runner.py ExecuteModelState.
    """

    state: StepState
    inputs: StepInputs
    logits: Tensor | None  # [logits, vocab]
    hidden_states: Tensor  # [tokens, hidden]; [logits, hidden] where no others were asked for
    sample_hidden_states: Tensor | None = None
    aux_hidden_states: tuple[Tensor, ...] | None = attrs.field(default=None)
