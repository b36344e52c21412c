"""Heads that have learnt to guess are right more often, on histories that they have not seen; tokens stay the same."""

from random import Random

import torch

from purestep.pure.drafters.eagle import eagle
from purestep.pure.drafters.joined import with_draft_params, with_drafter
from purestep.pure.drafters.medusa import medusa
from purestep.pure.models.llama import llama
from purestep.pure.models.model import Model
from purestep.pure.models.names import from_hf_names, hf_shapes
from purestep.pure.records.params import Params
from tests.pure.drafters.driver import GREEDY, VOCAB, check_greedy, small_config
from tests.pure.drafters.training import spoken, train_eagle, train_medusa

HIDDEN, NUM_DRAFTS = 16, 3
CONFIG = small_config(1, hidden=HIDDEN)


def target() -> tuple[Model, Params]:
    """A model whose next token depends on the last one above all: something that a small head can learn."""
    generator = torch.Generator().manual_seed(1)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        return torch.randn(shape, generator=generator) * (0.02 if "o_proj" in name else 0.6)

    return llama(CONFIG), Params(
        from_hf_names(CONFIG, {name: draw(name, shape) for name, shape in hf_shapes(CONFIG).items()})
    )


def prompts(seed: int, count: int) -> list[tuple[int, ...]]:
    rng = Random(seed)
    return [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(2, 7))) for _ in range(count)]


TARGET, PARAMS = target()
UNSEEN = [(prompt, GREEDY) for prompt in prompts(99, 4)]


def random_tree(shapes: object, seed: int = 0) -> object:
    generator = torch.Generator().manual_seed(seed)
    return torch.utils._pytree.tree_map(
        lambda shape: torch.randn(shape.shape, generator=generator) * 0.2, shapes
    )


def test_a_trained_eagle_head_is_right_more_often() -> None:
    layer = random_tree(PARAMS.tree["layers"][0])
    layer["post_norm"] = torch.ones(HIDDEN)  # type: ignore[index]
    tree = {"fc": random_tree(torch.empty(HIDDEN, 2 * HIDDEN)), "layers": (layer,)}
    learnt = train_eagle(TARGET, PARAMS, CONFIG, tree, spoken(TARGET, PARAMS, prompts(0, 24)), steps=120)
    drafter = eagle(TARGET, CONFIG, num_drafts=NUM_DRAFTS)
    shares = [
        check_greedy(with_drafter(TARGET, drafter), with_draft_params(PARAMS, Params(own)), drafter, UNSEEN)
        for own in (tree, learnt)
    ]
    assert shares[0] < 0.15 and shares[1] > 0.5, shares


def test_trained_medusa_heads_are_right_more_often() -> None:
    one = {
        "layers": ({"weight": torch.empty(HIDDEN, HIDDEN), "bias": torch.empty(HIDDEN)},),
        "out": torch.empty(VOCAB, HIDDEN),
    }
    tree = tuple(random_tree(one, seed) for seed in range(NUM_DRAFTS))
    learnt = train_medusa(TARGET, PARAMS, tree, spoken(TARGET, PARAMS, prompts(0, 24)), steps=120)
    drafter = medusa(num_drafts=NUM_DRAFTS)
    shares = [
        check_greedy(TARGET, with_draft_params(PARAMS, Params(own)), drafter, UNSEEN)
        for own in (tree, learnt)
    ]
    assert shares[0] < 0.15 and shares[1] > 0.5, shares
