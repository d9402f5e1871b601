"""What an experiment costs, before it is begun."""

from typing import NamedTuple

from bondgrad.experiments.config import Experiment, Settings
from bondgrad.experiments.model import ESTIMATORS, made_reservoir
from bondgrad.structure import Sequence
from bondgrad.structure._structure import Dense

ROWS = {"california_housing": 16_512, "fashion_mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}  # to train on


class Cost(NamedTuple):
    """Of all runs together."""

    steps: int
    evaluations: int  # rows sent to boxes, at least; of sequences, time steps


def cost(experiment: Experiment) -> Cost:
    """All runs with all seeds."""
    steps = evaluations = 0
    known: dict[str, int] = {}  # of boxes: a sweep has a hundred runs with the same one
    for run in experiment.runs:
        whole = ROWS[run.data] // run.batch
        n = run.epochs * min(whole, run.steps or whole) * len(experiment.seeds)
        key = repr((run.box, run.gradient.method, run.gradient.n))
        if key not in known:
            known[key] = _evaluations_of_a_row(run)
        steps += n
        evaluations += n * run.batch * known[key]
    return Cost(steps, evaluations)


def _evaluations_of_a_row(run: Settings) -> int:
    """Sent to the box in one step, for each row of the batch."""
    how = run.gradient
    if run.box is None:
        return 0
    if how.method not in ESTIMATORS:
        return 1 if how.method == "AD" else 1 + 2 * how.n
    reservoir = made_reservoir(run.box)
    structure = Dense() if reservoir.structure == "dense" else reservoir.structure
    if isinstance(structure, Sequence):
        horizon = structure.horizon if isinstance(structure.horizon, int) else 1  # at least: it is measured later
        count = horizon * reservoir.in_features
    else:
        groups = structure.groups(reservoir.in_features, reservoir.out_features)
        count = reservoir.in_features if groups is None else groups.count
    return 1 + ESTIMATORS[how.method](how).evaluations(count)
