"""Training the heads of drafters, with the functions that draft: a step is differentiable on the reference kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.pure.drafters.eagle import eagle_head
from purestep.pure.drafters.joined import with_draft_params
from purestep.pure.drafters.medusa import head_logits
from purestep.pure.drafters.rounds import begun
from purestep.pure.forward import compute_logits, model_forward, preprocess
from purestep.pure.models.config import ModelConfig
from purestep.pure.models.model import Model
from purestep.pure.record import replace
from purestep.pure.records.inputs import IntermediateTensors
from purestep.pure.records.params import Params
from purestep.pure.records.state import ExecuteModelState
from purestep.pure.step import execute, sample
from tests.pure.drafters.driver import GREEDY, Requests
from tests.speculation import history, limits_of, prefilled, run_plain
from tests.tiny import Loop, new_request, scheduled


def spoken(model: Model, params: Params, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The target's own greedy histories, which a drafter learns to continue."""
    requests: Requests = [(prompt, GREEDY) for prompt in prompts]
    end = run_plain(model, params, prefilled(model, params, requests, num_drafts=0))
    return [history(end, row) for row in range(len(prompts))]


def whole_pass(model: Model, params: Params, histories: Sequence[Sequence[int]]) -> ExecuteModelState:
    """One pass over whole histories: hidden states of every token."""
    limits = limits_of(model, len(histories), num_drafts=0)
    loop, each = Loop(model, params, limits), 12
    new = [
        new_request(str(i), tuple(own), (tuple(range(1 + i * each, 1 + (i + 1) * each)),), GREEDY)
        for i, own in enumerate(histories)
    ]
    state = loop.plan(scheduled(*new, counts={str(i): len(own) for i, own in enumerate(histories)}))
    with torch.no_grad():
        return execute(model, params, state, kernels=reference)


def trained(loss: Callable[[Any], Tensor], tree: Any, *, steps: int, rate: float = 0.02) -> Any:
    """The tree after so many steps of Adam."""
    leaves, form = pytree.tree_flatten(tree)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    optimizer = torch.optim.Adam(leaves, rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(pytree.tree_unflatten(leaves, form)).backward()
        optimizer.step()
    return pytree.tree_unflatten([leaf.detach() for leaf in leaves], form)


def train_eagle(
    target: Model,
    params: Params,
    config: ModelConfig,
    tree: Any,
    histories: Sequence[Sequence[int]],
    *,
    steps: int,
) -> Any:
    """A head that guesses the target's next hidden state, and with it the token that follows."""
    head = eagle_head(target, config, 0)
    joined = replace(target, kv_layers=head.kv_layers)
    executed = whole_pass(joined, params, histories)
    hidden = executed.hidden_states
    state, output = sample(executed, kernels=reference)
    begin = begun(state, executed.inputs, output, ahead=0, kernels=reference)
    inputs, metadata = begin.inputs, begin.metadata
    followed = torch.arange(len(hidden) - 1)[
        executed.inputs.positions[1:] > 0
    ]  # by a token of the same request
    every = torch.arange(len(hidden))
    labels = compute_logits(target, params, hidden, every, kernels=reference).argmax(-1)

    def loss(draft: Any) -> Tensor:
        own = with_draft_params(params, Params(draft))
        read = preprocess(inputs, intermediate=IntermediateTensors({"hidden_states": hidden}))
        guess, _ = model_forward(head, own, read, state.kv, metadata, kernels=reference)
        logits = compute_logits(head, own, guess, every, kernels=reference)[followed]
        distance = torch.nn.functional.smooth_l1_loss(guess[followed], hidden[followed + 1])
        return distance + torch.nn.functional.cross_entropy(logits, labels[followed + 1])

    return trained(loss, tree, steps=steps)


def train_medusa(
    target: Model, params: Params, tree: Any, histories: Sequence[Sequence[int]], *, steps: int
) -> Any:
    """Heads that guess the tokens two, three, ... places behind each token."""
    hidden = whole_pass(target, params, histories).hidden_states
    starts = [0, *torch.tensor([len(own) for own in histories]).cumsum(0).tolist()]

    def loss(heads: Any) -> Tensor:
        total = torch.zeros(())
        for place, head in enumerate(heads):
            far = place + 2
            rows = [
                start + i
                for start, own in zip(starts, histories, strict=False)
                for i in range(len(own) - far)
            ]
            labels = torch.tensor([own[i] for own in histories for i in range(far, len(own))])
            logits = head_logits(head, hidden[rows], kernels=reference)
            total = total + torch.nn.functional.cross_entropy(logits, labels)
        return total

    return trained(loss, tree, steps=steps)
