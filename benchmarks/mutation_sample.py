"""Single changes in the core of the library, each run against the tests of its room: are they noticed?

    python benchmarks/mutation_sample.py [--changes 50] [--seed 0] [--processes 2] [--only PATTERN]

A change replaces one operator, comparison or constant of one file in a copy of the project. It is noticed if a test of
its room fails, or runs into its time limit. Some changes make no difference to anybody, such as `>=` for `>` between
numbers that are never equal; all that survive are named, for people to judge. Results are in results/mutations.json.
"""

import argparse
import ast
import fnmatch
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from record import save

ROOT = Path(__file__).parent.parent
SECONDS = 300  # after which a run of tests counts as failed
COMMON = ["tests/test_box.py"]
# Where the tests of a room are. Steps are what everything else is tested with.
ROOMS = {
    "box.py": ["tests/test_box.py", "tests/test_box_input.py", "tests/test_box_parts.py", "tests/step"],
    "calling": ["tests/calling", "tests/test_box_input.py"],
    "estimators": ["tests/estimators", "tests/testing"],
    "evaluators": ["tests/evaluators", "tests/calling"],
    "measuring": ["tests/measuring", "tests/policies", "tests/checking"],
    "policies": ["tests/policies", "tests/testing"],
    "step": ["tests/step", "tests/policies", "tests/calling", "tests/test_box_parts.py"],
    "structure": ["tests/structure"],
}
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

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before!r} -> {self.after!r}"


def changes_in(path: Path) -> Iterator[Change]:
    """All single changes that can be made in a file."""
    source = path.read_text()
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    data, file = source.encode(), str(path.relative_to(ROOT))

    def change(node_line: int, start: int, stop: int, after: str) -> Change:
        return Change(file, node_line, start, stop, data[start:stop].decode(), after)

    def between(left: ast.expr, right: ast.expr, kind: type[ast.AST]) -> Iterator[Change]:
        start = lines[(left.end_lineno or 1) - 1] + (left.end_col_offset or 0)
        stop = lines[right.lineno - 1] + right.col_offset
        text = data[start:stop].decode()
        symbol = text.strip().strip("()").strip()
        if kind in OPERATORS and symbol and "#" not in text and "\n" not in symbol:
            at = start + len(text[: text.index(symbol)].encode())
            yield change(left.lineno, at, at + len(symbol.encode()), OPERATORS[kind])

    tree, skipped = ast.parse(source), set[int]()
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
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            start = lines[node.lineno - 1] + node.col_offset
            after = str(not node.value) if type(node.value) is bool else f"{node.value + 1}"
            yield change(node.lineno, start, lines[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0), after)
        elif isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in CALLS:
                stop = lines[(function.end_lineno or 1) - 1] + (function.end_col_offset or 0)
                yield change(function.lineno, stop - len(name), stop, CALLS[name])


def noticed(change: Change, copy: Path) -> bool:
    """Whether a test of its room fails with the change."""
    path = copy / change.file
    data = (ROOT / change.file).read_bytes()
    path.write_bytes(data[: change.start] + change.after.encode() + data[change.stop :])
    room = Path(change.file).parts[1]
    tests = [test for test in dict.fromkeys([*ROOMS[room], *COMMON]) if (copy / test).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_bytes(data)
    return done.returncode != 0


def main() -> None:
    """Draw changes, run tests, print and save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="*", help="files, such as 'bondgrad/estimators/*'")
    options = parser.parse_args()
    files = [
        path for room in ROOMS for path in sorted((ROOT / "bondgrad").glob(room if "." in room else f"{room}/**/*.py"))
    ]
    files = [path for path in files if fnmatch.fnmatch(str(path.relative_to(ROOT)), options.only)]
    possible = [change for path in files for change in changes_in(path)]
    chosen = random.Random(options.seed).sample(possible, min(options.changes, len(possible)))
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.processes):
            copy = Path(folder) / str(i)
            for name in ("bondgrad", "tests", "benchmarks"):
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            for name in ("pyproject.toml", "conftest.py"):
                shutil.copy(ROOT / name, copy / name)
            copies.put(copy)

        def attempt(change: Change) -> bool:
            copy = copies.get()
            try:
                found = noticed(change, copy)
            finally:
                copies.put(copy)
            print("noticed " if found else "SURVIVED", change, flush=True)
            return found

        with ThreadPoolExecutor(options.processes) as pool:
            outcomes = list(pool.map(attempt, chosen))
    survivors = [str(change) for change, found in zip(chosen, outcomes, strict=True) if not found]
    print(f"{sum(outcomes)} of {len(chosen)} noticed, of {len(possible)} possible changes")
    if options.only == "*":
        save(
            "mutations",
            {"noticed": sum(outcomes), "changes": len(chosen), "possible": len(possible), "survivors": survivors},
        )


if __name__ == "__main__":
    main()
