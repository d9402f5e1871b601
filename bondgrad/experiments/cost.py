"""What an experiment costs, before it is begun."""

from typing import NamedTuple

from bondgrad.experiments import readings
from bondgrad.experiments.config import Experiment
from bondgrad.experiments.model import made_reservoir
from bondgrad.experiments.settings import ESTIMATED, ROWS, Settings
from bondgrad.structure import Sequence
from bondgrad.structure._structure import Dense


class Cost(NamedTuple):
    """Of all runs together."""

    steps: int
    evaluations: int  # rows sent to boxes, or sequences; at least


def cost(experiment: Experiment) -> Cost:
    """All runs with all seeds."""
    steps = evaluations = 0
    known: dict[str, int] = {}  # of boxes: a sweep has a hundred runs with the same one
    for run in experiment.runs:
        whole = ROWS[run.data] // run.batch
        n = run.epochs * min(whole, run.steps or whole) * len(experiment.seeds)
        key = repr((run.box, run.gradient.method, run.gradient.n, run.gradient.structure, run.batch))
        if key not in known:
            known[key] = _evaluations_of_a_step(run)
        steps += n
        evaluations += n * known[key]
    return Cost(steps, evaluations)


def _evaluations_of_a_step(run: Settings) -> int:
    """Rows, or sequences, sent to the box in one step."""
    how = run.gradient
    if run.box is None:
        return 0
    reservoir = made_reservoir(run.box)
    structure = Dense() if reservoir.structure == "dense" or how.structure == "dense" else reservoir.structure
    count, rows = reservoir.in_features, run.batch
    if isinstance(structure, Sequence):
        rows = 1
        count *= structure.horizon if isinstance(structure.horizon, int) else 1  # at least: it is measured later
    elif (groups := structure.groups(reservoir.in_features, reservoir.out_features)) is not None:
        count = groups.count
    if how.method in ESTIMATED:
        return rows * (1 + readings.estimator(how, reservoir.in_features, reservoir.out_features).evaluations(count))
    return rows * (1 if how.method == "AD" else 1 + 2 * how.n)
