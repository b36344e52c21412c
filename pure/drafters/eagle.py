"""EAGLE: a small head that guesses the target's next hidden state from this one and the token that came of it.

At position p it runs the embedding of token p + 1 beside the target's hidden state of p, and so needs no hidden state
of its own for the tokens that stand; behind them it takes the one that it has guessed itself.
Source: Li et al., https://arxiv.org/abs/2401.15077; vllm/model_executor/models/llama_eagle.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.drafters.draft_model import counted_behind
from purestep.pure.drafters.rounds import begun, drafted
from purestep.pure.errors import DrafterError
from purestep.pure.forward import compute_logits, model_forward, preprocess
from purestep.pure.models.config import ModelConfig
from purestep.pure.models.llama import after_attention, attention, before_attention
from purestep.pure.models.model import KVLayerSpec, Model, Piece
from purestep.pure.models.rope import rope_cos_sin
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter, Proposal, is_count
from purestep.pure.records.inputs import AttentionMetadata, IntermediateTensors, ModelInputs, StepInputs
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.state import ExecuteModelState, StepState

Cache = tuple[Tensor, ...]
Carried = tuple[Tensor, ...]
# Named, since a compiler can trace no subscripts in the annotations of inner functions.
Pair = tuple[Tensor, Tensor]  # logits, hidden states
Round = tuple[Tensor, Tensor, Cache]


def eagle(
    target: Model, config: ModelConfig, *, num_drafts: int, draws: bool = False, group: int = 0
) -> Drafter:
    """A head of `config.num_layers` layers as drafter for `target`, which lends it its embedding and its own head.

    `params.tree["draft"]` is {"fc" [hidden, 2 * hidden], on embedding and hidden state side by side, maybe "fc_bias",
    "layers": as those of `llama`}; the first layer has no norm before attention, and there is none at the end.

    Raises:
        DrafterError: no drafts, sizes that are not the target's, or a target without embedding or head to lend.
    """
    shape = getattr(target.config, "hidden_size", None)
    if (
        not is_count(num_drafts)
        or target.head is None
        or (config.hidden_size, config.vocab_size) != (shape, target.vocab_size)
    ):
        raise DrafterError(
            f"an EAGLE head of {num_drafts} drafts, hidden size {config.hidden_size} and vocabulary "
            f"{config.vocab_size} for {target.name}, which has hidden size {shape} and vocabulary {target.vocab_size}: "
            "it needs at least one draft, equal sizes, and a target with a head"
        )
    head = eagle_head(target, config, group)
    own = len(target.kv_layers)
    return Drafter(
        num_drafts=num_drafts,
        propose=partial(propose, head=head, num_drafts=num_drafts, draws=draws),
        kv_layers=head.kv_layers[own:],
        target_layers=target.kv_layers,
        linear_paths=tuple(path[1:] for path in head.linear_paths),
        draws=draws,
    )


def eagle_head(target: Model, config: ModelConfig, group: int) -> Model:
    """The head as a model: it reads the whole tree of parameters, and hidden states as `intermediate`."""
    first = len(target.kv_layers)
    config = counted_behind(config, first)
    pieces = [Piece(name="fuse", function=fuse, config=config)]
    for i in range(config.num_layers):
        path, layer = ("draft", "layers", i), (first + i,)
        before = before_attention if i else without_norm
        pieces += [
            Piece(name=f"layers.{i}.before", function=before, path=path, config=config),
            Piece(f"layers.{i}.attention", attention, path, layers=layer, group=group, config=config),
            Piece(name=f"layers.{i}.after", function=after_attention, path=path, config=config),
        ]
    pieces.append(Piece(name="sum", function=add_up))
    names = ("qkv", "o", "gate_up", "down")
    layers = [("draft", "layers", i, name) for i in range(config.num_layers) for name in names]
    spec = KVLayerSpec(config.attention.num_kv_heads, config.attention.head_dim, group=group)
    own = tuple(
        replace(spec, sliding_window=config.attention.window_of(first + i)) for i in range(config.num_layers)
    )
    return Model(
        name=f"eagle of {target.name}",
        pieces=tuple(pieces),
        head=target.head,
        kv_layers=target.kv_layers + own,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        config=config,
        linear_paths=(("draft", "fc"), *layers),
    )


def fuse(piece: Piece, weights: Any, carried: Carried, inputs: ModelInputs, *, kernels: Kernels) -> Carried:
    """Embeddings of the next tokens and hidden states of these, as one hidden state; the rotary angles."""
    assert inputs.intermediate is not None
    config: ModelConfig = piece.config
    embedded = kernels.embed(weights["embed"], inputs.input_ids)
    hidden = inputs.intermediate.tensors["hidden_states"].to(embedded.dtype)
    both = torch.cat([embedded, hidden], -1)
    fused = kernels.linear(both, weights["draft"]["fc"], weights["draft"].get("fc_bias"))
    cos, sin = rope_cos_sin(
        config.rope, inputs.positions, config.attention.head_dim, fused.dtype, kernels=kernels
    )
    return cos, sin, fused


def without_norm(
    piece: Piece, weights: Any, carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    """Queries, keys and values of the first layer."""
    cos, sin, hidden = carried
    return kernels.linear(hidden, weights["qkv"], weights.get("qkv_bias")), cos, sin, hidden


def add_up(piece: Piece, weights: Any, carried: Carried, inputs: ModelInputs, *, kernels: Kernels) -> Carried:
    """The guessed hidden states, which take the place of normed ones."""
    _, _, hidden, residual = carried
    return (hidden + residual,)


def propose(
    params: Params,
    executed: ExecuteModelState,
    state: StepState,
    output: StepOutput,
    *,
    kernels: Kernels,
    head: Model,
    num_drafts: int,
    draws: bool,
) -> Proposal:
    """Drafts by the head: the first from the target's hidden states, the others from its own."""

    def read(guess: Tensor) -> Pair:
        every = torch.arange(len(guess), device=guess.device)
        return compute_logits(head, params, guess, every, kernels=kernels), guess

    return guessed(
        params, executed, state, output, executed.hidden_states, read, head=head, num_drafts=num_drafts, draws=draws,
        kernels=kernels,
    )  # fmt: skip


def guessed(
    params: Params,
    executed: ExecuteModelState,
    state: StepState,
    output: StepOutput,
    hidden: Float[Tensor, "tokens hidden"],
    read: Callable[[Tensor], Pair],
    *,
    head: Model,
    num_drafts: int,
    draws: bool,
    kernels: Kernels,
) -> Proposal:
    """Drafts by a head that runs on `hidden`, a state for each token of the step, and behind them on its own.

    `read` makes, of what the head says of each request's last token, logits and the state for the next round.
    """
    begin = begun(state, executed.inputs, output, ahead=0, kernels=kernels)

    def run(inputs: StepInputs, metadata: AttentionMetadata, carried: Tensor, cache: Cache) -> Round:
        model_inputs = preprocess(inputs, intermediate=IntermediateTensors({"hidden_states": carried}))
        out, cache = model_forward(head, params, model_inputs, cache, metadata, kernels=kernels)
        return *read(out.index_select(0, inputs.logits_indices)), cache

    index, offset = kernels.ragged_index(begin.inputs.query_start_loc, len(begin.inputs.input_ids))
    place = (executed.inputs.query_start_loc[index] + offset).clamp(max=len(hidden) - 1)
    own = hidden.index_select(0, place)
    logits, carried, cache = run(begin.inputs, begin.metadata, own, state.kv)
    return drafted(
        state,
        begin,
        logits,
        carried,
        cache,
        run,
        num_drafts=num_drafts,
        behind=1,
        draws=draws,
        kernels=kernels,
    )
