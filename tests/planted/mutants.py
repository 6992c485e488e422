"""Draw faults at random: statements deleted, comparisons turned round, numbers moved by one."""

import ast
import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
Edit = Callable[[ast.AST], None]


def edits(node: ast.AST) -> Iterator[tuple[str, Edit]]:
    """Yield each fault that ``node`` can have: its name, and the function that plants it.

    The name of a deletion is ``deleted N``, where N is the line of the statement.
    """
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield (
            "comparison",
            lambda n: n.ops.__setitem__(0, COMPARISONS[type(n.ops[0])]()),
        )
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield "operator", lambda n: setattr(n, "op", OPERATORS[type(n.op)]())
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield "and/or", lambda n: setattr(n, "op", other())
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        changed = (not node.value) if isinstance(node.value, bool) else node.value + 1
        yield "constant", lambda n: setattr(n, "value", changed)
    if isinstance(node, ast.Call):
        for place, keyword in enumerate(node.keywords):
            if keyword.arg:
                yield f"without {keyword.arg}=", lambda n, p=place: n.keywords.pop(p)
    for field in ("body", "orelse"):
        statements = getattr(node, field, None)
        if not isinstance(statements, list):
            continue
        for place, statement in enumerate(statements):
            if is_deletable(statement):
                yield (
                    f"deleted {statement.lineno}",
                    lambda n, f=field, p=place: getattr(n, f).__setitem__(
                        p, ast.Pass()
                    ),
                )


def is_deletable(statement: ast.stmt) -> bool:
    """Whether ``statement`` does something: no definition, import, annotation, docstring."""
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    return isinstance(
        statement,
        ast.Assign | ast.AugAssign | ast.Raise | ast.If | ast.For | ast.With | ast.Assert
        | ast.Return | ast.Continue | ast.Break,
    )  # fmt: skip


def functions(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes inside of functions, annotations left out."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    if not isinstance(node, ast.FunctionDef | ast.arg):
                        yield node
            yield function


def draw(file: Path, number: int, rng: random.Random) -> list[tuple[int, str, str]]:
    """Draw up to ``number`` faults of ``file``: (line, name, the file's text with it)."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = list(dict.fromkeys(functions(tree)))
    places = [
        (index, kind)
        for index, node in enumerate(nodes)
        for kind in range(sum(1 for _ in edits(node)))
    ]
    found = []
    for index, kind in rng.sample(places, min(number, len(places))):
        changed = copy.deepcopy(tree)
        node = list(dict.fromkeys(functions(changed)))[index]
        name, edit = list(edits(node))[kind]
        line = getattr(node, "lineno", 0)
        if name.startswith("deleted"):
            line = int(name.split()[1])
            edit(node)
            before, after = (
                ast.unparse(tree).splitlines(),
                ast.unparse(changed).splitlines(),
            )
            gone = next(b for b, a in zip(before, after, strict=False) if a != b)
            name = f"deleted: {gone.strip()}"
        else:
            old = ast.unparse(node)
            edit(node)
            name = f"{name}: {old[:100]!r} -> {ast.unparse(node)[:100]!r}"
        found.append((line, name, ast.unparse(ast.fix_missing_locations(changed))))
    return found
