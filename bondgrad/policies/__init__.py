"""Policies: how far each input is moved."""

from bondgrad.measuring._step_trial import Differences, StartingPoint, StepTrial
from bondgrad.policies._bond import Bond
from bondgrad.policies._calibrated import Calibrated
from bondgrad.policies._fixed import Fixed
from bondgrad.policies._gaussian import Gaussian
from bondgrad.policies._optimal import Optimal
from bondgrad.policies._policy import Batch, MeasuringPolicy, Observation, Policy, State, Steps

__all__ = [
    "Batch",
    "Bond",
    "Calibrated",
    "Differences",
    "Fixed",
    "Gaussian",
    "MeasuringPolicy",
    "Observation",
    "Optimal",
    "Policy",
    "StartingPoint",
    "State",
    "StepTrial",
    "Steps",
]
