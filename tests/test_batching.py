"""What whole states under vmap ask of the code: read from the syntax trees.

torch has a batching rule for `view(dtype)` only from 2.13 on, and purestep runs on older ones too. Bits are seen as
another type where the host packs them (numpy) and where they are staged (`state/`).
"""

import ast

import pytest

from tests.syntax import complaints, dotted, sources


def view_complaints(text: str, module: str) -> list[str]:
    """Tensors seen as another type."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "view":
            names = [dotted(argument) for argument in (*node.args, *(k.value for k in node.keywords))]
            if any(name.startswith("torch.") or name.endswith("dtype") for name in names):
                found.append(
                    f"line {node.lineno}: {ast.unparse(node)} has no batching rule before torch 2.13"
                )
    return found


@pytest.mark.parametrize("folder", ["pure", "kernels/reference"])
def test_no_tensor_of_a_step_is_seen_as_another_type(folder: str) -> None:
    assert complaints(view_complaints, sources(folder)) == []


@pytest.mark.parametrize("argument", ["torch.int32", "dtype=torch.float32", "y.dtype", "dtype"])
def test_a_view_as_another_type_is_found(argument: str) -> None:
    assert len(view_complaints(f"x[:, 1:].view({argument})", "purestep.pure.a")) == 1


def test_other_views_are_left_alone() -> None:
    text = "x.view(3, n).view(y.shape).view(-1); z.view(np.float32)"
    assert view_complaints(text, "purestep.pure.a") == []
