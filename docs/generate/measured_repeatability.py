"""Makes the section of docs/measured.md on training that gives the same numbers again."""

from typing import Any

from results_markdown import ROOT, load, table

SECTION = """## The same numbers again

A run that is repeated, or interrupted and resumed, should end with the same numbers to the last bit. Twice a captured
run on a GPU, and once a run with two threads on a CPU, differed from its twin in the last digits. To find out why,
fresh processes train the demo's four methods with the same seed, and checksums of all that each step computes are
compared with those of one process that ran before them. Steps are counted from 0.

On the CPU the cause is a race in oneMKL 2024.2, which torch's packages contain. It chooses the code of its vectorised
functions, such as tanh, in the first such call of a process. If two threads make that call at the same time, one of
them may run code of low accuracy for its part of the tensor, once
([PyTorch's issue 188792](https://github.com/pytorch/pytorch/issues/188792)). Both threads have to run at that moment:
the busier the machine, the rarer this is. A campaign on a busy machine may miss it, and its zeros alone prove little.
The load in the table is that of the last five minutes of a campaign. The race was seen only with the code for Intel's
processors, which `--as-intel` has oneMKL use on others, too. The trainer calls tanh with one element before all else
(`bondgrad/experiments/repeatability.py`), since one element is never divided among threads. `--without-fix` leaves that
call out. First calls are made without it unless "after one element" is said.

{campaigns}

On a GPU the cause was the first replay of a captured step: when a capture begins, torch sets the offset of the graph's
random numbers on the capturing stream, and the first replay sets it on the current one. Nothing ordered the two, so the
first replay could have the random numbers of another step. In `bondgrad/torch_support/_graphs.py` the current stream
now waits for the capturing one. The campaign for it, captured runs beside eager ones, is
`python benchmarks/bit_identity.py --device cuda --processes 24 --at-once 8 --epochs 2 --steps 40`.

The same bits are to be expected on the same kind of processor only: oneMKL has different code for different ones, and
with its code for AMD's the last bits also depend on the number of threads."""


def repeatability() -> str:
    """Return the whole section."""
    return SECTION.format(campaigns=campaigns())


def campaigns() -> str:
    """Return the table of campaigns of fresh processes, with how many of these differed."""
    calls = load("first_calls")
    training = [load(path.stem) for path in sorted((ROOT / "results").glob("bit_identity_*.json"))]
    rows = [first_calls_row(label, numbers) for label, numbers in calls["numbers"].items()]
    for result in training:
        for label, numbers in result["numbers"].items():
            rows.append(training_row(label, numbers))
            if "captured against eager" in numbers:
                twins = numbers | numbers["captured against eager"]
                rows.append(training_row(f"{label}, captured against eager", twins))
    sources = [campaign_source(result, n) for result in (calls, *training) for n in result["numbers"].values()]
    headings = ["", "processes", "differing", "load, cores", "first differing operation"]
    return table(headings, rows) + "\n\n" + "\n".join(sources)


def first_calls_row(label: str, numbers: dict[str, Any]) -> list[str]:
    """Return the row of one campaign of first calls, with all its functions together."""
    functions = numbers["functions"]
    calls, differing = (sum(n[key] for n in functions.values()) for key in ("first calls", "differing"))
    affected = sum(n["differing"] > 0 for n in functions.values())
    largest = max(n["largest error"] for n in functions.values())
    words = f"the first call, of {affected} of {len(functions)} functions; off by up to {largest:.0e}"
    return [label, f"{calls:,}", str(differing), load_of(numbers), words if affected else "-"]


def training_row(label: str, numbers: dict[str, Any]) -> list[str]:
    """Return the row of one campaign of training processes, with how often each operation was the first to differ."""
    operations = [f"{name} ({count} times)" for name, count in numbers["first operations"].items()]
    count, differing = f"{numbers['processes']:,}", str(numbers["differing"])
    return [label, count, differing, load_of(numbers), "; ".join(operations) or "-"]


def load_of(numbers: dict[str, Any]) -> str:
    """Return the mean number of processes ready to run in a campaign's last five minutes, and the number of cores."""
    return f"{numbers['load']:.1f}, {numbers['cores']}"


def campaign_source(result: dict[str, Any], numbers: dict[str, Any]) -> str:
    """Return command, versions and machine of one campaign: those of a file may have been run on several machines."""
    environment = numbers["environment"]
    machine = environment["gpu"] or f"{environment['cpu'].split(', ')[0]}, {environment['threads']} threads"
    return f"`{numbers['command']}`, bondgrad {result['bondgrad']}, torch {environment['torch']}, {machine}."
