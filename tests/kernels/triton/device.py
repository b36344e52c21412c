"""Where the tests of Triton kernels run: on the GPU if there is one, else in the interpreter, which is slow.

A line in a kernel's loop costs the interpreter about 0.1 ms: shapes are tiny and examples few.
"""

import importlib.util
from typing import Any

import pytest
import torch

from tests.profiles import IN_CI

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = (torch.bfloat16, torch.float16)

if importlib.util.find_spec("triton") is None:
    if IN_CI:
        pytest.fail("triton is not installed (CI=true, so its absence fails)", pytrace=False)
    pytest.skip("triton is not installed: pip install triton", allow_module_level=True)

# numpy, which the interpreter computes with, warns of infinities and NaN that are meant.
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def few(num_examples: int) -> Any:
    """Settings of a property test whose examples cost a tenth of a second each. What fails is not made smaller: it is
    small, and that would take minutes."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    return settings(settings.default, max_examples=num_examples, phases=phases)
