"""What decodes of one step have in common is kept for its layers, and never for another step."""

import torch
from hypothesis import given

from purestep.kernels.cpu import decodes
from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from tests.kernels.attention_cases import Case, cases
from tests.laws import equal


@given(case=cases(decode=True))
def test_arguments_that_change_where_they_lie_are_seen(case: Case) -> None:
    """Lengths grow and blocks move, in the very tensors that the step before was given."""
    tensors = {name: tensor.clone() for name, tensor in case.tensors.items()}
    for _ in range(2):
        fresh = tensors | {"kv": tensors["kv"].clone()}
        found, _ = donating.attend(**fresh, **case.static)
        expected, _ = reference.attend(**tensors, **case.static)
        assert (found - expected).abs().max() < 1e-6
        tensors["block_table"].copy_(tensors["block_table"].flip(-1))
        tensors["seq_lens"].sub_((tensors["seq_lens"] > 1).to(tensors["seq_lens"].dtype))


@given(case=cases())
def test_what_is_kept_gives_the_same_bits(case: Case) -> None:
    tensors = case.tensors
    decodes.of_step.cache_clear()
    first, again = (
        donating.attend(**(tensors | {"kv": tensors["kv"].clone()}), **case.static)[0] for _ in range(2)
    )
    assert equal(first, again)
    assert decodes.of_step.cache_info().hits == 1


@given(case=cases())
def test_what_is_kept_without_gradients_serves_those_who_want_them(case: Case) -> None:
    """The same batch in inference mode first; then the gradient by the queries is the reference's."""
    tensors, soft = case.tensors, {"soft_cap": None}
    decodes.of_step.cache_clear()
    gradients = []
    for kernels in (donating, reference):
        with torch.inference_mode():
            kernels.attend(**(tensors | {"kv": tensors["kv"].clone()}), **(case.static | soft))
        q = tensors["q"].clone().requires_grad_()
        given_ = tensors | {"q": q, "kv": tensors["kv"].clone()}
        out, _ = kernels.attend(**given_, **(case.static | soft))
        gradients.append(torch.autograd.grad(out.square().sum(), q)[0] if out.requires_grad else 0 * q)
    assert (gradients[0] - gradients[1]).abs().max() < 1e-9


def test_what_is_kept_is_of_one_step_and_little() -> None:
    kv = torch.zeros(9, 2, 4, 1, 4)
    for length in range(1, 30):
        for table in torch.randint(1, 9, (3 * decodes.KEPT, 1, 8), dtype=torch.int32):
            decodes.decodes([0, 1], [length], table, kv, None, torch.float32)
        assert decodes.of_step.cache_info().currsize == 1
        assert len(decodes.of_step((0, 1), (length,))) <= decodes.KEPT
