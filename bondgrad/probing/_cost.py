"""What training through the box will cost."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bondgrad.policies import Calibrated

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
    trials = 1 + Calibrated.share  # the default policy's
    groups = report.in_features if report.dependence is None else report.dependence.groups
    per_row = {"central": 2 * groups, "forward": groups, "simultaneous": 2}
    costs = {}
    for estimator, moved in per_row.items():
        seconds = None
        if report.speed is not None:
            seconds = report.speed.seconds(batch) + trials * report.speed.seconds(batch * moved)
        evaluations = round(batch * (1 + trials * moved))
        beyond = report.speed is not None and report.speed.extrapolated(batch * moved)
        costs[estimator] = Cost(evaluations, seconds, None if seconds is None else steps * seconds / 3600, beyond)
    return costs
