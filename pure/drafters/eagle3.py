"""EAGLE-3: a head that is fed with hidden states from several depths of the target, and guesses tokens alone.

It guesses no hidden state, so it need not resemble the target's; it may know fewer tokens than the target does.
Source: Li et al., https://arxiv.org/abs/2503.01840; vllm/model_executor/models/llama_eagle3.py.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.drafters.draft_model import counted_behind
from purestep.pure.drafters.eagle import Pair, guessed
from purestep.pure.errors import DrafterError
from purestep.pure.models.config import ModelConfig
from purestep.pure.models.llama import after_attention, attention
from purestep.pure.models.model import KVLayerSpec, Model, Piece
from purestep.pure.models.rope import rope_cos_sin
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter, Proposal, is_count
from purestep.pure.records.inputs import ModelInputs
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.state import ExecuteModelState, StepState

Carried = tuple[Tensor, ...]


def eagle3(
    target: Model,
    config: ModelConfig,
    *,
    layers: tuple[int, ...],
    num_drafts: int,
    draws: bool = False,
    group: int = 0,
) -> Drafter:
    """A head of one layer as drafter for `tapped(target, layers)`, which lends it its embedding.

    `params.tree["draft"]` is {"fc" [hidden, hidden * len(layers)], "layer": a layer of `llama` with "hidden_norm"
    beside "input_norm" and "qkv" of width 2 * hidden, "norm", "head" [ids, hidden], maybe "target_ids" int64 [ids]: the
    target's id for each of the head's}.

    Raises:
        DrafterError: no drafts, sizes that are not the target's, several layers, or layers that the target has not.
    """
    shape = getattr(target.config, "hidden_size", None)
    depth = len(target.kv_layers)
    sizes = (config.hidden_size, config.vocab_size, config.num_layers)
    if (
        not is_count(num_drafts)
        or sizes != (shape, target.vocab_size, 1)
        or not layers
        or not set(layers) <= set(range(depth))
    ):
        raise DrafterError(
            f"an EAGLE-3 head of {num_drafts} drafts, hidden size {sizes[0]}, vocabulary {sizes[1]} and {sizes[2]} "
            f"layers on layers {layers} of {target.name}, which has hidden size {shape}, vocabulary "
            f"{target.vocab_size} and {depth} layers: it needs at least one draft, equal sizes, one layer, and "
            "layers that the target has"
        )
    head = eagle3_head(target, config, group)
    return Drafter(
        num_drafts=num_drafts,
        propose=partial(propose, head=head, num_layers=len(layers), num_drafts=num_drafts, draws=draws),
        kv_layers=head.kv_layers[depth:],
        target_layers=target.kv_layers,
        linear_paths=tuple(path[1:] for path in head.linear_paths),
        draws=draws,
    )


def tapped(target: Model, layers: tuple[int, ...]) -> Model:
    """The target, whose hidden states are followed, side by side, by those that these layers were given.

    It computes what it did: its head reads its own part. [tokens, hidden * (1 + len(layers))]

    Raises:
        DrafterError: a layer that the target has not, or no head to read them with.
    """
    pieces, taps = list[Piece](), 0
    for place, piece in enumerate(target.pieces):
        is_tap = piece.name in {f"layers.{layer}.before" for layer in layers}
        function = partial(
            tap, inner=piece.function, taps=taps, is_tap=is_tap, is_last=place + 1 == len(target.pieces)
        )
        taps += is_tap
        pieces.append(replace(piece, function=function))
    if target.head is None or taps != len(set(layers)):
        raise DrafterError(
            f"hidden states of layers {layers} of {target.name}, which has {taps} of them as pieces named "
            "layers.N.before, and needs a head: give layers that it has"
        )
    head = replace(target.head, function=partial(own_part, inner=target.head.function, parts=1 + taps))
    return replace(target, pieces=tuple(pieces), head=head, narrows=False)  # tapped are all tokens


def tap(
    piece: Piece,
    weights: Any,
    carried: Carried,
    inputs: ModelInputs,
    *attending: Any,
    kernels: Kernels,
    inner: Any,
    taps: int,
    is_tap: bool,
    is_last: bool,
) -> Any:
    """A piece beside which the hidden states that were tapped so far are carried."""
    count = len(carried) - taps
    own, kept = carried[:count], carried[count:]
    if is_tap:  # (cos, sin, hidden), and from the second layer on what is to be added to it
        kept = (*kept, own[2] if count == 3 else own[2] + own[3])
    result = inner(piece, weights, own, inputs, *attending, kernels=kernels)
    if piece.is_attention:
        return (*result[0], *kept), result[1]
    return (torch.cat([*result, *kept], -1),) if is_last else (*result, *kept)


def own_part(
    piece: Piece,
    weights: Any,
    carried: Carried,
    inputs: ModelInputs | None,
    *,
    kernels: Kernels,
    inner: Any,
    parts: int,
) -> Any:
    """The head, on the first of so many parts."""
    (hidden,) = carried
    own = hidden[:, : hidden.shape[1] // parts].contiguous()
    return inner(piece, weights, (own,), inputs, kernels=kernels)


def eagle3_head(target: Model, config: ModelConfig, group: int) -> Model:
    """The head as a model of one layer; it gives hidden states normed and as they are, side by side."""
    first = len(target.kv_layers)
    config = counted_behind(config, first)
    path = ("draft", "layer")
    spec = KVLayerSpec(
        config.attention.num_kv_heads, config.attention.head_dim, config.attention.window_of(first), group
    )
    names = ("qkv", "o", "gate_up", "down")
    return Model(
        name=f"eagle-3 of {target.name}",
        pieces=(
            Piece(name="before", function=before, config=config),
            Piece("attention", attention, path, layers=(first,), group=group, config=config),
            Piece(name="after", function=after_attention, path=path, config=config),
            Piece(name="norm", function=both_states, path=("draft", "norm"), config=config),
        ),
        head=None,
        kv_layers=(*target.kv_layers, spec),
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        config=config,
        linear_paths=(("draft", "fc"), ("draft", "head"), *((*path, name) for name in names)),
    )


def before(piece: Piece, weights: Any, carried: Carried, inputs: ModelInputs, *, kernels: Kernels) -> Carried:
    """Queries, keys and values of embeddings and hidden states, each normed; the hidden states go around them."""
    assert inputs.intermediate is not None
    config: ModelConfig = piece.config
    layer = weights["draft"]["layer"]
    hidden = inputs.intermediate.tensors["hidden_states"]
    embedded = kernels.embed(weights["embed"], inputs.input_ids).to(hidden.dtype)
    normed = (
        kernels.rms_norm(embedded, layer["input_norm"], config.rms_norm_eps),
        kernels.rms_norm(hidden, layer["hidden_norm"], config.rms_norm_eps),
    )
    qkv = kernels.linear(torch.cat(normed, -1), layer["qkv"], layer.get("qkv_bias"))
    cos, sin = rope_cos_sin(
        config.rope, inputs.positions, config.attention.head_dim, hidden.dtype, kernels=kernels
    )
    return qkv, cos, sin, hidden


def both_states(
    piece: Piece, weights: Tensor, carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    """Hidden states for the head, and for the next round."""
    _, _, hidden, residual = carried
    normed, whole = kernels.add_rms_norm(hidden, residual, weights, piece.config.rms_norm_eps)
    return (torch.cat([normed, whole], -1),)


def propose(
    params: Params,
    executed: ExecuteModelState,
    state: StepState,
    output: StepOutput,
    *,
    kernels: Kernels,
    head: Model,
    num_layers: int,
    num_drafts: int,
    draws: bool,
) -> Proposal:
    """Drafts by the head: the first from the target's hidden states, the others from its own.

    Raises:
        DrafterError: a target that does not give hidden states of so many layers.
    """
    own, size, width = params.tree["draft"], head.config.hidden_size, executed.hidden_states.shape[1]
    if width != size * (1 + num_layers):
        raise DrafterError(
            f"the target's hidden states have {width} columns, and an EAGLE-3 head on {num_layers} layers wants "
            f"{1 + num_layers} times {size}: run tapped(target, layers) in its place"
        )

    def read(guess: Tensor) -> Pair:
        normed, whole = guess.chunk(2, -1)
        logits = kernels.logits(kernels, normed.contiguous(), own["head"])
        return _for_target(logits, own.get("target_ids"), head.vocab_size), whole.contiguous()

    below = executed.hidden_states[:, size:].contiguous()  # without the target's last
    hidden = kernels.linear(below, own["fc"], own.get("fc_bias"))
    return guessed(
        params, executed, state, output, hidden, read, head=head, num_drafts=num_drafts, draws=draws, kernels=kernels
    )  # fmt: skip


def _for_target(logits: Tensor, target_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits by the target's ids: -inf for those that the head does not know."""
    if target_ids is None:
        return logits
    unknown = logits.new_full((len(logits), vocab_size), float("-inf"))
    return unknown.index_copy(1, target_ids, logits)
