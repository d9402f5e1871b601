"""What training through the box will cost."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bondgrad.policies import Calibrated
from bondgrad.step._trials import SETTINGS

if TYPE_CHECKING:
    from bondgrad.probing._report import Report


@dataclass(frozen=True)
class Cost:
    """Of one estimator, the box alone."""

    evaluations: int  # of a training step, with those of the forward pass
    seconds: float | None  # of a training step; None: the speed is not known
    hours: float | None  # of the whole training
    extrapolated: bool  # whether its calls have more rows than any that was timed


def predict(report: "Report", batch: int, steps: int) -> dict[str, Cost]:
    """For each estimator: what a training of so many steps of so many rows costs."""
    groups = report.in_features if report.dependence is None else report.dependence.groups
    per_row = {"central": 2 * groups, "forward": groups, "simultaneous": 2}
    costs = {}
    for estimator, moved in per_row.items():
        seconds = None
        if report.speed is not None:
            took, rows = report.speed.seconds, min(batch, SETTINGS.rows)
            # Trials of the default policy: of so many rows, with half and with twice the step, and unmoved.
            trials = Calibrated.share * batch * moved / (rows * (2 * moved + 1))
            seconds = took(batch) + took(batch * moved) + trials * (2 * took(rows * moved) + took(rows))
        evaluations = round(batch * (1 + (1 + Calibrated.share) * moved))
        beyond = report.speed is not None and report.speed.extrapolated(batch * moved)
        costs[estimator] = Cost(evaluations, seconds, None if seconds is None else steps * seconds / 3600, beyond)
    return costs
