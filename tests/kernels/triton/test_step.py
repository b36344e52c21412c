"""Whole steps on Triton kernels: the tokens, the ledger and the cache of the reference."""

import pytest
import torch

from purestep.kernels.reference import reference
from purestep.kernels.triton import cuda_donating
from purestep.kernels.types import Kernels
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.state import StepState
from tests.kernels.triton.device import DEVICE, quiet
from tests.speculation import prefilled, verified
from tests.tiny import GREEDY, Loop, cached_requests, new_request, scheduled, tiny_llama

pytestmark = [quiet, pytest.mark.skipif(DEVICE == "cuda", reason="the loop of these tests runs on the CPU")]

RANDOM = SamplingParams(
    temperature=0.8, top_k=7, top_p=0.9, seed=5, max_tokens=None, ignore_eos=True, logprobs=3
)
PENALIZED = SamplingParams(
    temperature=1.3,
    min_p=0.05,
    seed=6,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    max_tokens=None,
    ignore_eos=True,
)
LIMITS = BatchLimits(4, 64, 64, (4,), (30,))


def played(kernels: Kernels) -> Loop:
    """A prompt in two chunks, one whole, decodes beside them, and one more request once a row has finished."""
    model, params = tiny_llama(dtype=torch.float32)
    loop = Loop(model, params, LIMITS, kernels=kernels)
    a = new_request("a", (1, 2, 3, 4, 5, 6, 7), ((1, 2, 3),), GREEDY)
    b = new_request("b", (8, 9), ((4, 5, 6),), RANDOM, stream=1)
    loop.step(scheduled(a, b, counts={"a": 4, "b": 2}))
    loop.step(scheduled(cached=cached_requests(loop.batch, "a", "b"), counts={"a": 3, "b": 1}))
    loop.decode("b", "a")
    c = new_request("c", (3, 3), ((7, 8),), PENALIZED, stream=2)
    loop.step(scheduled(c, cached=cached_requests(loop.batch, "a"), counts={"a": 1, "c": 2}, finished=("b",)))
    loop.decode("a", "c")
    return loop


def test_equals_reference() -> None:
    """Chunks, decodes, random and penalized requests."""
    ours, expected = played(cuda_donating()), played(reference)
    assert torch.equal(ours.state.ledger.table, expected.state.ledger.table)
    assert torch.equal(ours.state.token_ids[:-1], expected.state.token_ids[:-1])
    for kv, wanted in zip(ours.state.kv, expected.state.kv, strict=True):
        torch.testing.assert_close(kv[1:], wanted[1:], rtol=1e-4, atol=1e-5)


def speculated(kernels: Kernels) -> tuple[StepState, list[list[list[int]]]]:
    """Three steps that verify drafts, right ones and wrong ones, of requests of every kind."""
    model, params = tiny_llama(dtype=torch.float32)
    kinds = (GREEDY, RANDOM, PENALIZED)
    state = prefilled(model, params, [((1, 2, 3 + i), own) for i, own in enumerate(kinds)], kernels=kernels)
    told = []
    for drafts in (
        {0: [11, 11, 8], 1: [], 2: [5]},
        {1: [2, 3], 0: [4, 4, 4]},
        {2: [1, 1, 1], 1: [3], 0: [11]},
    ):
        state, output = verified(model, params, state, drafts, kernels=kernels)
        told.append(output.sampled_token_ids.tolist())
    return state, told


def test_steps_with_drafts_equal_reference() -> None:
    """The same drafts stand; tokens, ledger and cache are the reference's, and the leaves stay where they are."""
    (ours, tokens), (expected, wanted) = speculated(cuda_donating()), speculated(reference)
    assert tokens == wanted
    assert torch.equal(ours.ledger.table, expected.ledger.table)
    assert torch.equal(ours.token_ids[:-1], expected.token_ids[:-1])
    for kv, own in zip(ours.kv, expected.kv, strict=True):
        torch.testing.assert_close(kv[1:], own[1:], rtol=1e-4, atol=1e-5)


def test_state_stays_where_it_lies() -> None:
    """The leaves that a step writes come back in the same storage."""
    model, params = tiny_llama(dtype=torch.float32)
    loop = Loop(model, params, LIMITS, kernels=cuda_donating())

    def places() -> list[int]:
        state = loop.state
        sampling = state.sampling.floats, state.sampling.table
        leaves = (state.ledger.table, state.token_ids, *sampling, *state.block_tables, *state.kv)
        return [leaf.data_ptr() for leaf in leaves]

    before = places()
    loop.step(scheduled(new_request("a", (1, 2, 3), ((1, 2),)), counts={"a": 3}))
    loop.decode("a")
    assert places() == before
