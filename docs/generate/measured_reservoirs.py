"""Makes the tables of what was measured about reservoirs."""

import statistics

from results_markdown import load, source, spread, table

from bondgrad.reservoirs import Rockmelon

METHODS = {
    "no reservoir": "no reservoir",
    "Rockmelon": "Rockmelon",
    "device, AD": "device, exact gradient",
    "device": "device",
    "bench": "bench",
    "bench, bond, told": "bench, `Bond`, told the noise",
    "bench, bond": "bench, `Bond`",
}


def reservoirs() -> str:
    """Return the tables of gradients through each reservoir."""
    parts = []
    for name in ("reservoirs_cuda", "reservoirs_cpu"):
        result = load(name)
        rows = []
        for found in result["numbers"]["gradients"]:
            if found["policy"] != "calibrated":
                continue
            (bond,) = (
                other
                for other in result["numbers"]["gradients"]
                if other["reservoir"] == found["reservoir"] and other["policy"] == "bond"
            )
            rows.append(
                [
                    f"`{found['reservoir']}`",
                    str(found["in_features"]),
                    f"`{found['structure']}`".replace("'", ""),
                    f"{100 * found['signs']:.2f} / {100 * bond['signs']:.2f}",
                    f"{found['evaluations_a_row']:.1f} / {bond['evaluations_a_row']:.0f}",
                    f"{found['ms']:.1f} / {found['exact_ms']:.1f}",
                ]
            )
        headings = ["", "inputs", "declares", "right signs, %", "evaluations a row", "ms / exact gradient"]
        parts += [table(headings, rows), source(result)]
    return "\n\n".join(parts)


def readings() -> str:
    """Return the table of how many readings a second the simulated device gives."""
    rows = []
    for name in ("reservoirs_cuda", "reservoirs_cpu"):
        result = load(name)
        n = result["numbers"]["readings"]
        rows.append([result["gpu"] or result["machine"], f"{n['readings'] / n['seconds']:,.0f}"])
    return table(["`QuantumDotArray`", "readings a second"], rows)


def card() -> str:
    """Return the table of how well the network that is shipped knows the device."""
    found = Rockmelon(1).card
    rows = [
        [name, f"{r2:.4f}", f"{error:.4f}", f"{deviation:.3f}", f"{extrema:.1f}"]
        for name, r2, error, deviation, extrema in zip(
            ("current", "phase / rad"),
            found["r2"],
            found["rms_error"],
            found["deviation_of_readings"],
            found["extrema_of_a_sweep"],
            strict=True,
        )
    ]
    headings = ["", "R²", "error (rms)", "readings deviate by", "extrema along the sweep of a gate"]
    return (
        table(headings, rows)
        + f"\n\n{found['pairs']:,} pairs, {found['epochs']} epochs, batch {found['batch']}, Adam {found['rate']:.0e}; "
        f"{found['seconds']:.0f} s; judged by {found['held_out']:,} readings held out. `bondgrad pretrain rockmelon`, "
        f"bondgrad {found['bondgrad']}, torch {found['torch']}, {found['gpu'] or found['machine']}."
    )


def in_the_loop() -> str:
    """Return the table of California Housing with a device between two networks."""
    result = load("quantum_reservoir")
    numbers = result["numbers"]
    rows = []
    for method, title in METHODS.items():
        runs = [run for run in numbers["runs"] if run["method"] == method]
        mean = {
            key: statistics.fmean(run[key] for run in runs) if runs[0][key] is not None else None
            for key in ("signs", "readings", "hours_on_the_bench")
        }
        rows.append(
            [
                title,
                spread([run["test_loss"] for run in runs], 3),
                "-" if mean["signs"] is None else f"{100 * mean['signs']:.2f}",
                "-" if mean["readings"] is None else f"{mean['readings']:,.0f}",
                "-" if mean["hours_on_the_bench"] is None else f"{mean['hours_on_the_bench']:.1f}",
            ]
        )
    troubles = ", ".join(f"{name} {value:g}" for name, value in numbers["troubles"].items())
    return (
        table(["", "test loss", "right signs, %", "readings spent", "hours on the bench"], rows)
        + f"\n\n{numbers['epochs']} epochs, three seeds; the bench has {troubles} (see `Instrument`). {source(result)}"
    )
