"""Our engine, with room for what is timed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from purestep.pure.errors import InvalidParameterError
from purestep.pure.records.layout import LayoutBounds, sampler_features, sampler_shape
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.bench.floors import kv_bytes
from purestep.state.bench.methods import Generate, Method, Prompts, Tokens
from purestep.state.bench.shapes import Subject
from purestep.state.engine import Engine
from purestep.state.loading.loaded import LoadedModel

BLOCK_SIZE = 16
SPARE_TOKENS = 64  # room of a request beyond its tokens: steps begun ahead, its last block


def decode_engine(
    loaded: LoadedModel, subject: Subject, method: Method, batches: Sequence[int], **sizes: Any
) -> Engine:
    """An engine that keeps the prompts of the largest batch, and gives a request all blocks it needs at once.

    Raises:
        InvalidParameterError: requests longer than the model's positions reach.
    """
    longest, most, horizon = method.length + SPARE_TOKENS, max(batches), method.long + SPARE_TOKENS // 2
    reach = loaded.model.max_position_embeddings
    if longest > reach:
        raise InvalidParameterError(
            f"context={method.context}: with {method.long} output tokens and {SPARE_TOKENS} spare ones that is more "
            f"than the {reach} positions the model knows; give a shorter context"
        )
    token_bytes = kv_bytes(loaded.model.kv_layers, 1, subject.torch_dtype.itemsize)
    room = (
        method.context + 2 * horizon + 2 * BLOCK_SIZE
    )  # blocks are given ahead while as many again stay free
    settings: dict[str, Any] = {
        "dtype": subject.torch_dtype,
        "device": subject.device,
        "block_size": BLOCK_SIZE,
        "kv_cache_bytes": int(token_bytes * (most * room + 4096)),
        "max_model_len": longest,
        "max_num_reqs": most,
        "max_num_batched_tokens": max(8192, BLOCK_SIZE * most),
        "block_horizon": horizon,
        "capture_sizes": tuple(sorted(set(batches))),
        "capture_progress": False,
    }
    return Engine(loaded, **(settings | sizes))


def steps_at_once(engine: Engine, batch: int, sampling: Mapping[str, Any]) -> int:
    """How many decode steps of so many prompts the engine runs by one launch."""
    features = sampler_features(SamplingParams(**sampling), engine.limits.vocab_size, ())
    bounds = LayoutBounds(
        num_reqs=batch, num_tokens=batch, max_query_len=1, sampler=sampler_shape(features, -1)
    )
    return engine.turns.steps_at_once(bounds)


def prefill_engine(loaded: LoadedModel, subject: Subject, method: Method, **sizes: Any) -> Engine:
    """An engine for the prompts of prefill, which keeps none of them.

    Raises:
        InvalidParameterError: prompts longer than the model's positions reach.
    """
    batch, longest = method.prefill_batch, method.prefill_length + SPARE_TOKENS
    reach = loaded.model.max_position_embeddings
    if longest > reach:
        raise InvalidParameterError(
            f"prompts of {method.prefill_length} tokens for prefill, and {SPARE_TOKENS} spare ones, are more than the "
            f"{reach} positions the model knows: leave prefill out"
        )
    token_bytes = kv_bytes(loaded.model.kv_layers, 1, subject.torch_dtype.itemsize)
    settings: dict[str, Any] = {
        "dtype": subject.torch_dtype,
        "device": subject.device,
        "block_size": BLOCK_SIZE,
        "kv_cache_bytes": int(token_bytes * (batch * (longest + BLOCK_SIZE) + 4096)),
        "max_model_len": longest,
        "max_num_reqs": batch,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "capture_sizes": (batch,),
        "capture_progress": False,
    }
    return Engine(loaded, **(settings | sizes))


def generator_of(engine: Engine) -> Generate:
    """Offline generation, as a user calls it, without text."""

    def generate(prompts: Prompts, num_tokens: int, sampling: Mapping[str, Any]) -> Tokens:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False, **sampling)
        results = engine.generate(prompts, params, progress=False)
        return [result.outputs[0].token_ids for result in results]

    return generate


@contextmanager
def opened(loaded: LoadedModel, subject: Subject) -> Iterator[Generate]:
    """Generation by an engine of the usual size."""
    settings: dict[str, Any] = {"capture_progress": False}
    with Engine(loaded, dtype=subject.torch_dtype, device=subject.device, **settings) as engine:
        yield generator_of(engine)
