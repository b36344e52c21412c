"""Nothing in pure/ writes to what it was given or keeps anything between calls: read from the syntax trees.

What can not be seen in the text (a view made in another function) `laws.assert_pure` sees at run time.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.syntax import Function, complaints, dotted, sources

EXEMPT = {"purestep.pure.arrays"}  # freezes arrays, and owns the buffers of tapes

IN_PLACE_ALLOWED = frozenset({"bool_"})  # names with a trailing underscore that write nothing: numpy's type

# A method of these gives another view of the same memory, so its result is as foreign as its object.
VIEWS = frozenset(
    {
        *(
            "asarray",
            "atleast_1d",
            "chunk",
            "contiguous",
            "detach",
            "diagonal",
            "expand",
            "expand_as",
            "flatten",
        ),
        *(
            "from_numpy",
            "items",
            "movedim",
            "narrow",
            "numpy",
            "permute",
            "ravel",
            "reshape",
            "select",
            "split",
        ),
        *("squeeze", "swapaxes", "to", "transpose", "type", "unbind", "unflatten", "unfold", "unsqueeze"),
        *("values", "view", "view_as"),
    }
)
# A call of these for its effect, not for its result, changes its object.
MUTATORS = frozenset(
    {
        *("add", "append", "clear", "discard", "extend", "fill", "insert", "itemset", "partition", "pop"),
        *("popitem", "put", "remove", "resize", "reverse", "setdefault", "setflags", "sort", "update"),
    }
)
# Of a parameter annotated so, `n -= 1` only binds another value to the name.
IMMUTABLE = frozenset({"bool", "bytes", "float", "int", "str"})
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_MAKERS = frozenset(
    {
        *("list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "array"),
        *("arange", "empty", "full", "ones", "tensor", "zeros", "from_numpy", "asarray", "linspace"),
        *("count", "iter", "WeakKeyDictionary", "WeakValueDictionary"),
    }
)
FREEZERS = frozenset(
    {"frozenset", "tuple", "MappingProxyType", "frozen", "filled", "empty_column", "len", "sum"}
)
MEMOS = frozenset({"cache", "lru_cache", "cached_property"})


def in_place_complaints(text: str, module: str) -> list[str]:
    """In-place methods (one trailing underscore), `out=` and `inplace=True`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and _is_in_place(node.attr):
            found.append(f"line {node.lineno}: {dotted(node)} writes in place")
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and _is_in_place(node.func.id):
                found.append(f"line {node.lineno}: {node.func.id} writes in place")
            found += [
                f"line {node.lineno}: {keyword.arg}= writes in place"
                for keyword in node.keywords
                if keyword.arg in ("out", "inplace")
            ]
    return found


def assignment_complaints(text: str, module: str) -> list[str]:
    """Writes to what came in from outside the function: items, attributes, calls made for their effect.

    Foreign are parameters, attributes, and local names bound to (views of) either. Arrays, lists and dicts
    that a function made itself it may fill.
    """
    tree = ast.parse(text)
    found = []
    for function in [node for node in ast.walk(tree) if isinstance(node, Function)]:
        foreign = _parameters(function)
        for outer in [node for node in ast.walk(tree) if isinstance(node, Function)]:
            if outer is not function and any(inner is function for inner in ast.walk(outer)):
                foreign |= _foreign_names(outer, _parameters(outer))
        foreign = _foreign_names(function, foreign)
        for node in _own_nodes(function):
            found += _writes(node, foreign, in_init=getattr(function, "name", "") == "__init__")
    return sorted(set(found))


def state_complaints(text: str, module: str) -> list[str]:
    """What survives a call: `global`, `nonlocal`, memos, and mutable values at module or class level."""
    tree = ast.parse(text)
    found = [
        f"line {node.lineno}: {type(node).__name__.lower()} {', '.join(node.names)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Global | ast.Nonlocal)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                name = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
                if name.split(".")[-1] in MEMOS:
                    found.append(f"line {node.lineno}: {node.name} keeps results between calls")
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        for statement in scope.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if not all(ast.unparse(target) == "__all__" for target in targets):
                    found += [
                        f"line {line}: a mutable value outside functions"
                        for line in _mutable(statement.value)
                    ]
    return found


def _is_in_place(name: str) -> bool:
    return (
        name.endswith("_")
        and not name.endswith("__")
        and name.strip("_") != ""
        and name not in IN_PLACE_ALLOWED
    )


def _parameters(function: Function) -> set[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every = [argument for argument in [*named, arguments.vararg, arguments.kwarg] if argument is not None]
    return {
        argument.arg
        for argument in every
        if argument.annotation is None or ast.unparse(argument.annotation) not in IMMUTABLE
    }


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    stack = list(function.body) if isinstance(function.body, list) else [function.body]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, Function):
            stack += ast.iter_child_nodes(node)


def _foreign_names(function: Function, foreign: set[str]) -> set[str]:
    """`foreign` and the local names that are bound to it, to parts of it or to views of it."""
    foreign = set(foreign)
    while True:
        added = set()
        for node in _own_nodes(function):
            if isinstance(node, ast.Assign):
                pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                pairs = [(node.target, node.value)]
            elif isinstance(node, ast.For):
                pairs = [(node.target, node.iter)]
            else:
                continue
            for target, value in pairs:
                if _is_foreign(value, foreign):
                    added |= {name.id for name in _flat(target) if isinstance(name, ast.Name)}
        if added <= foreign:
            return foreign
        foreign |= added


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """`a, b = x, y` taken apart."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _is_foreign(node: ast.AST, foreign: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in foreign
    if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        return _is_foreign(node.value, foreign)
    if isinstance(node, ast.IfExp):
        return _is_foreign(node.body, foreign) or _is_foreign(node.orelse, foreign)
    if isinstance(node, ast.BoolOp):
        return any(_is_foreign(value, foreign) for value in node.values)
    if isinstance(node, ast.Tuple):
        return any(_is_foreign(item, foreign) for item in node.elts)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in ("zip", "enumerate", "reversed", "iter"):
            return any(_is_foreign(argument, foreign) for argument in node.args)
        if isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS:
            through = [node.func.value, *node.args[:1]]  # x.view(-1), or np.asarray(x)
            return any(_is_foreign(part, foreign) for part in through)
    return False


def _writes(node: ast.AST, foreign: set[str], *, in_init: bool) -> Iterator[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
        if isinstance(node.target, ast.Name) and node.target.id in foreign:
            yield f"line {node.lineno}: {ast.unparse(node)} may write what {node.target.id} came in with"
    elif isinstance(node, ast.AnnAssign | ast.For):
        targets = [node.target]
    for target in [inner for outer in targets for inner in _flat(outer)]:
        if isinstance(target, ast.Attribute) and not (in_init and dotted(target.value) == "self"):
            yield f"line {node.lineno}: assigns {ast.unparse(target)}; records do not change"
        elif isinstance(target, ast.Subscript) and _is_not_own(target.value, foreign):
            yield f"line {node.lineno}: assigns items of {ast.unparse(target.value)}, which came in"
    if isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr", "object.__setattr__"):
        yield f"line {node.lineno}: {dotted(node.func)}; records do not change"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        method = node.value.func
        if (
            isinstance(method, ast.Attribute)
            and method.attr in MUTATORS
            and _is_not_own(method.value, foreign)
        ):
            yield f"line {node.lineno}: {ast.unparse(method)}() changes what came in"


def _is_not_own(node: ast.expr, foreign: set[str]) -> bool:
    """Whether an object that is written was made elsewhere: ours are local names and their items."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return not isinstance(node, ast.Name) or node.id in foreign


def _flat(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [inner for item in target.elts for inner in _flat(item)]
    return [target.value] if isinstance(target, ast.Starred) else [target]


def _mutable(value: ast.expr) -> Iterator[int]:
    """Lines on which an expression makes something mutable that it does not hand to a freezer."""
    if isinstance(value, MUTABLE):
        yield value.lineno
    elif isinstance(value, ast.Call):
        maker = dotted(value.func).split(".")[-1]
        if maker in MUTABLE_MAKERS:
            yield value.lineno
        elif maker not in FREEZERS:
            for argument in [*value.args, *(keyword.value for keyword in value.keywords)]:
                yield from _mutable(argument)
    elif isinstance(value, ast.Tuple | ast.BinOp | ast.IfExp | ast.Starred | ast.BoolOp):
        for part in ast.iter_child_nodes(value):
            if isinstance(part, ast.expr):
                yield from _mutable(part)


CHECKERS = [in_place_complaints, assignment_complaints, state_complaints]


@pytest.mark.parametrize("checker", CHECKERS)
def test_pure_is_pure(checker: object) -> None:
    modules = {name: text for name, text in sources("pure").items() if name not in EXEMPT}

    assert complaints(checker, modules) == []  # type: ignore[arg-type]


def test_the_exemption_is_needed() -> None:
    exempt = {name: text for name, text in sources("pure").items() if name in EXEMPT}

    assert set(exempt) == EXEMPT
    assert all(complaints(assignment_complaints, {name: text}) for name, text in exempt.items())


@pytest.mark.parametrize(
    "text",
    [
        "y = x.add_(1)",
        "torch.nn.init.normal_(x)",
        "relu_(x)",
        "write = torch.Tensor.copy_",
        "torch.add(x, y, out=z)",
        "functional.relu(x, inplace=True)",
    ],
)
def test_writing_in_place_is_found(text: str) -> None:
    assert len(in_place_complaints(text, "purestep.pure.a")) == 1


@pytest.mark.parametrize(
    "body",
    [
        "x[0] = 1",
        "x[0][1] += 1",
        "x.items[0] = 1",
        "x += 1",
        "x.y = 1",
        "del x[0]",
        "x[0], z = 1, 2",
        "for x[0] in range(3): z = 1",
        "y = x; y[0] = 1",
        "y = x.view(-1)[2:]; y[0] = 1",
        "y = np.asarray(x); y[0] = 1",
        "a, b = x.numpy(), 1; a[0] = 1",
        "a, b = x; a[0] = 1",
        "for i, row in enumerate(x): row[0] = i",
        "y = x if z else 0; y[0] = 1",
        "x.append(1)",
        "x.table.sort()",
        "view(x)[0] = 1",
        "object.__setattr__(x, 'y', 1)",
        "def inner():\n        x[0] = 1",
        "y = lambda z: z.update(a=1); [x.pop() for _ in z]; x.pop()",
    ],
)
def test_writing_to_what_came_in_is_found(body: str) -> None:
    assert len(assignment_complaints(f"def f(x):\n    {body}", "purestep.pure.a")) == 1


@pytest.mark.parametrize(
    "body",
    [
        "y = x.copy(); y[0] = 1; return y",
        "y = np.zeros(3); y[x] += 1",
        "y = list(x); y.append(1)",
        "y = {}; y[x] = 1; y.update(x)",
        "y = [[0], [1]]; y[0][0] = 2",
        "tape = x.append(1); return tape",
        "y = 0; y += x",
        "y = x.tolist(); y.sort()",
        "n, y = x.n, []; y.append(n)",
        "n -= 1; return n",
    ],
)
def test_filling_what_a_function_made_itself_is_left_alone(body: str) -> None:
    assert assignment_complaints(f"def f(x, n: int):\n    {body}", "purestep.pure.a") == []


@pytest.mark.parametrize(
    "text",
    [
        "seen = []",
        "seen: dict[str, int] = {}",
        "table = {key: 1 for key in 'ab'}",
        "pair = (1, [2])",
        "noise = torch.zeros(3)",
        "log = collections.deque()",
        "class A:\n    items = set()",
        "record = Record(items=[1])",
        "def f():\n    global x\n    x = 1",
        "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2",
        "@functools.lru_cache(maxsize=1)\ndef f(): return 1",
    ],
)
def test_state_that_survives_a_call_is_found(text: str) -> None:
    assert len(state_complaints(text, "purestep.pure.a")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "__all__ = ['a']",
        "NAMES = ('a', 'b')",
        "NAMES = frozenset({'a', 'b'})",
        "TABLE = MappingProxyType({'a': 1})",
        "COLUMN = frozen(np.arange(3))",
        "def f():\n    seen = []\n    return seen",
        "DTYPE = np.dtype(np.int32)",
    ],
)
def test_constants_are_left_alone(text: str) -> None:
    assert state_complaints(text, "purestep.pure.a") == []
