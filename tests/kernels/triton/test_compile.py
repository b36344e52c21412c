"""Every kernel compiles for sm_90, GPU or not; and the set of kernels is what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

import purestep.kernels.triton
from purestep.kernels.reference import reference
from tests.kernels.triton.device import quiet

pytestmark = quiet

LEFT_TO_TORCH = {
    "prepare",
    "allow_only",
    "ban_bad_words",
    "ban_tokens",
    "add_bias",
    "temperature_offset",
    "exponentials",
    "gather_ids",
    "scales_of",
}


@pytest.mark.slow
def test_every_kernel_compiles(tmp_path: Path) -> None:
    """In a process of its own, where kernels are compiled and not interpreted; with a cache that is empty."""
    script = Path(__file__).with_name("compile_for_sm90.py")
    root = Path(purestep.kernels.triton.__path__[0]).parents[2]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path)}
    finished = subprocess.run([sys.executable, "-P", script], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = [json.loads(line) for line in finished.stdout.splitlines()]
    assert lines[-1]["compiled"] > 30
    assert any(line.get("kernel") == "_mixed" and line["wgmma"] for line in lines)


def test_the_set_of_kernels() -> None:
    """All but a few functions are Triton's."""
    kernels = purestep.kernels.triton.cuda_donating()
    names = {field.name for field in attrs.fields(type(kernels))}
    same = {name for name in names if getattr(kernels, name) is getattr(reference, name)}
    assert same == LEFT_TO_TORCH


def test_tests_run_where_they_say() -> None:
    from purestep.kernels.triton.shared import INTERPRETED

    assert INTERPRETED.value != torch.cuda.is_available()
