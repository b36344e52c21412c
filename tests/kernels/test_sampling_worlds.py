"""Every sampling kernel in four worlds: eager, vmap, a make_fx trace, and one full compiled graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from purestep.kernels.reference.constraints import add_bias, allow_only, ban_bad_words, ban_tokens
from purestep.kernels.reference.draw import draw, greedy, scale_by_temperature, temperature_offset
from purestep.kernels.reference.grammar import apply_grammar_bitmask
from purestep.kernels.reference.logprobs import gather_ids, gather_logprobs, score
from purestep.kernels.reference.ngram import propose_ngram
from purestep.kernels.reference.penalties import penalize
from purestep.kernels.reference.philox import uniforms
from purestep.kernels.reference.truncate import truncate
from purestep.kernels.reference.verify import count_accepted, draw_last, verify_greedy
from tests.laws import assert_pure

REQS, VOCAB, ENTRIES = 3, 10, 5


def random_arguments(seed: int) -> dict[str, Tensor]:
    """One argument of each kind."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def real(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    return {
        "logits": 4 * real(REQS, VOCAB),
        "noise": real(REQS, VOCAB) + 0.1,
        "index": whole(-1, REQS + 1, ENTRIES),
        "ids": whole(0, VOCAB, ENTRIES),
        "values": real(ENTRIES),
        "flags": whole(0, 2, REQS) > 0,
        "bits": whole(-(2**31), 2**31, 2, 1).int(),
        "masks": whole(-1, 2, REQS),
        "tokens": whole(-1, VOCAB, REQS, 4),
        "chosen": whole(0, VOCAB, REQS),
        "history": whole(0, VOCAB, REQS, 7),
        "starts": whole(0, 3, REQS),
        "ends": whole(3, 8, REQS),
        "words": torch.cat([whole(0, VOCAB, ENTRIES, 1), whole(-1, 1, ENTRIES, 1)], 1),
        "unit": real(REQS) + 0.01,
        "top_k": whole(0, 6, REQS),
        "seed": whole(-(2**40), 2**40, REQS),
        "stream": whole(-(2**40), 2**40, REQS),
        "targets": 4 * real(REQS, 4, VOCAB),
        "short_history": whole(0, 2, REQS, 8).int(),
        "threes": torch.full((REQS,), 3),
        "best": whole(0, 3, REQS, 4),
        "drafts": whole(-1, 3, REQS, 3),
        "unsound": whole(0, 4, REQS, 4) == 0,
        "q": real(REQS, 3, VOCAB).softmax(-1),
        "uniform": real(REQS, 3) * 0.1,
    }


def draw_uniforms(seed: Tensor, stream: Tensor, index: Tensor) -> Tensor:
    return uniforms(seed, stream, index, purpose=2, width=VOCAB)


def score_three(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return score(logits, ids, 3)


def gather_three(logprobs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return gather_logprobs(logprobs, ids, 3)


def ngrams(token_ids: Tensor, rows: Tensor, lengths: Tensor, room: Tensor) -> Tensor:
    return propose_ngram(token_ids, rows, lengths, room, min_n=1, max_n=3, num_drafts=3)


def count_guesses(logits: Tensor, drafts: Tensor, num_drafts: Tensor, uniform: Tensor) -> Tensor:
    return count_accepted(logits, drafts, num_drafts, None, uniform)


def draw_after_guesses(
    logits: Tensor, drafts: Tensor, num_drafts: Tensor, accepted: Tensor, exponential: Tensor
) -> Tensor:
    return draw_last(logits, drafts, num_drafts, accepted, None, exponential)


KERNELS: list[tuple[Callable[..., Any], str]] = [
    (apply_grammar_bitmask, "logits bits masks"),
    (allow_only, "logits flags index ids"),
    (add_bias, "logits index ids values"),
    (ban_tokens, "logits tokens flags"),
    (ban_bad_words, "logits history starts ends index words"),
    (penalize, "logits history starts ends unit unit unit"),
    (scale_by_temperature, "logits unit"),
    (temperature_offset, "logits unit"),
    (truncate, "logits top_k unit unit"),
    (draw_uniforms, "seed stream starts"),
    (draw, "logits noise"),
    (greedy, "logits"),
    (gather_three, "logits chosen"),
    (score_three, "logits chosen"),
    (gather_ids, "logits tokens"),
    (verify_greedy, "best drafts unsound"),
    (count_accepted, "targets drafts starts q uniform"),
    (count_guesses, "targets drafts starts uniform"),
    (draw_last, "targets drafts starts starts q noise"),
    (draw_after_guesses, "targets drafts threes starts noise"),
    (ngrams, "short_history starts ends top_k"),
]
each_kernel = pytest.mark.parametrize(("kernel", "names"), KERNELS, ids=[k.__name__ for k, _ in KERNELS])


def arguments(names: str, seed: int) -> list[Tensor]:
    every = random_arguments(seed)
    return [every[name] for name in names.split()]


def assert_equal(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@each_kernel
def test_arguments_are_not_written(kernel: Callable[..., Any], names: str) -> None:
    assert_pure(kernel, *arguments(names, 0))


@each_kernel
def test_vmap_is_eager(kernel: Callable[..., Any], names: str) -> None:
    """A batch of batches gives what each gives."""
    sets = [arguments(names, seed) for seed in (0, 1, 2)]
    stacked = [torch.stack(column) for column in zip(*sets, strict=True)]
    ours = torch.func.vmap(kernel)(*stacked)
    for place, each in enumerate(sets):
        assert_equal(tree_map(lambda x, p=place: x[p], ours), kernel(*each))


@each_kernel
def test_trace_is_eager(kernel: Callable[..., Any], names: str) -> None:
    """A graph traced from one set of values is right for another: nothing was read while tracing."""
    graph = make_fx(kernel, tracing_mode="fake")(*arguments(names, 0))
    assert_equal(graph(*arguments(names, 1)), kernel(*arguments(names, 1)))


@each_kernel
def test_compiled_is_eager(kernel: Callable[..., Any], names: str) -> None:
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    for seed in (0, 1):
        assert_equal(compiled(*arguments(names, seed)), kernel(*arguments(names, seed)))


def test_gradient_is_that_of_the_distribution() -> None:
    """d log p(token) / d logits through bias, penalties, temperature and cuts, in float64."""
    given = random_arguments(4)
    logits, temperature = given["logits"].double(), given["unit"].double()
    penalty = torch.full((REQS,), 1.5).double()
    off = torch.zeros(REQS).double()

    def processed(logits: Tensor) -> Tensor:
        logits = add_bias(logits, given["index"], given["ids"], given["values"])
        logits = penalize(logits, given["history"], given["starts"], given["ends"], penalty, off, off)
        logits = scale_by_temperature(logits, temperature)
        return truncate(logits, torch.full((REQS,), 4), torch.full((REQS,), 0.9), torch.full((REQS,), 0.05))

    token = greedy(processed(logits))
    gradient = torch.func.grad(lambda x: processed(x).log_softmax(-1).gather(1, token[:, None]).sum())(logits)
    history, column = given["history"], torch.arange(7)
    known = (column < given["ends"][:, None])[:, :, None] & (history[:, :, None] == torch.arange(VOCAB))
    slope = (
        torch.where(known.any(1), 1 / penalty[0], 1.0) / temperature[:, None]
    )  # all logits here are positive
    chosen = torch.nn.functional.one_hot(token, VOCAB)
    torch.testing.assert_close(
        gradient, slope * (chosen - processed(logits).softmax(-1)), rtol=1e-12, atol=1e-12
    )
