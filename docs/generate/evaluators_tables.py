"""Makes the tables of docs/evaluators.md from what benchmarks/evaluator_*.py measured."""

from typing import Any

from results_markdown import load, source_cpu, table


def evaluators_tables() -> dict[str, str]:
    """Return the tables by name."""
    return {
        "faults": faults(),
        "flaky": flaky(),
        "eager": eager(),
        "workers": workers(),
        "housing": housing(),
        "memory": memory(),
        "scale": scale(),
    }


def faults() -> str:
    """Return the training with faults beside the one without."""
    rows, sources = [], []
    for kind in ("Processes", "Ray"):
        result = load(f"evaluator_faults_{kind.lower()}")
        numbers, sources = result["numbers"], [*sources, source_cpu(result)]
        clean, faulty = numbers["without faults"], numbers["faulty"]
        rows.append(
            [
                f"`{kind}(4)`, {numbers['steps']} steps",
                f"{faulty['signs, %']:.2f} % ({clean['signs, %']:.2f} %)",
                f"{faulty['evaluations']:,}",
                f"{faulty['in the journal']:,}",
                f"{faulty['asked again']:,}",
                f"{faulty['rows without an output']:,}",
                f"{faulty['workers killed']}",
            ]
        )
    headings = ["", "right signs (without faults)", "evaluations", "in the journal", "asked again", "lost", "killed"]
    return "\n\n".join([table(headings, rows), *sources])


def flaky() -> str:
    """Return the trainings through a box of which some rows fail, beside that through one of which none does."""
    result = load("flaky")
    rows = []
    for evaluator, runs in result["numbers"].items():
        clean = runs["none"]
        for kind, run in runs.items():
            losses = [run[key] / clean[key] - 1 for key in ("loss, last 100 steps", "test loss without faults")]
            rows.append(
                [
                    f"{evaluator}: {kind}" + (f", ended after {run['steps']} steps" if run["ended by"] else ""),
                    *(f"{100 * loss:+.2f} %" if run["finite"] else "not finite" for loss in losses),
                    f"{run['signs, %']:.2f} %",
                    f"{run['evaluations']:.1f}",
                    f"{run['asked again']:.1f}",
                    f"{100 * run['forward rows without an output']:.2f} %",
                ]
            )
    headings = ["where, what fails", "loss, last 100 steps", "test loss", "right signs", "evaluations a row"]
    headings += ["asked again", "rows of the forward pass without an output"]
    return table(headings, rows) + "\n\n" + source_cpu(result)


def eager() -> str:
    """Return the times of steps with eager=True."""
    result = load("evaluator_speed")
    rows = [
        [name, ms(row["without, s"]), ms(row["eager, s"]), f"{row['ratio']:.2f}", f"{row['least possible']:.2f}"]
        for name, row in result["numbers"]["eager"].items()
    ]
    return table(["box", "step without", "eager", "ratio", "least possible"], rows) + "\n\n" + source_cpu(result)


def workers() -> str:
    """Return the speed-up of four workers, and what a row costs."""
    result = load("evaluator_speed")
    rows = [
        [
            f"`{kind}`" if kind != "Dask" else "`Executor` of Dask",
            f"{row['speed-up']:.2f}",
            f"{row['us a row, pair by pair']:.0f} µs",
            f"{row['us a row, in two tasks']:.1f} µs",
        ]
        for kind, row in result["numbers"]["workers"].items()
    ]
    ten = result["numbers"]["ten threads, 2 ms a row"]
    text = (
        "A box of 2 ms a row in ten threads takes "
        f"{ten['in ten tasks, over ideal']:.2f} times rows · 2 ms / 10, and pair by pair "
        f"{ten['pair by pair, over ideal']:.2f} times."
    )
    headings = ["", "speed-up of four workers", "a row, one pair in a task", "a row, 1,000 in a task"]
    return "\n\n".join([table(headings, rows), text, source_cpu(result)])


def housing() -> str:
    """Return the trainings elsewhere."""
    result = load("evaluator_housing")
    rows = [
        [
            name,
            f"{row['first loss']:.4f}",
            f"{row['last loss']:.4f}",
            f"{row['steps with another loss']} of {row['steps']}",
            f"{row['evaluations']:,}",
            f"{row['asked again']:,}",
        ]
        for name, row in result["numbers"].items()
    ]
    headings = ["where", "first loss", "last loss", "steps with another loss", "evaluations", "asked again"]
    return table(headings, rows) + "\n\n" + source_cpu(result)


def memory() -> str:
    """Return what is in use after many evaluations."""
    result = load("evaluator_memory")
    rows = []
    for name, row in result["numbers"].items():
        tenths, before, after = row["after each tenth"], row["before"], row["after closing"]
        growth = tenths[-1]["MiB"] - tenths[1]["MiB"]
        left = [f"{after[key] - before[key]:+d}" for key in ("files", "threads", "processes")]
        rows.append([name, f"{tenths[1]['MiB']:.0f} MiB", f"{growth:+.1f} MiB", *left])
    headings = ["", "memory after 40,000", "growth from there", "files left", "threads left", "processes left"]
    return table(headings, rows) + "\n\n" + source_cpu(result)


def scale() -> str:
    """Return the number of workers that one driver keeps busy."""
    result = load("evaluator_scale")
    numbers: dict[str, Any] = result["numbers"]
    rows = []
    for kind, found in numbers.items():
        for d in (10, 500):
            for size in (2, 20, 200):
                most = [found["workers at 90 %"][f"d={d}, {size} rows, {t} ms"] for t in ("1", "50", "1000")]
                driver, gap = found["costs of a task, s"][f"d={d}, {size} rows"]
                cost = [f"{1 / driver:,.0f}", f"{1000 * gap:.2f} ms"]
                rows.append([kind, str(d), str(size), *cost, *(f"{n:,}" for n in most)])
    headings = ["", "inputs", "rows in a task", "tasks a second", "gap", "1 ms a row", "50 ms", "1 s"]
    return table(headings, rows) + "\n\n" + source_cpu(result)


def ms(seconds: float) -> str:
    """Return milliseconds as text."""
    return f"{1000 * seconds:.0f} ms"
