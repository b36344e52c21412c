"""Penalties against their definition, and the requests that have none."""

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference.penalties import penalize
from tests.laws import equal

VOCAB = 5
ID = st.integers(-1, VOCAB)  # placeholders and vocabulary padding among them
REQUEST = st.fixed_dictionaries(
    {
        "logits": st.lists(
            st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 0.5, 3.0]), min_size=VOCAB, max_size=VOCAB
        ),
        "prompt": st.lists(ID, max_size=4),
        "outputs": st.lists(ID, max_size=4),
        "repetition": st.sampled_from([0.5, 1.0, 2.0]),
        "frequency": st.sampled_from([-0.5, 0.0, 0.25]),
        "presence": st.sampled_from([-1.0, 0.0, 0.125]),
    }
)
Request = dict[str, Any]


def run(requests: list[Request], junk: int = 2) -> Tensor:
    """`penalize` on a batch; what lies beyond the histories is `junk`."""
    both = [r["prompt"] + r["outputs"] for r in requests]
    history = torch.tensor([ids + [junk] * (9 - len(ids)) for ids in both], dtype=torch.int32)
    starts = torch.tensor([len(r["prompt"]) for r in requests], dtype=torch.int32)
    ends = torch.tensor([len(ids) for ids in both], dtype=torch.int32)
    logits, *parameters = (
        torch.tensor([r[name] for r in requests], dtype=torch.float32)
        for name in ("logits", "repetition", "frequency", "presence")
    )
    return penalize(logits, history, starts, ends, *parameters)


def by_definition(request: Request) -> list[float]:
    penalized = []
    for token, logit in enumerate(request["logits"]):
        count = request["outputs"].count(token)
        if count or token in request["prompt"]:
            logit = logit / request["repetition"] if logit > 0 else logit * request["repetition"]
        penalized.append(logit - request["frequency"] * count - request["presence"] * (count > 0))
    return penalized


@given(st.lists(REQUEST, min_size=1, max_size=4))
def test_penalties_are_their_definition(requests: list[Request]) -> None:
    """All numbers here are powers of two, so the definition holds exactly."""
    assert run(requests).tolist() == [by_definition(request) for request in requests]


ZERO = st.sampled_from([0.0, -0.0])


@given(REQUEST, ZERO, ZERO, st.lists(REQUEST, max_size=3))
def test_neutral_request_keeps_every_bit(
    request: Request, frequency: float, presence: float, others: list[Request]
) -> None:
    """A penalised request that joins or leaves changes not a bit for one without penalties."""
    request = request | {"repetition": 1.0, "frequency": frequency, "presence": presence}
    request["logits"] = [*request["logits"][1:], math.nan]
    assert equal(run([request, *others])[0], torch.tensor(request["logits"]))


@given(st.lists(REQUEST, min_size=1, max_size=4), st.data())
def test_neighbours_and_junk_do_not_matter(requests: list[Request], data: st.DataObject) -> None:
    """A request's row is what it gets alone, whatever neighbours and columns beyond the history hold."""
    place = data.draw(st.integers(0, len(requests) - 1))
    junk = data.draw(st.integers(-1, VOCAB))
    assert equal(run(requests, junk)[place], run([requests[place]])[0])


def test_example() -> None:
    """logits [2, -1, 0.5], prompt {0}, outputs [1, 1], repetition 2, frequency 0.5, presence 0.1."""
    one = torch.ones(1)
    history = torch.tensor([[0, 1, 1]])
    ours = penalize(torch.tensor([[2.0, -1.0, 0.5]]), history, one, 3 * one, 2 * one, 0.5 * one, 0.1 * one)
    torch.testing.assert_close(ours, torch.tensor([[1.0, -3.1, 0.5]]))
