"""Makes the table of docs/probe.md: what is recommended for boxes that other people wrote, and whether it trains.

`python docs/generate/tables.py` puts it there; `python benchmarks/probe_foreign.py` measures it.
"""

from results_markdown import load, source_cpu, table


def probe_table() -> str:
    """Return a row for each box."""
    result = load("probe_foreign")
    headings = ["box", "verdict", "recommended", "signs, predicted", "measured", "loss before", "after"]
    rows = [
        [
            n["box"],
            n["verdict"],
            ", ".join(f"`{name}={value.removeprefix('bondgrad.')}`" for name, value in n["recommended"].items()) or "-",
            *(f"{n[key]:.1f} %" for key in ("predicted", "signs")),
            *(f"{loss:.2f}" for loss in n["loss"]),
        ]
        for n in result["numbers"]
    ]
    return table(headings, rows) + "\n\n" + source_cpu(result)
