"""Steps that are compiled ahead: they run without memory, and leave the buffers as they are."""

import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.padding import capture_layout
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import SamplerShape
from purestep.state.buffers import PersistentBuffers
from purestep.state.compilation import Shapes, compile_steps, steps_without_memory
from purestep.state.profile import profile_layouts
from purestep.state.run import BoundStep
from tests.laws import digest

LIMITS = BatchLimits(max_num_reqs=4, max_model_len=64, vocab_size=64, block_sizes=(4,), num_blocks=(32,))


def test_steps_run_without_memory_and_change_nothing() -> None:
    config = tiny_config(vocab_size=64, hidden_size=32, num_layers=1, max_position_embeddings=64)
    model = llama(config)
    buffers = PersistentBuffers(model, LIMITS)
    bound = BoundStep(buffers, model, random_params(config, seed=0), reference)
    before = digest(buffers.lease().value)

    decodes = [
        capture_layout(BatchDescriptor(num, num, True), LIMITS, sampler=sampler)
        for num in (1, 4)
        for sampler in (SamplerShape(), SamplerShape(random=True, truncated=True))
    ]
    layouts = [*decodes, *profile_layouts(LIMITS, 16)]
    outputs = [call()[1] for call in steps_without_memory(bound, layouts)]
    compile_steps(bound, layouts)  # on a CPU there is nothing to compile

    assert [len(output.sampled_token_ids) for output in outputs] == [
        layout.bounds.num_reqs for layout in layouts
    ]
    assert all(output.sampled_token_ids.device == torch.device("meta") for output in outputs)
    assert digest(buffers.lease().value) == before


@given(
    st.sampled_from([torch.add, torch.ge, torch.logical_and, torch.true_divide, torch.maximum]),
    st.sampled_from([torch.int32, torch.int64, torch.bool, torch.float32, torch.bfloat16]),
    st.sampled_from([torch.int32, torch.float64]),
)
def test_elementwise_results_have_the_shapes_and_types_that_they_would_have(
    operation: Callable[..., torch.Tensor], one: torch.dtype, other: torch.dtype
) -> None:
    a, b = torch.ones(4, 1, dtype=one), torch.ones(3, dtype=other)
    expected = operation(a, b)
    with Shapes():
        found = operation(a.to("meta"), b.to("meta"))
        chosen = torch.where(found > 0, found, 0.5)
        assert torch.ones(2).add_(1).tolist() == [2, 2]  # what has memory is computed
    assert (found.device.type, found.shape, found.dtype) == ("meta", expected.shape, expected.dtype)
    assert chosen.dtype == torch.where(expected > 0, expected, 0.5).dtype


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "like": lambda a, i: torch.empty_like(a),
    "another type": lambda a, i: torch.empty_like(a, dtype=torch.int32),
    "product": lambda a, i: torch.mm(a, a.T),
    "rows": lambda a, i: a[i],
    "a column": lambda a, i: a[:, i],
    "items": lambda a, i: a[i[:, None], i],
    "scattered": lambda a, i: a.scatter(1, i[:, None], 0.0),
    "summed": lambda a, i: a.sum(-1),
    "one of two": lambda a, i: torch.frexp(a.float())[1],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_results_have_the_shapes_and_types_that_they_would_have(name: str) -> None:
    a, i = torch.ones(3, 5, dtype=torch.bfloat16), torch.tensor([1, 0, 2])
    expected = OPERATIONS[name](a, i)
    with Shapes():
        found = OPERATIONS[name](a.to("meta"), i.to("meta"))
    assert (found.device.type, found.shape, found.dtype) == ("meta", expected.shape, expected.dtype)


def test_a_product_of_another_type_has_it() -> None:
    a = torch.empty(3, 5, dtype=torch.bfloat16, device="meta")
    with Shapes():
        found = torch.mm(a, a.T, out_dtype=torch.float32)
    assert (found.shape, found.dtype) == ((3, 3), torch.float32)


def test_results_do_without_torchs_compiler() -> None:
    """It takes seconds to import. In a process of its own: other tests need it."""
    script = """
        import sys
        import torch
        from purestep.state.compilation import Shapes

        with Shapes():
            a = torch.empty_like(torch.ones(3, 3, device="meta"))
            torch.mm(a, a) + 1 > 0
        assert not {"torch._dynamo", "sympy"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(script)], check=True)
