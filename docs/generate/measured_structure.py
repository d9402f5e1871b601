"""Makes the tables of what was measured about structure, sequences included."""

import statistics

from results_markdown import load, source, source_cpu, spread, table


def modular() -> str:
    """Return the tables of one gradient through modular boxes, on a CPU and on a GPU."""
    parts = []
    for name in ("structures", "structures_cuda"):
        result = load(name)
        rows = [
            [
                f"{n['box']}, {n['structure']}",
                f"{n['batch']}",
                f"{n['evaluations_a_row']:.0f}",
                f"{n['ms']:.1f} ms",
                *([f"{n['captured_ms']:.2f} ms"] if result["gpu"] else []),
                f"{n['exact_ms']:.1f} ms",
                f"{n['found_out_with']:,}" if n["structure"] == "auto" else "-",
                f"{n['difference_from_dense']:.0e}",
                f"{100 * n['sign_accuracy']:.2f} %",
            ]
            for n in result["numbers"]["modular"]
        ]
        headings = ["", "batch", "evaluations a row", "one gradient", *(["captured"] if result["gpu"] else [])]
        headings += ["exact, by AD", "found out with", "difference from dense, in float64", "right signs"]
        parts.append(table(headings, rows) + "\n\n" + source(result))
    return "\n\n".join(parts)


def found() -> str:
    """Return the table of the patterns that were found."""
    result = load("structures")
    rows = [
        [
            n["pattern"],
            f"{n['dependencies']:,}",
            f"{n['groups']}",
            f"{n['lower_bound']}",
            f"{n['evaluations']:,}",
            f"{n['missed']}",
            f"{n['false_alarms']}",
            f"{n['error']['found']:.1e} / {n['error']['dense']:.1e}",
            f"{100 * n['sign_accuracy']['found']:.2f} / {100 * n['sign_accuracy']['dense']:.2f}",
        ]
        for n in result["numbers"]["found"]
    ]
    headings = ["", "dependencies", "groups", "lower bound", "evaluations", "missed", "false alarms"]
    headings += ["error, found / dense", "right signs in %, found / dense"]
    return table(headings, rows) + "\n\n" + source_cpu(result)


def late() -> str:
    """Return the table of right signs before, while and after dependencies wake."""
    result = load("structures")
    numbers = result["numbers"]["late"]
    rows = []
    for name, first, last in numbers["phases"]:
        part = numbers["curve"][first:last]
        mean = {key: 100 * statistics.fmean(row[key] for row in part) for key in ("auto", "blocks")}
        lowest = 100 * min(row["auto"] for row in part)
        rows.append(
            [
                f"{name}: steps {first} to {last - 1}",
                f"{part[-1]['awake']}",
                f"{part[-1]['known']}",
                f"{part[-1]['groups']}",
                f"{mean['auto']:.2f}",
                f"{lowest:.2f}",
                f"{mean['blocks']:.2f}",
            ]
        )
    headings = ["", "awake at its end", "known by then", "groups", "auto", "auto, worst step", "fixed blocks"]
    return table(headings, rows) + "\n\n" + source_cpu(result)


def nen() -> str:
    """Return the tables of the echo state network's sign accuracy by horizon."""
    result = load("nen")
    parts = []
    runs = result["numbers"]["runs"]
    for radius in dict.fromkeys(run["radius"] for run in runs):
        rows = []
        exact = [run for run in runs if run["radius"] == radius and run["horizon"] == "exact, by AD"]
        for horizon in dict.fromkeys(run["horizon"] for run in runs):
            same = [run for run in runs if (run["radius"], run["horizon"]) == (radius, horizon)]
            plain, scaled = ([run for run in same if run["normalize_rows"] == on] for on in (False, True))
            mean = {key: statistics.fmean(run[key] for run in plain) for key in ("evaluations_a_step", "ms")}
            steps = statistics.fmean(run["time_steps_a_step"] for run in plain)
            name = f"horizon {horizon}"
            if horizon == "auto":
                name += f" (mean {statistics.fmean(run['mean_horizon'] for run in plain):.1f})"
            by_ad = horizon == "exact, by AD"
            rows.append(
                [
                    "automatic differentiation" if by_ad else name,
                    "exact" if by_ad else spread([100 * run["sign_accuracy"] for run in plain], 2),
                    "exact" if by_ad else spread([100 * run["sign_accuracy"] for run in scaled], 2),
                    "-" if by_ad else f"{mean['evaluations_a_step']:.0f}",
                    f"{steps:,.0f}",
                    f"{mean['ms'] / statistics.fmean(run['ms'] for run in exact):.2f}",
                    spread([run["test_loss"] for run in plain], 3),
                    "-" if by_ad else spread([run["test_loss"] for run in scaled], 3),
                ]
            )
        headings = ["", "right signs in %", "the same, rows normalized", "evaluations a step", "box time steps"]
        headings += ["time of a step / AD", "test loss", "the same, rows normalized"]
        parts.append(f"Spectral radius {radius}:\n\n" + table(headings, rows))
    seeds = len({run["seed"] for run in runs})
    protocol = f"{result['numbers']['epochs']} epochs (the paper: 100), {seeds} seeds, mean ± deviation. "
    return "\n\n".join([*parts, protocol + source_cpu(result)])
