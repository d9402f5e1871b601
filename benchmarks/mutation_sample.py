"""Single changes in the core of the library, each run against the tests of its room: are they noticed?

    python benchmarks/mutation_sample.py [--changes 50] [--seed 0] [--processes 2] [--only 'bondgrad/step/*'] [--all]

A change replaces one operator, comparison or constant of one file in a copy of the project. It is noticed if a test of
its room fails, or runs into its time limit. Of these tests only those run that execute the changed line, which one run
of all of them under `coverage` tells; a change outside of functions runs them all. Some changes make no difference to
anybody, such as `>=` for `>` between numbers that are never equal; all that survive are named, for people to judge. A
sample of all rooms is saved in results/mutations.json.
"""

import argparse
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import hypothesis  # noqa: F401  what tests load is loaded once, here, for all the processes that are forked
import pytest
import torch
import torch._dynamo
import torch.utils.tensorboard
from single_changes import Change, changes_in

ROOT = Path(__file__).parent.parent
SECONDS = 300  # after which a run of tests counts as failed
OPTIONS = ["-q", "-x", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", "-p", "no:xdist"]
COMPILED = "tests/torch_support/test_compile.py"  # what a compiler runs is not traced: these always run
# Where the tests of a room are: its own, and those of what is built on it alone.
ROOMS = {
    "box.py": [
        *("tests/test_box.py", "tests/test_box_input.py", "tests/test_box_parts.py", "tests/test_box_replaced.py"),
        *("tests/step", "tests/calling"),
        *(f"tests/torch_support/test_{name}.py" for name in ("compile", "func", "precision")),
    ],
    "calling": ["tests/calling", "tests/test_box.py", "tests/test_box_input.py", "tests/structure/test_sequence.py"],
    "estimators": ["tests/estimators", "tests/testing", "tests/test_box.py"],
    "evaluators": ["tests/evaluators", "tests/calling", "tests/test_box.py"],
    "measuring": ["tests/measuring", "tests/policies", "tests/checking", "tests/probing"],
    "policies": ["tests/policies", "tests/testing", "tests/test_box.py"],
    "step": [
        *("tests/step", "tests/policies", "tests/calling", "tests/structure/test_sequence.py"),
        *("tests/test_box.py", "tests/test_box_parts.py", "tests/torch_support/test_ranks_alone.py"),
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


def executes(test: Test, change: Change) -> bool:
    """Whether the test executes the changed statement."""
    return not test.lines.get(change.file, frozenset()).isdisjoint(change.statement)


def is_noticed(copy: Path, change: Change, tests: list[Test]) -> bool:
    """Whether a test that executes the changed line fails."""
    if change.statement:
        tests = [test for test in tests if test.name.startswith(COMPILED) or executes(test, change)]
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
