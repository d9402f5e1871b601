"""Makes the tables of what the demo's four methods reached, and of the search for SPSA's settings."""

import statistics
from typing import Any

from results_markdown import load, source, spread, table


def demo() -> str:
    """Return the table of the demo's four methods, which README.md shows, too."""
    result = load("demo/demo")
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        runs.setdefault(run["method"], []).append(run)
    exact_ms = statistics.fmean(run["ms_per_step"] for run in runs["AD"])
    rows = [
        [
            method if same[0]["policy"] is None else f'{method}, `policy="{same[0]["policy"]}"`',
            spread([run["test_loss"][-1] for run in same], 3),
            "exact" if method == "AD" else f"{spread([100 * run['sign_accuracy'] for run in same], 3)} %",
            f"{statistics.fmean(run['ms_per_step'] for run in same) / exact_ms:.2f}",
            f"{same[0]['evaluations_per_step']:.0f}",
        ]
        for method, same in runs.items()
    ]
    seeds = " ".join(f"--seed {seed}" for seed in dict.fromkeys(run["seed"] for run in result["runs"]))
    return (
        table(["", "test loss", "right signs", "time of a step / AD", "evaluations a step"], rows)
        + f"\n\n{result['epochs']} epochs (the paper: 100), batch {result['batch']}, mean ± deviation over seeds; "
        f"`bondgrad demo --epochs {result['epochs']} {seeds}`, bondgrad {result['bondgrad']}, torch {result['torch']}, "
        f"{result['machine']}, {result['threads']} thread{'s' * (result['threads'] > 1)}."
    )


def spsa_search() -> str:
    """Return the table of SPSA's test loss by learning rate and perturbation."""
    result = load("spsa_search")
    cells = {(n["rate"], n["mu"]): statistics.fmean(n["test_loss"]) for n in result["numbers"]}
    rates, mus = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    rows = [[f"rate {rate:.0e}", *(f"{cells[rate, mu]:.2f}" for mu in mus)] for rate in rates]
    return table(["", *(f"mu {mu:.0e}" for mu in mus)], rows) + "\n\n" + source(result)
