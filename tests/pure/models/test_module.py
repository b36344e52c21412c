"""A torch module as a model of one piece."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from purestep.pure.models.model import KVLayerSpec
from purestep.pure.models.module import module_model, module_tree
from purestep.pure.records.params import Params
from tests.pure.models.families import random_ids
from tests.pure.models.paging import logits_of, paging, whole

VOCAB, HEADS, DIM, LAYERS = 83, 2, 4, 2


class Toy(nn.Module):
    """Positions and tokens embedded, two layers of attention, logits: nothing of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * DIM
        self.embed, self.place = nn.Embedding(VOCAB, width), nn.Embedding(64, width)
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(LAYERS))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = self.embed(input_ids) + self.place(positions)
        for i, mix in enumerate(self.mix):
            q, k, v = mix(x).unflatten(-1, (3, HEADS, DIM)).unbind(-3)
            x = x + torch.tanh(attend(i, q, k, v).flatten(-2))
        return self.head(x)


def dense(window: int | None) -> Callable[..., Tensor]:
    """Attention over a whole sequence, without a cache."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if window is not None and layer == 1:
            seen &= torch.ones_like(seen).triu(1 - window)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    return attend


def toy(window: int | None = None) -> tuple:  # type: ignore[type-arg]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Toy().double()
    layers = tuple(KVLayerSpec(num_kv_heads=HEADS, head_dim=DIM, sliding_window=w) for w in (None, window))
    model = module_model(module, kv_layers=layers, vocab_size=VOCAB, max_position_embeddings=64)
    return module, model, Params(tree=module_tree(module))


@pytest.mark.parametrize("window", [None, 3])
def test_paged_equals_dense(window: int | None) -> None:
    """Whole or in chunks, packed with another sequence, a module computes what it does on its own."""
    module, model, params = toy(window)
    ids = random_ids([11, 4])
    expected = [module(i, torch.arange(len(i)), dense(window)) for i in ids]
    chunked = [[(0, 0, 5)], [(1, 0, 4), (0, 5, 6)], [(0, 6, 11)]]
    for steps in (whole([11, 4]), chunked):
        found = logits_of(model, params, ids, steps, paging([11, 4]), torch.float64)
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(found, expected, strict=True))


def test_parameters_are_an_argument() -> None:
    """Gradients with respect to the tree are autograd's, and three trees at once are three runs."""
    module, model, params = toy()
    (ids,), where = random_ids([6]), paging([6])

    def loss(params: Params) -> Tensor:
        logits = logits_of(model, params, [ids], whole([6]), where, torch.float64)[0]
        return logits.log_softmax(-1)[torch.arange(5), ids[1:]].sum()

    found = torch.func.grad(loss)(params)
    module(ids, torch.arange(6), dense(None)).log_softmax(-1)[torch.arange(5), ids[1:]].sum().backward()
    for name, parameter in module.named_parameters():
        assert (found.tree[name] - parameter.grad).abs().max() < 1e-10
    sets = [tree_map(lambda x, f=f: x * f, params) for f in (1.0, 0.5, 2.0)]
    stacked = tree_map(lambda *x: torch.stack(x), *sets)
    assert torch.allclose(torch.func.vmap(loss)(stacked), torch.stack([loss(p) for p in sets]))
    assert len(set(map(float, map(loss, sets)))) == 3
