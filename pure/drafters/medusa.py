"""Medusa: heads on the target's last hidden state, of which each guesses one token further.

Source: Cai et al., https://arxiv.org/abs/2401.10774; vllm/v1/spec_decode/medusa.py.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.errors import DrafterError
from purestep.pure.records.drafter import Drafter, Proposal, is_count
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.state import ExecuteModelState, StepState


def medusa(*, num_drafts: int, num_layers: int = 1) -> Drafter:
    """Heads as drafter. `params.tree["draft"]` is a tuple of one for each draft, each a dict of

        "layers": a tuple of {"weight" [hidden, hidden], "bias" [hidden]}, of which each adds silu(linear(x)) to x
        "out": [vocab, hidden]

    Head j guesses the token j + 1 places behind the one that came out of the step.

    Raises:
        DrafterError: no drafts.
    """
    if not is_count(num_drafts):
        raise DrafterError(f"Medusa heads with num_drafts={num_drafts}: it has to be at least 1")
    paths: list[tuple[str | int, ...]] = []
    for head in range(num_drafts):
        paths += [(head, "layers", layer, "weight") for layer in range(num_layers)] + [(head, "out")]
    return Drafter(num_drafts, partial(propose, num_drafts=num_drafts), linear_paths=tuple(paths))


def propose(
    params: Params,
    executed: ExecuteModelState,
    state: StepState,
    output: StepOutput,
    *,
    kernels: Kernels,
    num_drafts: int,
) -> Proposal:
    """The likeliest token of each head, from the hidden state of each request's last token that stands."""
    hidden = last_hidden(executed, state)
    heads = params.tree["draft"][:num_drafts]
    ids = [kernels.greedy(head_logits(head, hidden, kernels=kernels)) for head in heads]
    return Proposal(torch.stack(ids, 1).to(torch.int32))


def last_hidden(executed: ExecuteModelState, state: StepState) -> Float[Tensor, "reqs hidden"]:
    """The target's hidden state that gave each request's newest token."""
    inputs = executed.inputs
    computed = state.ledger.num_computed_tokens.index_select(0, state.layout.row_of_index)
    fallen = torch.where(inputs.seq_lens > 0, inputs.seq_lens - computed, 0)
    place = (inputs.query_start_loc[1:] - 1 - fallen).clamp(min=0)
    return executed.hidden_states.index_select(0, place)


def head_logits(
    head: Any, hidden: Float[Tensor, "n hidden"], *, kernels: Kernels
) -> Float[Tensor, "n vocab"]:
    """What one head thinks."""
    for layer in head["layers"]:
        hidden = hidden + torch.nn.functional.silu(kernels.linear(hidden, layer["weight"], layer["bias"]))
    logits: Tensor = kernels.logits(kernels, hidden, head["out"])
    return logits
