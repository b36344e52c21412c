"""Without a GPU the kernels run in Triton's interpreter, which has to be asked for before triton is imported."""

import importlib
import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def few_programs() -> Iterator[None]:
    """In the interpreter keys are split into fewer parts, and sooner: idle programs cost as much as busy ones."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            decode, short = (
                importlib.import_module(f"purestep.kernels.triton.{name}") for name in ("decode", "short")
            )
            patch.setattr(decode, "PROGRAMS", 16)
            patch.setattr(short, "FEWEST_PARTS", 2)
        yield
