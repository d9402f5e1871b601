"""Policies: how far each input is moved."""

from bondgrad.policies._bond import Bond
from bondgrad.policies._calibrated import Calibrated
from bondgrad.policies._fixed import Fixed
from bondgrad.policies._gaussian import Gaussian
from bondgrad.policies._optimal import Optimal
from bondgrad.policies._policy import Batch, Policy, State, Steps
from bondgrad.policies._trial import First, Trial

__all__ = ["Batch", "Bond", "Calibrated", "First", "Fixed", "Gaussian", "Optimal", "Policy", "State", "Steps", "Trial"]
