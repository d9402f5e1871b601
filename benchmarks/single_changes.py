"""Single changes that can be made in a file: another operator, comparison or constant, for `mutation_sample.py`."""

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Pow: "*", ast.FloorDiv: "*", ast.Mod: "+",
    ast.BitAnd: "|", ast.BitOr: "&",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.And: "or", ast.Or: "and",
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin"}


class Change(NamedTuple):
    """One replacement of text in a file."""

    file: str
    line: int
    start: int  # offset in the file
    stop: int
    before: str
    after: str
    statement: range  # lines that only run when it does; empty outside of functions

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before!r} -> {self.after!r}"


def statement_lines(tree: ast.Module) -> Callable[[int], range]:
    """A function from a line to the lines of its statement, which are none where it runs when a module is loaded."""
    lines: dict[int, range] = {}

    def visit(statements: Iterable[ast.AST], in_function: bool) -> None:
        for node in statements:
            blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody", "handlers", "cases")]
            inner = [part for block in blocks if isinstance(block, list) for part in block]
            starts = [part.lineno for part in inner if hasattr(part, "lineno")]
            if hasattr(node, "lineno"):
                span = range(node.lineno, min(starts, default=(getattr(node, "end_lineno", 0) or 0) + 1))
                span = range(span.start, max(span.stop, span.start + 1))
                executed = in_function and not isinstance(node, (ast.FunctionDef, ast.ClassDef))
                lines.update({line: span if executed else range(0) for line in span})
            visit(inner, in_function or isinstance(node, ast.FunctionDef))

    visit(tree.body, False)
    return lambda line: lines.get(line, range(0))


def changes_in(path: Path, project: Path) -> Iterator[Change]:
    """All single changes that can be made in a file of the project."""
    source = path.read_text()
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    data, file = source.encode(), str(path.relative_to(project))
    tree, skipped = ast.parse(source), set[int]()
    statements = statement_lines(tree)

    def change(node_line: int, start: int, stop: int, after: str) -> Change:
        return Change(file, node_line, start, stop, data[start:stop].decode(), after, statements(node_line))

    def between(left: ast.expr, right: ast.expr, kind: type[ast.AST]) -> Iterator[Change]:
        start = lines[(left.end_lineno or 1) - 1] + (left.end_col_offset or 0)
        stop = lines[right.lineno - 1] + right.col_offset
        text = data[start:stop].decode()
        symbol = text.strip().strip("()").strip()
        if kind in OPERATORS and symbol and "#" not in text and "\n" not in symbol:
            at = start + len(text[: text.index(symbol)].encode())
            yield change(left.lineno, at, at + len(symbol.encode()), OPERATORS[kind])

    for node in ast.walk(tree):  # annotations, docstrings, errors and their like are no code to be changed
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if part is not None:
                skipped |= {id(inner) for inner in ast.walk(part)}
        if isinstance(node, ast.keyword) and node.arg in ("strict", "stacklevel", "memory_format"):
            skipped |= {id(inner) for inner in ast.walk(node)}
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            skipped |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, type(node.op))
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], type(node.ops[0]))
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], type(node.op))
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            start = lines[node.lineno - 1] + node.col_offset
            after = f"{not node.value}" if isinstance(node.value, bool) else f"{node.value + 1}"
            yield change(node.lineno, start, lines[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0), after)
        elif isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in CALLS:
                stop = lines[(function.end_lineno or 1) - 1] + (function.end_col_offset or 0)
                yield change(function.lineno, stop - len(name), stop, CALLS[name])
