"""Two checkouts side by side: lines of code by room, and the time of a training step with each, taken in turn.

    git worktree add build/before COMMIT
    python benchmarks/compare_commits.py build/before

Lines of code are those that are neither docstrings, comments nor blank. Times are ratios of the new to the old time of
a step through the demo's box, one thread, in two processes that take turns. A process is faster or slower by some per
cent for as long as it lives, so the median over several pairs of processes is printed, with the least and the largest.
"""

import ast
import io
import json
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ("data", "networks", "reservoirs", "experiments", "report", "cli.py")
PAIRS, ROUNDS, STEPS = 9, 20, 20
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
STEP = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import torch
from torch import nn
import bondgrad
torch.set_num_threads(1)

def training(policy):
    torch.manual_seed(0)
    frozen = nn.Sequential(nn.Linear(5, 500), nn.Tanh(), nn.Linear(500, 5))
    read_in = nn.Sequential(nn.Linear(8, 100), nn.ReLU(), nn.Linear(100, 5))
    read_out = nn.Sequential(nn.Linear(5, 100), nn.ReLU(), nn.Linear(100, 1))
    model = nn.Sequential(read_in, bondgrad.BlackBox(frozen, 5, policy=policy, seed=0), read_out)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    def step():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return step

policies = {"calibrated": "calibrated", "bond": "bond", "fixed": bondgrad.policies.Fixed(0.01)}
steps = {name: training(policy) for name, policy in policies.items()}
for step in steps.values():
    for _ in range(150):
        step()
for _ in sys.stdin:
    times = {}
    for name, step in steps.items():
        start = time.perf_counter()
        for _ in range(int(sys.argv[2])):
            step()
        times[name] = time.perf_counter() - start
    print(json.dumps(times), flush=True)
"""


def code_lines(path: Path) -> int:
    """Lines of a file that are neither docstrings, comments nor blank."""
    source = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def lines_by_room(checkout: Path) -> Counter[str]:
    """Of the library; what stands in the package itself counts as one room."""
    rooms: Counter[str] = Counter()
    for path in (checkout / "bondgrad").rglob("*.py"):
        first, *rest = path.relative_to(checkout / "bondgrad").parts
        if first not in TOOLS:
            rooms[first if rest else "(root)"] += code_lines(path)
    return rooms


def step_ratios(checkouts: list[Path]) -> dict[str, float]:
    """The new time of a step over the old one by policy, in two fresh processes that take turns."""
    commands = [[sys.executable, "-c", STEP, str(checkout), str(STEPS)] for checkout in checkouts]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for command in commands]  # type: ignore[call-overload]
    ratios: dict[str, list[float]] = {}
    for turn in range(ROUNDS):
        times = {}
        for i in (0, 1) if turn % 2 else (1, 0):
            print(file=processes[i].stdin, flush=True)
            times[i] = json.loads(processes[i].stdout.readline())
        for name in times[0]:
            ratios.setdefault(name, []).append(times[1][name] / times[0][name])
    for process in processes:
        process.communicate()
    return {name: statistics.median(found) for name, found in ratios.items()}


def main() -> None:
    """Count, measure, print."""
    checkouts = [Path(sys.argv[1]).resolve(), ROOT]
    before, after = map(lines_by_room, checkouts)
    for room in sorted(before | after):
        print(f"{room:16} {before[room]:6} {after[room]:6}")
    print(f"{'all':16} {before.total():6} {after.total():6}")
    pairs = [step_ratios(checkouts) for _ in range(PAIRS)]
    for name in pairs[0]:
        low, *_, high = found = sorted(pair[name] for pair in pairs)
        middle = statistics.median(found)
        print(f"a step with {name:10} takes {middle:.3f} times as long as before ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
