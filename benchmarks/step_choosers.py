"""Step choosers of the field beside the default layer, at boxes that other people wrote and at 16 known functions.

    python benchmarks/step_choosers.py                 # everything
    python benchmarks/step_choosers.py forest Oliver1  # only these; the rest stays as it was

Everything in float64. The default layer is trained through for 160 steps with rows drawn anew; every eighth batch
of the last 80 counts. What it spent beyond central differences (its trials) is the budget of every other method: it
searches a step for each input at as many rows of the first batch as that pays for, one at least, and uses the median
for all batches ("shared"). A forward difference costs half: two readings of it are averaged. As their authors mean
them, methods search at every row and input anew ("own"), which costs several times as much; `ours, k readings` is the
default layer with gradients averaged until it costs as much as the dearest of them. No method is told the noise.
"""

import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from foreign_boxes import BOXES, Array
from gallery import SEEDS, rows_of
from lockstep import side_by_side
from record import save
from references import difference, smoothed
from step_rules import RULES, Choice, Rule, choose, fitted_slope

from bondgrad import BlackBox

LADDER = [2.0**k for k in (*range(-24, -6, 2), *np.arange(-6, 3, 0.5).tolist(), 3, 4)]  # fixed steps, in deviations
OWN_BATCHES = 1  # of those that count, where every row has a search of its own; four for the known functions
READINGS = 5
STEPS, MEASURED, EVERY = 160, 80, 8
NOISE = 1e-4
VISIBLE = 10.0  # a slope counts if it changes a function over the spread of x by so many deviations of the noise


class Case(NamedTuple):
    """A box in float64, its batches and its slopes."""

    answers: Callable[[Array], Array]
    d: int
    rows: int
    spread: float
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]  # x [B, d], gy [B, d_out]
    slopes: Callable[[torch.Tensor, torch.Tensor], Array]  # [B, d]; 0: not known, or lost in the noise


class Batch(NamedTuple):
    """Rows that count."""

    x: Array  # [B, d]
    gy: Array  # [B, d_out]
    slopes: Array  # [B, d]


def gallery_case(name: str) -> Case:
    """A box of the gallery."""
    box = BOXES[name]()

    def batch(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x, gy = rows_of(box, random)
        return x.double(), gy.double()

    slopes = smoothed if box.jumps else difference  # no step is right by definition
    return Case(box.answers, box.d, box.rows, box.deviation, batch, lambda x, gy: slopes(box, x, gy).numpy())


def problem_case(problem: Any, noise: float) -> Case:
    """One of numericalderivative's functions at 32 rows drawn evenly from its interval, with normal noise."""
    low, high = problem.get_interval()
    spread = (high - low) / math.sqrt(12)
    random = np.random.default_rng(0)

    def each(f: Callable[[float], float], x: Array) -> Array:
        def value(at: float) -> float:
            try:
                y = f(at)
                return math.nan if isinstance(y, complex) else float(y)  # a root of a negative number
            except (ValueError, OverflowError, ZeroDivisionError):
                return math.nan

        with np.errstate(all="ignore"):
            return np.array([[value(at)] for at in x[:, 0].tolist()])

    def answers(x: Array) -> Array:
        return each(problem.get_function(), x) + (noise * random.normal(size=(len(x), 1)) if noise else 0.0)

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = low + (high - low) * torch.rand(32, 1, generator=generator, dtype=torch.float64)
        return x, torch.ones(32, 1, dtype=torch.float64)

    def slopes(x: torch.Tensor, _: torch.Tensor) -> Array:
        exact = each(problem.get_first_derivative(), x.numpy())
        return np.where(np.abs(exact) * spread > VISIBLE * noise, exact, 0)

    return Case(answers, 1, 32, spread, batch, slopes)


def cases() -> dict[str, Callable[[], Case]]:
    """Everything there is, by name."""
    import numericalderivative

    found: dict[str, Callable[[], Case]] = {name: lambda name=name: gallery_case(name) for name in BOXES}  # type: ignore[misc]
    for problem in numericalderivative.build_benchmark():
        found[problem.get_name()] = lambda p=problem: problem_case(p, 0.0)  # type: ignore[misc]
        found[f"{problem.get_name()}, noise"] = lambda p=problem: problem_case(p, NOISE)  # type: ignore[misc]
    return found


def own_batches(case: Case) -> int:
    """How many batches have searches of their own at every row and input."""
    return OWN_BATCHES * (4 if case.d == 1 else 1)


def score(g: Array, exact: Array) -> list[float]:
    """Signs in %, mean cosine over rows, and the median relative error of entries."""
    counts = (exact != 0) & np.isfinite(exact)
    if not counts.any():
        return [math.nan] * 3  # of this batch nothing is known: `np.nanmean` leaves it out
    g, exact = np.where(np.isfinite(g), g, 0), np.where(counts, exact, 0)
    signs = 100 * np.mean((np.sign(g) == np.sign(exact))[counts])
    units = [t / np.maximum(np.abs(t).max(1, keepdims=True), 1e-300) for t in (g, exact)]  # squares may overflow
    lengths = np.linalg.norm(units[0], axis=1) * np.linalg.norm(units[1], axis=1)
    cosine = np.mean(((units[0] * units[1]).sum(1) / np.maximum(lengths, 1e-300))[counts.any(1)])
    error = np.median(np.abs(g - exact)[counts] / np.abs(exact)[counts])
    return [float(signs), float(cosine), float(error)]


def differences(case: Case, batch: Batch, steps: Array, forward: bool = False) -> Array:
    """Slopes [B, d] of gy·y by differences of these steps [B, d] or [d]."""
    x, gy = batch.x, batch.gy
    moves = np.broadcast_to(steps, x.shape).T[:, :, None] * np.eye(case.d)[:, None]  # [d, B, d]
    up, down = x + moves, x[None] if forward else x - moves
    sizes = (up - down)[np.arange(case.d), :, np.arange(case.d)]  # [d, B]: what was really moved
    y = np.asarray(case.answers(np.concatenate((up.reshape(-1, case.d), down.reshape(-1, case.d)))))
    upper, lower = np.split(y, [up.size // case.d])
    with np.errstate(all="ignore"):
        change = upper.reshape(case.d, len(x), -1) - lower.reshape(len(down), len(x), -1)
        return np.asarray((change * gy).sum(2) / sizes).T


def searches(case: Case, batch: Batch, rows: int, search: Callable[..., Any]) -> list[Any]:
    """What a search finds at each input of the first rows, row by row: searches see gy·y along one input."""
    where = [(b, i) for b in range(rows) for i in range(case.d)]

    def values(which: list[int], at: list[float]) -> list[float]:
        points = batch.x[[where[n][0] for n in which]].copy()
        points[np.arange(len(which)), [where[n][1] for n in which]] = at
        y = np.asarray(case.answers(points))
        return (y * batch.gy[[where[n][0] for n in which]]).sum(1).tolist()

    return side_by_side([lambda f, b=b, i=i: search(f, float(batch.x[b, i])) for b, i in where], values)


def by_rule(case: Case, rule: Rule, batches: list[Batch], first: Batch, budget: float) -> dict[str, Any]:
    """Scores of a rule, with one step per input for all rows, and with a step for every row and input."""

    def search(f: Callable[[float], float], x: float) -> Choice:
        return choose(rule, f, x, case.spread)

    found = searches(case, first, len(first.x), search)
    spent = np.cumsum([choice.evaluations for choice in found]).reshape(-1, case.d)[:, -1]  # [B]
    rows = max(1, int(np.sum(spent <= budget)))
    steps = np.array([choice.step for choice in found]).reshape(-1, case.d)[:rows]
    failed = np.array([choice.failed for choice in found]).reshape(-1, case.d)[:rows]
    shared = np.array(
        [np.median(steps[~failed[:, i], i] if not failed[:, i].all() else steps[:, i]) for i in range(case.d)]
    )
    readings = 2 if rule.forward else 1
    results = []
    for batch in batches:
        g = np.mean([differences(case, batch, shared, rule.forward) for _ in range(readings)], 0)
        results.append(score(g, batch.slopes))
    own, costs, failures = [], [], []
    for batch in batches[: own_batches(case)]:
        choices = searches(case, batch, len(batch.x), search)
        own_steps = np.array([choice.step for choice in choices]).reshape(-1, case.d)
        own.append(score(differences(case, batch, own_steps, rule.forward), batch.slopes))
        costs.append(sum(choice.evaluations for choice in choices) / len(batch.x))
        failures.append(np.mean([choice.failed for choice in choices]))
    each = case.d if rule.forward else 2 * case.d
    return {
        "shared": np.nanmean(results, 0).tolist(),
        "rows searched": rows,
        "steps": (shared / case.spread).tolist(),
        "own": np.nanmean(own, 0).tolist(),
        "own evaluations": float(np.mean(costs)) + each,
        "failed": float(np.mean(failures)),
    }


def by_fit(case: Case, batches: list[Batch]) -> dict[str, Any]:
    """Scores of DerivKit's fit, which has a grid of its own at every row and input."""
    own, costs = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in batches[: own_batches(case)]:
            found = searches(case, batch, len(batch.x), fitted_slope)
            own.append(score(np.array([g for g, _ in found]).reshape(-1, case.d), batch.slopes))
            costs.append(sum(count for _, count in found) / len(batch.x))
    return {"own": np.nanmean(own, 0).tolist(), "own evaluations": float(np.mean(costs))}


def batches_of(case: Case, seed: int) -> tuple[Batch, list[Batch]]:
    """The first batch of a training, and those that count."""
    random = torch.Generator().manual_seed(seed)
    drawn = [case.batch(random) for _ in range(STEPS)]
    counted = [n for n in range(STEPS - MEASURED, STEPS) if n % EVERY == 0]
    first, *rest = (Batch(x.numpy(), gy.numpy(), case.slopes(x, gy)) for x, gy in (drawn[n] for n in (0, *counted)))
    return first, rest


def ours(case: Case, seed: int) -> dict[str, Any]:
    """Scores of the default layer, with one reading and several."""
    random = torch.Generator().manual_seed(seed)
    layer = BlackBox(case.answers, case.d, seed=seed)
    results, several = [], []

    def gradient(x: torch.Tensor, gy: torch.Tensor) -> Array:
        x = x.clone().requires_grad_()
        return np.asarray(torch.autograd.grad(layer(x), x, gy)[0].numpy())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = []
        for step in range(STEPS):
            x, gy = case.batch(random)
            g = gradient(x, gy)
            if step >= STEPS - MEASURED and step % EVERY == 0:
                exact = case.slopes(x, gy)
                results.append(score(g, exact))
                kept.append((x, gy, exact))
        evaluations = layer.stats.evaluations
        for x, gy, exact in kept[: own_batches(case)]:
            several.append(score(np.mean([gradient(x, gy) for _ in range(READINGS)], 0), exact))
    return {
        "shared": np.nanmean(results, 0).tolist(),
        "evaluations": evaluations / STEPS / case.rows,
        "budget": evaluations - STEPS * case.rows * (2 * case.d + 1),
        "readings": np.nanmean(several, 0).tolist(),
        "reading evaluations": READINGS * (2 * case.d + 1),
        "steps": (layer.policy_state.read(torch.device("cpu"))["step"] / case.spread).tolist(),
    }


def best_fixed(case: Case, by_error: bool) -> float:
    """The fixed step, in deviations, that is best at another seed."""
    batches = batches_of(case, 1)[1]
    means = {
        r: np.nanmean([score(differences(case, b, r * case.spread), b.slopes) for b in batches], 0) for r in LADDER
    }
    return min(LADDER, key=lambda r: means[r][2] if by_error else (-round(means[r][0], 2), -means[r][1]))


def measure(name: str, case: Case, seeds: tuple[int, ...]) -> dict[str, Any]:
    """One box."""
    if not any((batch.slopes != 0).any() for batch in batches_of(case, 1)[1]):
        raise LookupError(f"the noise hides all slopes: {VISIBLE} deviations of it are more than {name} changes")
    fixed = best_fixed(case, by_error=name not in BOXES)
    runs = []
    for seed in seeds:
        first, batches = batches_of(case, seed)
        run: dict[str, Any] = {"seed": seed, "default": ours(case, seed)}
        run["fixed"] = [score(differences(case, b, fixed * case.spread), b.slopes) for b in batches]
        run["fixed"] = {"shared": np.nanmean(run["fixed"], 0).tolist()}
        if name.startswith("circuit,"):
            shift = np.pi / 2  # half the difference over it is the slope of an expectation value
            shifted = [score(differences(case, b, shift) * shift, b.slopes) for b in batches]
            run["parameter shift"] = {"shared": np.nanmean(shifted, 0).tolist()}
        budget = run["default"]["budget"]
        for rule_name, rule in RULES.items():
            run[rule_name] = by_rule(case, rule, batches, first, budget)
        try:
            run["DerivKit"] = by_fit(case, batches)
        except ImportError:
            print("derivkit is not installed: left out")
        runs.append(run)
    return {"box": name, "known": name not in BOXES, "best_step": fixed, "runs": runs}


def show(found: dict[str, Any]) -> None:
    """Print one box."""
    print(f"== {found['box']}   best fixed step {found['best_step']:.3g}")
    for method in found["runs"][0]:
        if method == "seed":
            continue
        of = [run[method] for run in found["runs"]]
        cells = []
        for kind in ("shared", "own", "readings"):
            if kind in of[0]:
                signs, cosine, error = np.mean([one[kind] for one in of], 0)
                cells.append(f"{kind:8s} {signs:6.2f} {cosine:6.3f} {error:8.1e}")
        cells += [
            f"{key} {np.mean([one[key] for one in of]):.3g}"
            for key in ("evaluations", "rows searched", "own evaluations", "failed")
            if key in of[0]
        ]
        print(f"  {method:30s}", "  ".join(cells), flush=True)


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    known = cases()
    names = sys.argv[1:] or list(known)
    del sys.argv[1:]
    path = Path(__file__).parent.parent / "results" / "step_choosers.json"
    done = {n["box"]: n for n in json.loads(path.read_text())["numbers"]} if path.exists() else {}
    for name in names:
        try:
            done[name] = measure(name, known[name](), SEEDS)
        except (ImportError, FileNotFoundError, LookupError) as error:
            print(f"{name} is left out: {error}")
            continue
        show(done[name])
        save("step_choosers", [done[name] for name in known if name in done])


if __name__ == "__main__":
    main()
