"""What drafters with layers of their own share: the tokens that they have not seen yet, and one round a draft.

Behind `advance` the drafter's keys cover what was computed before the step. It first runs the step's tokens that
stand, then its own drafts one by one, in the blocks that the request has; where those end, its drafts end.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from purestep.kernels.record import record
from purestep.kernels.types import Kernels
from purestep.pure.inputs import build_attention_metadata
from purestep.pure.record import replace
from purestep.pure.records.drafter import Proposal
from purestep.pure.records.inputs import AttentionMetadata, StepInputs
from purestep.pure.records.layout import bucket
from purestep.pure.records.noise import PROPOSE
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.sampling_params import GREEDY_BELOW
from purestep.pure.records.state import StepState
from purestep.pure.sampling import batch_params

Cache = tuple[Tensor, ...]
# (inputs, metadata, what the last round carried, cache) -> (logits, what it carries, cache)
Round = Callable[[StepInputs, AttentionMetadata, Tensor, Cache], tuple[Tensor, Tensor, Cache]]


@record
class Begun:
    """The step's tokens as a drafter runs them, and for whom it drafts behind them."""

    inputs: StepInputs
    metadata: AttentionMetadata
    live: Bool[Tensor, " reqs"]  # kept a token, goes on, and the drafter sees all it can
    num_known_tokens: Int[Tensor, " reqs"]
    room: Int[Tensor, " reqs"]  # positions that blocks and tape hold


def begun(state: StepState, inputs: StepInputs, output: StepOutput, *, ahead: int, kernels: Kernels) -> Begun:
    """The tokens of this step that stand, as inputs of a drafter: those that fell are left out, padding is at the end.

    With `ahead` 1 the drafter runs every known token, so one more than the step computed: that which came out of it.
    With 0 it runs each computed token's successor in its place: the position and slot are those of the token before.
    `inputs` are the step's, `state` is that behind `advance`. `logits_indices` are each request's last token here.
    """
    bounds, rows, ledger = state.layout.bounds, state.layout.row_of_index, state.ledger
    computed, known, room = kernels.take_rows(
        (ledger.num_computed_tokens, ledger.num_known_tokens, state.room), rows
    )
    last = state.token_ids.shape[1] - 1
    room = room.clamp(max=last + 1)
    begin = inputs.seq_lens - inputs.query_start_loc.diff()
    end = torch.minimum(torch.minimum(computed + ahead, known), room)
    count = torch.where(inputs.seq_lens > 0, end - begin, 0).clamp(min=0)
    starts = torch.nn.functional.pad(count.cumsum(0), (1, 0)).to(torch.int32)
    num_tokens = bounds.num_tokens + ahead * bounds.num_reqs
    index, offset = kernels.ragged_index(starts, num_tokens)
    position, row = (begin[index] + offset).clamp(0, last), rows[index]
    exists = torch.arange(num_tokens, device=starts.device) < starts[-1]
    seen = StepInputs(
        input_ids=state.token_ids[row, (position + 1 - ahead).clamp(max=last)],
        positions=position,
        slot_mapping=_slots(state, row, position, exists),
        seq_lens=torch.where(count > 0, end, 0).to(torch.int32),
        query_start_loc=starts,
        logits_indices=(starts[1:] - 1).clamp(min=0),
        discard=inputs.discard,
    )
    live = (output.sampled_token_ids[:, 0] >= 0) & output.active & (seen.seq_lens == known - 1 + ahead)
    metadata = _metadata(
        state, seen, max_query_len=bounds.max_query_len + ahead, longer=ahead, kernels=kernels
    )
    return Begun(seen, metadata, live, known, room)


def drafted(
    state: StepState,
    begin: Begun,
    logits: Float[Tensor, "reqs vocab"],
    carried: Tensor,
    cache: Cache,
    run: Round,
    *,
    num_drafts: int,
    behind: int,
    draws: bool,
    kernels: Kernels,
) -> Proposal:
    """`num_drafts` tokens of each request: the first out of `logits`, the others each by one more round.

    Draft j is run at `behind` positions before its own. Drafts are the largest logits' ids, or, if the drafter `draws`,
    drawn at the request's temperature; their probabilities are then stated.
    """
    place = torch.arange(num_drafts - 1, device=logits.device)[:, None]
    position = begin.num_known_tokens + place - behind  # of every round but the first, [rounds, reqs]
    live = begin.live & (position < begin.room)
    rounds = _rounds(state, position, live, longer=1 + num_drafts, kernels=kernels)
    draws = draws and state.layout.bounds.sampler.random
    drafts: list[Tensor] = []
    probs: list[Tensor] = []
    for j in range(num_drafts):
        token, chance = _pick(state, logits, j, draws, kernels)
        drafts.append(token)
        probs += [] if chance is None else [chance]
        if j < len(rounds):
            inputs, metadata = rounds[j]
            inputs = replace(inputs, input_ids=token.to(torch.int32))
            logits, carried, cache = run(inputs, metadata, carried, cache)
    stands = torch.cat([begin.live[None], live])
    return Proposal(
        drafts=torch.where(stands, torch.stack(drafts), -1).t().to(torch.int32),
        probs=torch.stack(probs, 1) if draws else None,
        kv=cache,
    )


def _rounds(
    state: StepState, position: Tensor, live: Tensor, *, longer: int, kernels: Kernels
) -> list[tuple[StepInputs, AttentionMetadata]]:
    """One token of each request in every round of [rounds, reqs]; those that are not live run idle."""
    if len(position) == 0:
        return []
    rows = state.layout.row_of_index
    place = position.clamp(0, state.token_ids.shape[1] - 1).to(torch.int64)
    slots = _slots(state, rows.expand_as(place), place, live)
    seq_lens = torch.where(live, position + 1, 0).to(torch.int32)
    starts = torch.arange(len(rows) + 1, device=rows.device, dtype=torch.int32)
    inputs = [
        StepInputs(
            input_ids=rows,  # in the place of drafts that are not made yet
            positions=place[j],
            slot_mapping=slots[:, j],
            seq_lens=seq_lens[j],
            query_start_loc=starts,
            logits_indices=starts[:-1],
            discard=~live[j],
        )
        for j in range(len(position))
    ]
    first = _metadata(state, inputs[0], max_query_len=1, longer=longer, kernels=kernels)
    return [(own, _at(first, own)) for own in inputs]


def _metadata(
    state: StepState, inputs: StepInputs, *, max_query_len: int, longer: int, kernels: Kernels
) -> AttentionMetadata:
    """Attention metadata of a drafter's inputs, which may be `longer` tokens longer than the step's."""
    bounds = state.layout.bounds
    wider = replace(bounds, max_query_len=max_query_len, max_seq_len=bucket(bounds.max_seq_len + longer))
    state = replace(state, layout=replace(state.layout, bounds=wider))
    return build_attention_metadata(state, inputs, kernels=kernels)


def _at(metadata: AttentionMetadata, inputs: StepInputs) -> AttentionMetadata:
    """The same blocks for another round's inputs."""
    groups = tuple(
        replace(group, slot_mapping=slots)
        for group, slots in zip(metadata.groups, inputs.slot_mapping.unbind(), strict=True)
    )
    return replace(metadata, seq_lens=inputs.seq_lens, groups=groups)


def _slots(state: StepState, row: Tensor, position: Tensor, exists: Tensor) -> Tensor:
    """Where keys and values of tokens go, [groups, ...]: in block 0 for those that do not exist."""
    found = []
    for table, size in zip(state.block_tables, state.block_sizes, strict=True):
        place = torch.clamp(position // size, max=table.shape[1] - 1)
        block = torch.where(exists, table[row, place], 0)
        found.append(block.to(torch.int64) * size + position % size)
    return torch.stack(found)


def _pick(
    state: StepState, logits: Tensor, place: int, draws: bool, kernels: Kernels
) -> tuple[Tensor, Tensor | None]:
    """The draft at `place` of each request, and the distribution that it was drawn from."""
    best = kernels.greedy(logits)
    if not draws:
        return best, None
    params = batch_params(state, kernels=kernels)
    is_greedy = params["temperature"] < GREEDY_BELOW
    scaled = kernels.scale_by_temperature(logits, params["temperature"])
    index, vocab = params.num_output_tokens + place, logits.shape[-1]
    noise = kernels.exponentials(kernels, *params.words, index, purpose=PROPOSE, width=vocab)
    drawn = kernels.draw(scaled, noise.to(scaled.dtype))
    return torch.where(is_greedy, best, drawn), scaled.softmax(-1)
