"""How things are timed: the same for every engine, given only a way to generate."""

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import attrs
import torch

from purestep.pure.errors import BenchmarkError, InvalidParameterError
from purestep.state.bench.clocks import Clock

PREFILL_SEED = (
    1 << 32
)  # of prompts for prefill, far from those of batches for decode: none is a prefix of another
Prompts = list[list[int]]
Tokens = Sequence[Sequence[int]]

SAMPLINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "decode": MappingProxyType({"temperature": 0.0}),
        "sampled": MappingProxyType({"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
    }
)


class Generate(Protocol):
    """So many tokens for each prompt, whatever they are: an end of sequence does not end it."""

    def __call__(self, prompts: Prompts, num_tokens: int, sampling: Mapping[str, Any]) -> Tokens: ...


@attrs.frozen(kw_only=True)
class Method:
    """How much is run. Decode is the time of `long` output tokens less that of `short` ones, by their difference."""

    context: int = 1024  # tokens of a prompt
    short: int = 32
    long: int = 160
    prefill_batch: int = 16
    prefill_length: int = 2048
    repeats: int = 3  # that are counted; one before them warms up
    host_steps: int = 50

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(Method):
            if getattr(self, field.name) < 1:
                raise InvalidParameterError(
                    f"{field.name}={getattr(self, field.name)}: it must be at least 1"
                )
        if self.short + self.host_steps > self.long:
            raise InvalidParameterError(
                f"short={self.short}, host_steps={self.host_steps}, long={self.long}: the first two together must not "
                "be more than the third"
            )

    @property
    def mean_context(self) -> float:
        """Tokens that a step which is timed finds computed, on average."""
        return self.context + (self.short + self.long) / 2

    @property
    def length(self) -> int:
        """Tokens of a request at its longest."""
        return self.context + self.long


GPU_METHOD = Method()
CPU_METHOD = Method(context=128, short=8, long=40, prefill_batch=1, prefill_length=512, host_steps=20)
TINY_METHOD = Method(context=32, short=4, long=20, prefill_batch=2, prefill_length=64, host_steps=10)


def random_prompts(vocab_size: int, batch: int, length: int, *, seed: int) -> Prompts:
    """Prompts of random tokens; for another seed others, with next to nothing in common."""
    generator = torch.Generator().manual_seed(seed)
    prompts: Prompts = torch.randint(vocab_size, (batch, length), generator=generator).tolist()
    return prompts


def decode_ms(
    generate: Generate, prompts: Prompts, sampling: Mapping[str, Any], method: Method, clock: Clock
) -> float:
    """Milliseconds of a decode step of these prompts, with all that an engine does for it; medians over the repeats.

    What is the same for a short and a long output falls out: prefill, or looking prompts up in a cache. Noise does
    not: on a busy machine the difference of two times can be anything.
    """
    seconds: dict[int, list[float]] = {method.short: [], method.long: []}
    for num_tokens in (method.short, method.long) * (1 + method.repeats):
        seconds[num_tokens].append(_timed(generate, prompts, num_tokens, sampling, clock))
    short, long = (statistics.median(seconds[n][1:]) for n in (method.short, method.long))
    return (long - short) / (method.long - method.short) * 1e3


def prefill_tok_s(generate: Generate, vocab_size: int, method: Method, clock: Clock) -> float:
    """Prompt tokens per second up to the first output token; each repeat has prompts that none had before."""
    seconds = []
    for repeat in range(1 + method.repeats):
        seed = PREFILL_SEED + repeat
        prompts = random_prompts(vocab_size, method.prefill_batch, method.prefill_length, seed=seed)
        seconds.append(_timed(generate, prompts, 1, SAMPLINGS["decode"], clock))
    return method.prefill_batch * method.prefill_length / statistics.median(seconds[1:])


def _timed(
    generate: Generate, prompts: Prompts, num_tokens: int, sampling: Mapping[str, Any], clock: Clock
) -> float:
    """Seconds, of which it is known that they were spent on what was asked for."""
    begun = clock.idle()
    tokens = generate(prompts, num_tokens, sampling)
    seconds = clock.idle() - begun
    if [len(own) for own in tokens] != [num_tokens] * len(prompts):
        raise BenchmarkError(
            f"{len(prompts)} prompts were to get {num_tokens} tokens each, and got {sorted({len(t) for t in tokens})} "
            f"({len(tokens)} results): a time of that means nothing. Give the engine room for all of them"
        )
    return seconds
