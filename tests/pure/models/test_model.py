"""Parameters in the form that a set of kernels wants."""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from purestep.kernels.record import replace
from purestep.kernels.reference import reference
from purestep.pure.forward import compute_logits, model_forward
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.models.model import prepare_params
from tests.laws import equal
from tests.pure.models.paging import empty_cache, lay_out, paging, whole

LENGTHS = [5, 2]


@attrs.frozen
class Marked:
    """A weight in a form that only one set of kernels knows."""

    weight: Tensor


def linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    assert isinstance(weight, Marked), "a weight of a linear map that was not prepared"
    return reference.linear(x, weight.weight, bias)


def embed(weight: Any, ids: Tensor) -> Tensor:
    return reference.embed(weight.weight if isinstance(weight, Marked) else weight, ids)


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_of_linear_maps_are_prepared_and_no_others(is_tied: bool) -> None:
    """With kernels that know only their own form of a weight, a model runs and gives the same logits."""
    config = replace(tiny_config(), tied_embeddings=is_tied)
    model, params = llama(config), random_params(config, std=0.5)
    own = replace(reference, prepare=Marked, linear=linear, embed=embed)
    ids = [torch.arange(length) for length in LENGTHS]
    where = paging(LENGTHS)
    inputs, metadata = lay_out(ids, whole(LENGTHS)[0], where)
    results = []
    for kernels in (reference, own):
        prepared = prepare_params(model, params, kernels=kernels)
        hidden, _ = model_forward(
            model, prepared, inputs, empty_cache(model, where, torch.float32), metadata, kernels=kernels
        )
        results.append(compute_logits(model, prepared, hidden, torch.arange(sum(LENGTHS)), kernels=kernels))
    assert equal(*results)


def test_preparing_changes_no_parameters() -> None:
    """The tree that was given is as it was, the version is kept, and what is not prepared is the same object."""
    config = tiny_config()
    params = replace(random_params(config), version=7)
    prepared = prepare_params(llama(config), params, kernels=replace(reference, prepare=Marked))
    assert prepared.version == 7
    assert prepared.tree["norm"] is params.tree["norm"]
    assert prepared.tree["layers"][0]["qkv"].weight is params.tree["layers"][0]["qkv"]
    assert isinstance(params.tree["layers"][0]["qkv"], Tensor)
    assert prepare_params(llama(config), params, kernels=reference).tree["embed"] is params.tree["embed"]
