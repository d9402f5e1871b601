"""Makes the tables of how long training steps and single gradients take."""

import statistics

from results_markdown import ROOT, load, source, source_cpu, table


def step_time() -> str:
    """Return the table of step times over AD's, on every machine where they were measured."""
    results = [load(path.stem) for path in sorted((ROOT / "results").glob("step_time_*.json"))]
    headings = [""]
    columns = []
    for result in results:
        headings += [f"{result['machine'].split(', ')[1]}: ms", "over AD"]
        runs = result["numbers"]["ms"]
        columns.append({name: (runs, sorted(run[name] / run["AD"] for run in runs)) for name in runs[0]})
    rows = []
    for name in dict.fromkeys(name for column in columns[::-1] for name in column):
        row = [name]
        for column in columns:
            if name not in column:
                row += ["-", "-"]
                continue
            runs, ratios = column[name]
            row.append(f"{statistics.median(run[name] for run in runs):.2f}")
            row.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        rows.append(row)
    return table(headings, rows) + "\n\n" + "\n".join(map(source_cpu, results))


def gpu_step() -> str:
    """Return the table of the demo's step on a GPU, eager and captured."""
    result = load("gpu_step")
    ms = result["numbers"]["ms"]
    rows = [[name, f"{value:.2f}", f"{value / ms['AD, ' + name.split(', ')[1]]:.2f}"] for name, value in ms.items()]
    return table(["", "ms", "over AD, run alike"], rows) + "\n\n" + source(result)


def gradient_500() -> str:
    """Return the table of one gradient at 500 inputs."""
    results = [load(f"gradient_500_{device}") for device in ("cpu", "cuda")]
    rows = [
        [
            n["device"],
            f"{n['ms']:.1f} ms",
            f"{n['captured_ms']:.1f} ms" if "captured_ms" in n else "-",
            f"{n['plain_loop_ms']:.0f} ms",
            f"{n['extra_MiB']:.0f} MiB",
            f"{100 * n['sign_accuracy']:.2f} %",
        ]
        for n in (result["numbers"] for result in results)
    ]
    headings = ["", "one gradient", "captured", "plain loop over inputs", "extra memory", "right signs"]
    return table(headings, rows) + "\n\n" + "\n".join(map(source, results))
