"""Looking at source text: which files there are, and small questions to a syntax tree."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "pure", "state")

Checker = Callable[[str, str], list[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def sources(*folders: str) -> dict[str, str]:
    """Module name -> source text of every Python file in the folders, such as `purestep.pure.plan`.

    A package goes by `purestep.pure.records.__init__`.
    """
    found = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found[".".join(["purestep", *path.relative_to(ROOT).with_suffix("").parts])] = path.read_text()
    return found


def complaints(checker: Checker, modules: dict[str, str]) -> list[str]:
    """What a checker finds in all these modules, one line each."""
    return [f"{module}: {found}" for module, text in modules.items() for found in checker(text, module)]


def imports(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Every imported module with its line, and whether it is imported lazily, inside a function.

    `from a import b` yields `a.b`: whether `b` is a module or a name in one can not be told from the text.
    """
    lazy = {inner for node in ast.walk(tree) if isinstance(node, Function) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, node in lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((f"{module}.{alias.name}", node.lineno, node in lazy) for alias in node.names)


def dotted(node: ast.AST) -> str:
    """`torch.cuda.Stream` of that expression; `?` stands for what is no plain name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"
