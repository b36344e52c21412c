"""Mode resolution: laws first, then every row of its rules."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.dispatch import dispatch_keys
from purestep.pure.errors import CaptureSizeError, CUDAGraphModeError
from purestep.pure.graph_modes import has_pieces, resolve_cudagraph_mode
from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig
from purestep.pure.models.llama import llama
from purestep.pure.models.model import KVLayerSpec
from purestep.pure.models.module import module_model
from purestep.pure.records.dispatch import AttentionCGSupport, CUDAGraphMode, DispatchConfig
from tests.laws import assert_pure
from tests.profiles import examples

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, FULL_AND_PIECEWISE = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
NEVER, SINGLE = AttentionCGSupport.NEVER, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM, ALWAYS = AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.ALWAYS
SIZES = DispatchConfig((1, 2, 4, 8), 8)

modes = st.sampled_from(CUDAGraphMode)
levels = st.lists(st.sampled_from(AttentionCGSupport), max_size=3)


@examples(4)  # few hundred cases exist, and all should be seen
@given(modes, levels, st.booleans(), st.integers(1, 4), st.integers(1, 4))
def test_what_is_resolved_can_run_and_stays_as_it_is(
    mode: CUDAGraphMode, support: list[AttentionCGSupport], pieces: bool, query_len: int, ranks: int
) -> None:
    """No full graph that attention can not run in, no pieces of a whole; resolving again changes nothing.

    Its keys exist: no size is left that a uniform batch could not use. What is refused is refused by name.
    """
    arguments: dict[str, Any] = {
        "support": tuple(support),
        "pieces": pieces,
        "uniform_query_len": query_len,
        "sequence_parallel_size": ranks,
    }
    try:
        resolved, config = assert_pure(resolve_cudagraph_mode, mode, SIZES, **arguments)
    except CUDAGraphModeError:
        assert (mode.has_mode(PIECEWISE) and not pieces) or (mode is FULL and NEVER in support)
        return
    except CaptureSizeError:
        assert ranks % query_len and query_len % ranks
        return
    level = min(support, default=ALWAYS)
    if resolved.mixed_mode is FULL:
        assert level is ALWAYS
    if resolved.decode_mode is FULL:
        assert level >= (UNIFORM if query_len > 1 else SINGLE)
    assert pieces or not resolved.has_mode(PIECEWISE)
    assert resolve_cudagraph_mode(resolved, config, **arguments) == (resolved, config)
    dispatch_keys(config, resolved, query_len)


@pytest.mark.parametrize(
    ("mode", "level", "pieces", "query_len", "expected"),
    [
        (NONE, NEVER, False, 1, NONE),
        (PIECEWISE, NEVER, True, 1, PIECEWISE),
        (FULL, ALWAYS, True, 1, FULL),
        (FULL, ALWAYS, False, 3, FULL),
        (FULL, UNIFORM, True, 1, FULL_AND_PIECEWISE),
        (FULL, SINGLE, False, 1, DECODE_ONLY),
        (FULL, UNIFORM, True, 3, FULL_AND_PIECEWISE),
        (FULL, SINGLE, True, 3, PIECEWISE),
        (FULL, SINGLE, False, 3, NONE),
        (FULL_AND_PIECEWISE, SINGLE, True, 1, FULL_AND_PIECEWISE),
        (FULL_AND_PIECEWISE, SINGLE, True, 2, PIECEWISE),
        (FULL_AND_PIECEWISE, NEVER, True, 1, PIECEWISE),
        (DECODE_ONLY, NEVER, True, 1, PIECEWISE),
        (DECODE_ONLY, NEVER, False, 1, NONE),
        (DECODE_ONLY, SINGLE, False, 2, NONE),
        (DECODE_ONLY, UNIFORM, False, 2, DECODE_ONLY),
    ],
)
def test_modes_by_what_attention_supports(
    mode: CUDAGraphMode, level: AttentionCGSupport, pieces: bool, query_len: int, expected: CUDAGraphMode
) -> None:
    """The least support of all groups decides; full graphs give way to pieces if there are any, else to none."""
    resolved, _ = resolve_cudagraph_mode(
        mode, SIZES, support=(ALWAYS, level), pieces=pieces, uniform_query_len=query_len
    )
    assert resolved is expected


@pytest.mark.parametrize(
    ("sizes", "query_len", "ranks", "expected"),
    [
        ((1, 2, 4, 8), 1, 1, (1, 2, 4, 8)),
        ((1, 2, 4, 8), 3, 1, (3, 6)),
        ((1, 2, 4, 8, 16, 24), 3, 1, (3, 6, 9, 18, 24)),
        ((1, 2, 4, 8), 2, 4, (4, 8)),
        ((1, 2, 4, 8), 4, 2, (4, 8)),
        ((5,), 3, 1, (3,)),
    ],
)
def test_sizes_become_multiples_of_a_uniform_request(
    sizes: tuple[int, ...], query_len: int, ranks: int, expected: tuple[int, ...]
) -> None:
    """Rounded up, within the largest, once each; the smallest possible where none is left."""
    mode, config = resolve_cudagraph_mode(
        DECODE_ONLY,
        DispatchConfig(sizes, 8),
        support=(ALWAYS,),
        pieces=True,
        uniform_query_len=query_len,
        sequence_parallel_size=ranks,
    )
    assert (mode, config.capture_sizes, config.largest_size) == (DECODE_ONLY, expected, expected[-1])


def test_sizes_that_fit_no_uniform_request_are_refused() -> None:
    """Graphs too small for one request; tokens a request and ranks that do not divide each other."""
    arguments: dict[str, Any] = {"support": (ALWAYS,), "pieces": True}
    with pytest.raises(CaptureSizeError, match="multiples of 4 tokens, and capture sizes end at 2: raise"):
        resolve_cudagraph_mode(DECODE_ONLY, DispatchConfig((1, 2), 8), **arguments, uniform_query_len=4)
    with pytest.raises(CaptureSizeError, match="by 3 tokens a request and by 2 sequence-parallel"):
        resolve_cudagraph_mode(DECODE_ONLY, SIZES, **arguments, uniform_query_len=3, sequence_parallel_size=2)


def test_modes_that_can_not_be_had_are_refused() -> None:
    """Attention that no graph can hold; pieces of a whole; more requests than recurrent state."""
    with pytest.raises(CUDAGraphModeError, match=r"supports no graph \(NEVER\): use PIECEWISE"):
        resolve_cudagraph_mode(FULL, SIZES, support=(ALWAYS, NEVER), pieces=True)
    for mode in (PIECEWISE, FULL_AND_PIECEWISE):
        with pytest.raises(CUDAGraphModeError, match=f"mode {mode.name} .* this model is one piece"):
            resolve_cudagraph_mode(mode, SIZES, support=(ALWAYS,), pieces=False)
    with pytest.raises(CUDAGraphModeError, match="full graphs for 8 requests, and recurrent state for 7"):
        resolve_cudagraph_mode(FULL, SIZES, support=(ALWAYS,), pieces=True, num_state_rows=7)
    resolve_cudagraph_mode(FULL, SIZES, support=(ALWAYS,), pieces=True, num_state_rows=8)
    resolve_cudagraph_mode(PIECEWISE, SIZES, support=(ALWAYS,), pieces=True, num_state_rows=1)


def test_a_torch_module_is_one_piece_and_a_llama_is_many() -> None:
    """What attends inside a module can not be told apart from the rest."""
    attention = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4)
    config = ModelConfig(8, 8, 8, 1, attention, RopeConfig(), 1e-5, True, 16)
    assert has_pieces(llama(config))
    layers = (KVLayerSpec(1, 4),)
    module = torch.nn.Linear(1, 1)
    model = module_model(module, kv_layers=layers, vocab_size=8, max_position_embeddings=16)
    assert not has_pieces(model)
