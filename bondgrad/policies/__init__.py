"""Policies: how far each input is moved for a difference."""

import warnings

from bondgrad.measuring._first_step import StartingPoint
from bondgrad.measuring._step_trial import Differences, StepTrial
from bondgrad.policies._bond import Bond
from bondgrad.policies._calibrated import Calibrated
from bondgrad.policies._fixed import Fixed
from bondgrad.policies._gaussian import Gaussian
from bondgrad.policies._optimal import Optimal
from bondgrad.policies._policy import Batch, MeasuringPolicy, Observation, Policy, State, Steps

__all__ = ["Bond", "Calibrated", "Fixed", "Gaussian", "Optimal", "Policy"]
# For policies that users write.
__all__ += ["Batch", "Differences", "MeasuringPolicy", "Observation", "StartingPoint", "State", "StepTrial", "Steps"]

_FORMER_NAMES = {"First": StartingPoint, "Trial": StepTrial}


def __getattr__(name: str) -> type:
    """The class of a former name, with a deprecation warning."""
    if name not in _FORMER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    now = _FORMER_NAMES[name]
    warnings.warn(f"policies.{name} is called policies.{now.__name__} now: use that", DeprecationWarning, stacklevel=2)
    return now
