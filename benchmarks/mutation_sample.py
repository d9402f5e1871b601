"""Single changes in the core of the library, each run against the tests of its room: are they noticed?

    python benchmarks/mutation_sample.py [--changes 50] [--seed 0] [--processes 2] [--only 'bondgrad/step/*'] [--all]

A change replaces one operator, comparison or constant of one file in a copy of the project. It is noticed if a test of
its room fails, or runs into its time limit. Of these tests only those run that execute the changed line, which one run
of all of them under `coverage` tells; a change outside of functions runs them all. Some changes make no difference to
anybody, such as `>=` for `>` between numbers that are never equal; all that survive are named, for people to judge. A
sample of all rooms is saved in results/mutations.json.
"""

import argparse
import ast
import fnmatch
import functools
import hashlib
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import hypothesis  # noqa: F401  what tests load is loaded once, here, for all the processes that are forked
import pytest
import torch
import torch._dynamo
import torch.utils.tensorboard

ROOT = Path(__file__).parent.parent
SECONDS = 300  # after which a run of tests counts as failed
OPTIONS = ["-q", "-x", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", "-p", "no:xdist"]
# Where the tests of a room are: its own, and those of what is built on it alone.
ROOMS = {
    "box.py": ["tests/test_box.py", "tests/test_box_input.py", "tests/test_box_parts.py", "tests/step"],
    "calling": ["tests/calling", "tests/test_box.py", "tests/test_box_input.py", "tests/structure/test_sequence.py"],
    "estimators": ["tests/estimators", "tests/testing", "tests/test_box.py"],
    "evaluators": ["tests/evaluators", "tests/calling", "tests/test_box.py"],
    "measuring": ["tests/measuring", "tests/policies", "tests/checking", "tests/probing"],
    "policies": ["tests/policies", "tests/testing", "tests/test_box.py"],
    "step": [
        *("tests/step", "tests/policies", "tests/calling", "tests/structure/test_sequence.py"),
        *("tests/test_box.py", "tests/test_box_parts.py"),
    ],
    "structure": ["tests/structure", "tests/test_box.py"],
}
# Rooms that are only looked at when they are asked for by --only.
OTHER_ROOMS = {
    "checking": ["tests/checking"],
    "probing": ["tests/probing"],
    "testing": ["tests/testing"],
    "torch_support": ["tests/torch_support", "tests/test_training_loops.py"],
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


class Test(NamedTuple):
    """One test: how long it takes, and what it executes."""

    name: str
    seconds: float
    lines: dict[str, frozenset[int]]  # by file


class _Recorder:
    """Pytest plugin: which lines each test executes."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.measured.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


class _Chosen:
    """Pytest plugin: run these tests, in this order."""

    def __init__(self, names: list[str]) -> None:
        self.position = {name: i for i, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.position), key=lambda item: self.position[item.nodeid]
        )


def run_pytest(copy: Path, paths: list[str], plugin: object | None) -> int:
    """Run tests in this process, on the package in a copy of the project; their exit status."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = sys.path[0] = str(copy)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    return int(pytest.main([*OPTIONS, *paths], [] if plugin is None else [plugin]))


def executed_lines(copy: Path, path: str) -> list[Test]:
    """Run the tests of a file: what each of them executes of the package."""
    measured = coverage.Coverage(data_file=None, include=[f"{copy}/bondgrad/*"], concurrency="thread")
    recorder = _Recorder(measured)
    measured.start()
    status = run_pytest(copy, [path], recorder)
    measured.stop()
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"{path} fails without any change")
    data = measured.get_data()
    lines: dict[str, dict[str, set[int]]] = {}
    for file in data.measured_files():
        for line, names in data.contexts_by_lineno(file).items():
            for name in names:
                lines.setdefault(name, {}).setdefault(os.path.relpath(file, copy), set()).add(line)
    return [
        Test(name, seconds, {file: frozenset(part) for file, part in lines.get(name, {}).items()})
        for name, seconds in recorder.seconds.items()
    ]


def is_noticed(copy: Path, change: Change, tests: list[Test]) -> bool:
    """Whether a test that executes the changed line fails."""
    if change.statement:
        tests = [test for test in tests if not test.lines.get(change.file, frozenset()).isdisjoint(change.statement)]
        tests = sorted(tests, key=lambda test: test.seconds)
    else:  # those that use the file first
        tests = sorted(tests, key=lambda test: (change.file not in test.lines, test.seconds))
    path = copy / change.file
    data = path.read_bytes()
    path.unlink()  # a link to the file of all copies
    path.write_bytes(data[: change.start] + change.after.encode() + data[change.stop :])
    names = [test.name for test in tests]
    return bool(names) and run_pytest(copy, sorted({name.split("::")[0] for name in names}), _Chosen(names)) != 0


def in_processes(
    project: Path, jobs: list[Callable[[Path], Any]], processes: int, when_late: Any
) -> Iterator[tuple[int, Any]]:
    """Run every job in a forked process of its own with a fresh copy of the project; its number and what it returns.

    A job that takes too long is ended and answered by `when_late`.
    """
    waiting, running = list(enumerate(jobs)), dict[int, tuple[int, float, Path]]()
    while waiting or running:
        while waiting and len(running) < processes:
            number, job = waiting.pop(0)
            copy = Path(tempfile.mkdtemp(dir=project.parent))
            shutil.copytree(project, copy, copy_function=os.link, dirs_exist_ok=True)
            process = os.fork()
            if process == 0:
                os.setsid()
                try:
                    outcome = job(copy)
                except BaseException as error:
                    outcome = RuntimeError(f"{type(error).__name__}: {error}")
                (copy / "outcome").write_bytes(pickle.dumps(outcome))
                os._exit(0)
            running[process] = number, time.monotonic(), copy
        time.sleep(0.02)
        for process, (number, start, copy) in list(running.items()):
            late = time.monotonic() - start > SECONDS
            if late:
                os.killpg(process, signal.SIGKILL)
            if os.waitpid(process, 0 if late else os.WNOHANG)[0]:
                outcome = when_late if late else pickle.loads((copy / "outcome").read_bytes())
                if isinstance(outcome, Exception):
                    raise outcome
                yield number, outcome
                shutil.rmtree(copy)
                del running[process]


def trace_tests(project: Path, paths: list[str], processes: int) -> dict[str, list[Test]]:
    """What the tests of each file execute; from an earlier run, where neither package nor tests have changed."""
    shared = [*sorted((project / "bondgrad").rglob("*.py")), *sorted((project / "tests").glob("*.py"))]
    kept = ROOT / "build" / "traced_tests"
    kept.mkdir(parents=True, exist_ok=True)

    def place(path: str) -> Path:
        content = b"".join(file.read_bytes() for file in (*shared, project / path))
        return kept / hashlib.sha256(path.encode() + content).hexdigest()

    missing = [path for path in paths if not place(path).exists()]
    jobs: list[Callable[[Path], Any]] = [functools.partial(executed_lines, path=path) for path in missing]
    for i, tests in in_processes(project, jobs, processes, []):
        place(missing[i]).write_bytes(pickle.dumps(tests))
    return {path: pickle.loads(place(path).read_bytes()) for path in paths}


def room_of(file: str) -> str:
    """The room of a file, given relative to the project."""
    return Path(file).parts[1]


def main() -> None:
    """Draw changes, run tests, print and save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="*", help="files, such as 'bondgrad/estimators/*'")
    parser.add_argument("--all", action="store_true", help="not a sample, but every change that is possible")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        for name in ("bondgrad", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        for name in ("pyproject.toml", "conftest.py"):
            shutil.copy(ROOT / name, project / name)
        if os.fork() == 0:  # compile what does not change, once for all copies
            run_pytest(project, ["--collect-only", "tests"], None)
            os._exit(0)
        os.wait()
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        run(project, options)


def run(project: Path, options: argparse.Namespace) -> None:
    """Of a copy of the project, which may be worked on meanwhile."""
    rooms = ROOMS if options.only == "*" else ROOMS | OTHER_ROOMS
    files = [
        path
        for room in rooms
        for path in sorted((project / "bondgrad").glob(room if "." in room else f"{room}/**/*.py"))
        if fnmatch.fnmatch(str(path.relative_to(project)), options.only)
    ]
    possible = [change for path in files for change in changes_in(path, project)]
    number = len(possible) if options.all else min(options.changes, len(possible))
    chosen = random.Random(options.seed).sample(possible, number)

    paths = {
        room: [
            str(path.relative_to(project))
            for place in rooms[room]
            for path in ([project / place] if place.endswith(".py") else sorted((project / place).rglob("test_*.py")))
        ]
        for room in {room_of(change.file) for change in chosen}
    }
    every = sorted({path for part in paths.values() for path in part})
    tests = trace_tests(project, every, options.processes)
    print(f"{sum(map(len, tests.values()))} tests of {len(every)} files", flush=True)

    def attempt(change: Change) -> Callable[[Path], bool]:
        used = [test for path in paths[room_of(change.file)] for test in tests[path]]
        return lambda copy: is_noticed(copy, change, used)

    survivors: list[Change] = []
    for i, found in in_processes(project, [attempt(change) for change in chosen], options.processes, True):
        print("noticed " if found else "SURVIVED", chosen[i], flush=True)
        if not found:
            survivors.append(chosen[i])
    noticed = len(chosen) - len(survivors)
    print(f"{noticed} of {len(chosen)} noticed, of {len(possible)} possible changes")
    if options.only == "*":
        from record import save  # loads the package, which must not be in the processes above

        save(
            "mutations",
            {
                "noticed": noticed,
                "changes": len(chosen),
                "possible": len(possible),
                "survivors": sorted(map(str, survivors)),
            },
        )


if __name__ == "__main__":
    main()
