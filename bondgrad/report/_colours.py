"""Which colour a run has in all figures of its experiment."""

from collections import Counter
from dataclasses import dataclass

from bondgrad.report._experiment import Experiment, Plot, Run

Dash = str | tuple[int, tuple[float, ...]]

# Of Okabe and Ito, who chose them for all kinds of sight; dark and light enough for a page of either kind.
METHODS = {"AD": "#77808a", "BOND": "#0072b2", "BONDS": "#009e73", "SPSA": "#d55e00"}
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d46", "#77808a")
# Lines that lie on each other can still be told apart.
DASHES: tuple[Dash, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
OF_METHOD = {"AD": DASHES[0], "BOND": DASHES[1], "BONDS": DASHES[3], "SPSA": DASHES[2]}


@dataclass(frozen=True)
class Look:
    """How a line looks."""

    colour: str
    dash: Dash


def runs_in(experiment: Experiment, plot: Plot) -> dict[str, list[Run]]:
    """Runs of a figure by name, one for each seed, without those that were not made."""
    names = plot.runs or list(dict.fromkeys(run.run for run in experiment.runs))
    return {name: experiment.of(name) for name in names if experiment.of(name)}


def looks(experiment: Experiment) -> dict[str, Look]:
    """A look for every run: that of its method where no figure has another run of this method."""
    shared = set()
    for plot in experiment.plots:
        if plot.kind in ("sweep", "lines"):  # not coloured by run
            continue
        methods = {name: runs[0].method for name, runs in runs_in(experiment, plot).items()}
        often = Counter(methods.values())
        shared |= {name for name, method in methods.items() if often[method] > 1}
    found, others = {}, []
    for run in experiment.runs:
        if run.run in found or run.run in others:
            continue
        if run.method in METHODS and run.run not in shared:
            found[run.run] = Look(METHODS[run.method], OF_METHOD[run.method])
        else:
            others.append(run.run)
    taken = {look.colour for look in found.values()}
    return found | dict(zip(others, palette(len(others), taken), strict=True))


def palette(number: int, taken: set[str] | frozenset[str] = frozenset()) -> list[Look]:
    """So many looks, in colours that are not taken."""
    free = [colour for colour in PALETTE if colour not in taken] or list(PALETTE)
    # One dash further in each round, so that no look comes back before 32 others (with all colours free).
    return [Look(free[i % len(free)], DASHES[(i + i // len(free)) % len(DASHES)]) for i in range(number)]
