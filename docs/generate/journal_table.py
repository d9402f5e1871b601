"""Makes the figures of docs/journal.md: what a journal costs, and trainings that were killed.

`python docs/generate/tables.py` puts them there; `python benchmarks/journal.py --kills 20` measures them.
"""

from results_markdown import load, source_cpu, table


def journal_table() -> str:
    """Return the cost in a sentence, and a table of trainings that were killed."""
    result = load("journal")
    cost, killed = result["numbers"]["cost"], result["numbers"]["killed"]
    headings = ["box", "kills", "evaluations begun", "in the journal", "of them twice", "same parameters, bit for bit"]
    rows = [
        [
            run["box"],
            *(f"{run[key]:,}" for key in ("kills", "evaluations begun", "evaluations in the journal", "of them twice")),
            "yes" if run["same parameters"] else "no",
        ]
        for run in killed
    ]
    step, share = 1e3 * cost["seconds of a step without"], 100 * cost["share of the journal"]
    own = 1e3 * cost["seconds of a step in the journal itself"]
    return (
        f"With a box that takes 1 ms a row ({cost['inputs']} inputs, batches of {cost['batch']}, one row at a time), a "
        f"step of {step:.0f} ms takes {share:.1f} % more (median of {cost['steps']} steps side by side, on a "
        f"machine with a load of {cost['load of the machine']:.1f}); the journal itself takes {own:.1f} ms of it, and "
        f"{cost['bytes of an evaluation']:.0f} bytes for an evaluation.\n\n"
        "A training in a process that is killed with SIGKILL at random moments, and resumed from its last "
        f"checkpoint:\n\n{table(headings, rows)}\n\n{source_cpu(result)}"
    )
