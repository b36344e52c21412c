"""The batch-invariant set: the reference's values, and on a GPU the same bits for a row in every batch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference import reference
from tests.kernels.triton.cases import attention_case, relative_error
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import assert_pure, equal

from purestep.kernels.triton import cuda_donating, cuda_invariant  # isort: skip
from purestep.kernels.triton import fixed  # isort: skip

pytestmark = quiet

OURS = cuda_invariant()
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dtype)


@few(16)
@given(
    st.sampled_from([1, 5, 16, 17, 70, 257]),
    st.sampled_from([(256, 40), (200, 24), (512, 70)]),
    st.booleans(),
    st.sampled_from(list(ERROR)),
    st.integers(0, 2**31),
)
def test_products(tokens: int, shape: tuple[int, int], has_bias: bool, dtype: torch.dtype, seed: int) -> None:
    """With slices and without them, by every way that a number of rows decides on."""
    width, outs = shape
    x, weight = normal(tokens, width, dtype=dtype, seed=seed), normal(outs, width, dtype=dtype, seed=seed + 1)
    bias = normal(outs, dtype=dtype, seed=seed + 2) if has_bias else None
    ours = assert_pure(OURS.linear, x, weight, bias)
    wide = [None if part is None else part.double() for part in (x, weight, bias)]
    assert ours.dtype == dtype and relative_error(ours, reference.linear(*wide)) < ERROR[dtype]
    logits = OURS.logits(OURS, x, weight)
    assert logits.dtype == torch.float32
    assert relative_error(logits, reference.linear(wide[0], wide[1], None)) < ERROR[torch.float32]


def test_slices_are_decided_by_the_weight() -> None:
    assert fixed.num_slices(2048, 8192) == 4
    assert fixed.num_slices(16384, 2048) == fixed.num_slices(2048, 200) == 1


def test_other_types_are_refused() -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(TypeError, match="of one type"):
        OURS.linear(x, x.float())
    with pytest.raises(TypeError, match="float32"):
        OURS.linear(x.double(), x.double())


@pytest.mark.parametrize("requests", [[(70, 1), (0, 1), (3, 1)], [(70, 34), (0, 2), (1, 1), (40, 9)]])
@pytest.mark.parametrize("form", [{}, {"sliding_window": 20}, {"soft_cap": 4.0}])
@pytest.mark.parametrize("dtype", ERROR)
def test_attention(requests: list[tuple[int, int]], form: dict[str, Any], dtype: torch.dtype) -> None:
    """Decoding and mixed batches; slots that nobody is to see hold NaN."""
    case = attention_case(requests, dtype=dtype, device=DEVICE, seed=3, **form)
    out, kv = case.run(OURS.attend)
    assert relative_error(out, case.expected()) < {**ERROR, torch.float16: 1e-3}[dtype]
    assert equal(kv[1:], case.run(cuda_donating().attend)[1][1:])  # the null block has several writers


def _rows_alone(tokens: int, width: int, outs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight = normal(tokens, width, dtype=dtype, seed=0), normal(outs, width, dtype=dtype, seed=1)
    alone = torch.cat([OURS.linear(row[None], weight) for row in x[:20]])
    return OURS.linear(x, weight)[:20], alone


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("tokens", [8, 16, 17, 64, 200, 300, 1000])
@pytest.mark.parametrize("shape", [(2048, 2048), (8192, 2048), (2048, 16384), (1024, 3072), (600, 515)])
def test_a_row_has_the_same_bits_in_every_batch(
    tokens: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Every way that a number of rows decides on, for weights with slices and without."""
    together, alone = _rows_alone(tokens, *shape, dtype)
    assert equal(together, alone[: len(together)])


@pytest.mark.gpu
@pytest.mark.parametrize("form", [{}, {"sliding_window": 300}])
def test_a_query_has_the_same_bits_however_its_prompt_is_cut(form: dict[str, Any]) -> None:
    """A prompt whole, in chunks, and its last token as a decode beside others."""
    shape: dict[str, Any] = dict(heads=32, kv_heads=8, dim=64, dtype=torch.bfloat16, device=DEVICE, **form)
    whole = attention_case([(700, 700)], seed=5, **shape)
    expected, kv = whole.run(OURS.attend)
    for first, last in ((0, 1), (0, 130), (130, 131), (333, 700), (699, 700)):
        part = {name: whole.tensors[name][first:last] for name in ("q", "k", "v", "slot_mapping")}
        starts = torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE)
        lengths = torch.tensor([last], dtype=torch.int32, device=DEVICE)
        batch = {"kv": kv.clone(), "query_start_loc": starts, "seq_lens": lengths}
        out, _ = OURS.attend(**(whole.tensors | whole.static | part | batch))
        assert equal(out, expected[first:last])
