"""Policies: how far each input is moved."""

from bondgrad.policies._bond import Bond
from bondgrad.policies._fixed import Fixed
from bondgrad.policies._gaussian import Gaussian
from bondgrad.policies._optimal import Optimal
from bondgrad.policies._policy import Batch, Policy, State, Steps

__all__ = ["Batch", "Bond", "Fixed", "Gaussian", "Optimal", "Policy", "State", "Steps"]
