"""Steps that verify drafts, driven without a host: a state, what is guessed of its rows, and what comes out."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.kernels.types import Kernels
from purestep.pure.models.model import Model
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.drafter import Drafter
from purestep.pure.records.layout import Layout, LayoutBounds, bucket
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.state import StepState
from purestep.pure.step import step
from tests.tiny import Loop, new_request, scheduled

NUM_DRAFTS = 3
MAX_LEN = 48


def limits_of(
    model: Model, num_reqs: int, *, num_drafts: int = NUM_DRAFTS, max_model_len: int = MAX_LEN
) -> BatchLimits:
    """Blocks of four tokens, enough for every request's longest history, in each KV group of the model."""
    num_groups = 1 + max(layer.group for layer in model.kv_layers)
    num_blocks = 1 + num_reqs * -(-max_model_len // 4)
    return BatchLimits(
        max_num_reqs=num_reqs,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        block_sizes=(4,) * num_groups,
        num_blocks=(num_blocks,) * num_groups,
        num_drafts=num_drafts,
    )


def prefilled(
    model: Model,
    params: Params,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    *,
    num_drafts: int = NUM_DRAFTS,
    max_model_len: int = MAX_LEN,
    kernels: Kernels = reference,
    drafter: Drafter | None = None,
) -> StepState:
    """Requests in rows 0, 1, ..., whose prompts are computed: each has its first output."""
    limits = limits_of(model, len(requests), num_drafts=num_drafts, max_model_len=max_model_len)
    loop = Loop(model, params, limits, kernels=kernels, drafter=drafter)
    each = -(-max_model_len // 4)
    new = [
        new_request(
            str(i),
            tuple(prompt),
            (tuple(range(1 + i * each, 1 + (i + 1) * each)),) * len(limits.block_sizes),
            own,
            stream=i,
        )
        for i, (prompt, own) in enumerate(requests)
    ]
    loop.step(scheduled(*new, counts={str(i): len(prompt) for i, (prompt, _) in enumerate(requests)}))
    return loop.state


def guessed(
    state: StepState, drafts: Mapping[int, Sequence[int]], query_lens: Mapping[int, int] | None = None
) -> StepState:
    """The state laid out to verify these drafts, by row; each row runs all the ledger has room for, or what is said."""
    assert state.ledger.drafts is not None
    num_drafts = state.ledger.drafts.shape[1]
    rows = list(drafts)
    lens = [(query_lens or {}).get(row, 1 + num_drafts) for row in rows]
    table = state.ledger.drafts.clone()
    for row, own in drafts.items():
        table[row] = torch.tensor([*own, *[-1] * (num_drafts - len(own))], dtype=torch.int32)
    starts = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    longest = int(state.ledger.num_known_tokens.max()) + num_drafts
    bounds = LayoutBounds(
        num_reqs=len(rows),
        num_tokens=sum(lens),
        max_query_len=max(lens),
        max_seq_len=bucket(longest),
        sampler=state.layout.bounds.sampler,
        num_drafts=num_drafts,
    )
    layout = Layout(torch.tensor(rows, dtype=torch.int32), starts, bounds)
    return replace(state, ledger=replace(state.ledger, drafts=table), layout=layout)


def plain(state: StepState, rows: Sequence[int]) -> StepState:
    """The state laid out to run one token of each of these rows."""
    longest = int(state.ledger.num_known_tokens.max())
    bounds = LayoutBounds(len(rows), len(rows), 1, bucket(longest), state.layout.bounds.sampler)
    starts = torch.arange(len(rows) + 1, dtype=torch.int32)
    return replace(state, layout=Layout(torch.tensor(rows, dtype=torch.int32), starts, bounds))


def history(state: StepState, row: int) -> list[int]:
    """Known tokens of a row."""
    return state.token_ids[row, : int(state.ledger.num_known_tokens[row])].tolist()


def run_plain(model: Model, params: Params, state: StepState, *, kernels: Kernels = reference) -> StepState:
    """The state once no row is active, one token a step."""
    rows = list(range(state.token_ids.shape[0] - 1))
    while bool(state.ledger.active[rows].any()):
        state, _ = step(model, params, plain(state, rows), kernels=kernels)
    return state


def verified(
    model: Model,
    params: Params,
    state: StepState,
    drafts: Mapping[int, Sequence[int]],
    query_lens: Mapping[int, int] | None = None,
    *,
    kernels: Kernels = reference,
) -> tuple[StepState, StepOutput]:
    """One step that verifies these drafts."""
    return step(model, params, guessed(state, drafts, query_lens), kernels=kernels)


def kv_below(state: StepState, row: int) -> list[Tensor]:
    """Keys and values of a row's computed tokens, per layer."""
    computed = torch.arange(int(state.ledger.num_computed_tokens[row]))
    found = []
    for layer, group in enumerate(state.group_of_layer):
        size = state.block_sizes[group]
        slots = state.block_tables[group][row, computed // size] * size + computed % size
        found.append(state.kv[layer].transpose(1, 2).flatten(0, 1)[slots])
    return found
