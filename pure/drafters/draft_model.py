"""A smaller model of the same vocabulary that guesses ahead. Source: https://arxiv.org/abs/2211.17192."""

from functools import partial
from typing import Any

from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.drafters.rounds import begun, drafted
from purestep.pure.errors import DrafterError
from purestep.pure.forward import compute_logits, model_forward, preprocess
from purestep.pure.models.config import ModelConfig
from purestep.pure.models.model import Model
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter, Proposal, is_count
from purestep.pure.records.inputs import AttentionMetadata, StepInputs
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.state import ExecuteModelState, StepState

Cache = tuple[Tensor, ...]
# Named, since a compiler can trace no subscripts in the annotations of inner functions.
Round = tuple[Tensor, Tensor, Cache]  # logits, what is carried, cache


def draft_model(
    target: Model, draft: Model, *, num_drafts: int, draws: bool = False, group: int = 0
) -> Drafter:
    """The model `draft` as drafter for `target`. Its layers use the blocks of the target's KV group `group`.

    It proposes its likeliest tokens; with `draws` it draws them at each request's temperature and states from what, so
    that more of them stand where requests draw.

    Raises:
        DrafterError: no drafts, another vocabulary, or a group that the target has not.
    Source: vllm/v1/spec_decode/draft_model.py.
    """
    groups = 1 + max((layer.group for layer in target.kv_layers), default=-1)
    if not is_count(num_drafts) or draft.vocab_size != target.vocab_size or not 0 <= group < groups:
        raise DrafterError(
            f"{draft.name} (vocabulary of {draft.vocab_size}) as drafter of {num_drafts} tokens in KV group {group} "
            f"for {target.name} (vocabulary of {target.vocab_size}, {groups} groups): it needs at least one draft, the "
            "same vocabulary, and a group that the target has"
        )
    draft = behind(target, draft, group)
    own = len(target.kv_layers)
    return Drafter(
        num_drafts=num_drafts,
        propose=partial(propose, draft=draft, num_drafts=num_drafts, draws=draws),
        kv_layers=draft.kv_layers[own:],
        target_layers=target.kv_layers,
        linear_paths=draft.linear_paths,
        draws=draws,
    )


def behind(target: Model, draft: Model, group: int) -> Model:
    """The draft with its layers behind the target's in the cache, all in one group."""
    first = len(target.kv_layers)
    pieces = tuple(
        replace(
            piece,
            layers=tuple(first + layer for layer in piece.layers),
            group=group,
            config=counted_behind(piece.config, first),
        )
        for piece in draft.pieces
    )
    own = tuple(replace(layer, group=group) for layer in draft.kv_layers)
    return replace(draft, pieces=pieces, kv_layers=target.kv_layers + own)


def counted_behind(config: Any, first: int) -> Any:
    """A piece's plain values where its layers are counted from `first` on: attention looks up their windows."""
    if not isinstance(config, ModelConfig) or config.attention.sliding_window is None:
        return config
    windows = (None,) * first + config.attention.sliding_window
    return replace(config, attention=replace(config.attention, sliding_window=windows))


def propose(
    params: Params,
    executed: ExecuteModelState,
    state: StepState,
    output: StepOutput,
    *,
    kernels: Kernels,
    draft: Model,
    num_drafts: int,
    draws: bool,
) -> Proposal:
    """Drafts by the draft model, whose weights are `params.tree["draft"]`: one pass for each."""
    own = Params(params.tree["draft"], params.version)
    begin = begun(state, executed.inputs, output, ahead=1, kernels=kernels)

    def run(inputs: StepInputs, metadata: AttentionMetadata, carried: Tensor, cache: Cache) -> Round:
        hidden, cache = model_forward(draft, own, preprocess(inputs), cache, metadata, kernels=kernels)
        return compute_logits(draft, own, hidden, inputs.logits_indices, kernels=kernels), carried, cache

    logits, carried, cache = run(begin.inputs, begin.metadata, begin.live, state.kv)  # carries nothing
    return drafted(
        state,
        begin,
        logits,
        carried,
        cache,
        run,
        num_drafts=num_drafts,
        behind=0,
        draws=draws,
        kernels=kernels,
    )
