"""A model small enough for property tests, and the loop around it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.kernels.types import Kernels
from purestep.pure.initial import initial_state
from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig
from purestep.pure.models.llama import llama
from purestep.pure.models.model import Model
from purestep.pure.models.names import from_hf_names, hf_shapes
from purestep.pure.plan import plan_step
from purestep.pure.propose import equip
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.drafter import Drafter
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import (
    BlockIds,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from purestep.pure.records.state import StepState
from purestep.pure.settle import settle
from purestep.pure.step import step
from purestep.pure.update import update_states

GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def tiny_llama(
    *,
    vocab_size: int = 16,
    num_kv_heads: int = 1,
    groups: tuple[int, ...] = (0, 0),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Model, Params]:
    """A random model with a layer for each entry of `groups`; entries are KV groups. Large weights: no near-ties."""
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=12,
        num_layers=len(groups),
        attention=AttentionConfig(num_heads=2, num_kv_heads=num_kv_heads, head_dim=4),
        rope=RopeConfig(),
        rms_norm_eps=1e-6,
        tied_embeddings=False,
        max_position_embeddings=64,
    )
    generator = torch.Generator().manual_seed(seed)

    def weight(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype) * 0.7

    tensors = {name: weight(shape) for name, shape in hf_shapes(config).items()}
    return llama(config, groups=groups), Params(from_hf_names(config, tensors))


def new_request(
    req_id: str,
    prompt: tuple[int, ...],
    blocks: BlockIds,
    params: SamplingParams = GREEDY,
    *,
    num_computed_tokens: int = 0,
    stream: int = 0,
) -> NewRequestData:
    """A request as the scheduler sends it."""
    return NewRequestData(req_id, prompt, params, blocks, num_computed_tokens, stream)


def column(*values: int) -> np.ndarray:
    """An int32 column."""
    return np.array(values, np.int32)


def cached_requests(batch: InputBatch, *req_ids: str, **changes: object) -> CachedRequestData:
    """These requests as a scheduler sends them that knows what the batch knows."""
    rows = [batch.row_of[req_id] for req_id in req_ids]
    columns = batch.columns
    return replace(
        CachedRequestData(
            req_ids=req_ids,
            num_computed_tokens=columns.num_computed_tokens_settled[rows],
            num_output_tokens=columns.num_tokens[rows] - columns.num_prompt_tokens[rows],
        ),
        **changes,
    )


def scheduled(
    *new: NewRequestData,
    cached: CachedRequestData | None = None,
    counts: dict[str, int],
    finished: tuple[str, ...] = (),
) -> SchedulerOutput:
    """One step's work; `counts` fixes the order of the batch."""
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached or CachedRequestData.make_empty(),
        req_ids=tuple(counts),
        num_scheduled_tokens=column(*counts.values()),
        finished_req_ids=frozenset(finished),
    )


def decode(batch: InputBatch, *req_ids: str, **changes: object) -> InputBatch:
    """The batch in which each of these known requests runs one token; `changes` are to the CachedRequestData."""
    cached = cached_requests(batch, *req_ids, **changes)
    return update_states(batch, scheduled(cached=cached, counts=dict.fromkeys(req_ids, 1)))


def host_output(kept: Sequence[int], computed: Sequence[int]) -> StepOutput:
    """A step's output on the host: kept tokens (-1: none) and computed tokens of each request."""
    yes = np.ones(len(kept), np.bool_)
    return StepOutput(column(*kept)[:, None], column(*computed), yes, ~yes)


def settled(batch: InputBatch, token: int = 5) -> InputBatch:
    """After the step of `batch`, in which every request that completed its history got this token."""
    rows = batch.layout.row_of_index
    computed = batch.columns.num_computed_tokens_bound[rows]
    kept = np.where(computed >= batch.columns.num_tokens[rows], token, -1)
    return settle(batch, batch, host_output(kept.tolist(), computed.tolist()))


class Loop:
    """update_states, plan_step, step, settle, over and over, with nothing in flight."""

    def __init__(
        self,
        model: Model,
        params: Params,
        limits: BatchLimits,
        *,
        kernels: Kernels = reference,
        drafter: Drafter | None = None,
    ) -> None:
        self.model, self.params, self.kernels, self.drafter = model, params, kernels, drafter
        self.batch = self.absorbed = InputBatch.make_empty(limits)
        self.state = initial_state(model, limits, dtype=params.tree["norm"].dtype)
        if drafter is not None:
            self.state = equip(self.state, drafter, vocab_size=model.vocab_size)

    def plan(self, output: SchedulerOutput) -> StepState:
        """The state with the coming step's plan in its inbox."""
        self.batch = update_states(self.batch, output)
        inbox = plan_step(self.batch, self.absorbed).inbox.to("cpu")
        self.absorbed = self.batch
        return replace(self.state, inbox=inbox)

    def step(self, output: SchedulerOutput) -> StepOutput:
        """One step, settled."""
        state = self.plan(output)
        with torch.no_grad():
            self.state, result = step(
                self.model, self.params, state, kernels=self.kernels, drafter=self.drafter
            )
        self.batch = settle(self.batch, self.batch, result)
        return result

    def decode(self, *req_ids: str) -> StepOutput:
        """One token more for each of these requests, which have blocks enough."""
        cached = cached_requests(self.batch, *req_ids)
        return self.step(scheduled(cached=cached, counts=dict.fromkeys(req_ids, 1)))

    def tokens(self, req_id: str) -> list[int]:
        """Prompt and outputs."""
        return self.batch.rows.tokens[self.batch.row_of[req_id]].tolist()  # type: ignore[union-attr]
