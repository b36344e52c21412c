"""Rotary frequencies; their angles are compared with transformers' in `tests/pure/models/test_rope.py`."""

import torch

from purestep.kernels.reference.rope import frequency_divisors

LLAMA_3_1 = (8.0, 1.0, 4.0, 8192)


def test_divisors_are_one_without_scaling_and_the_factor_for_long_waves() -> None:
    """Short waves are kept, long ones slowed by the factor, those between by less."""
    assert torch.equal(frequency_divisors(64, 5e5, None), torch.ones(32))
    divisors = frequency_divisors(128, 5e5, LLAMA_3_1)
    assert divisors[0] == 1 and abs(divisors[-1] - 8) < 1e-5
    assert (divisors.diff() >= -1e-6).all()
