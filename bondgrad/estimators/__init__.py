"""Estimators: from evaluations to the gradient at the box's inputs."""

from bondgrad.estimators._central import Central
from bondgrad.estimators._estimator import Estimator, Evaluate, Site
from bondgrad.estimators._forward import Forward
from bondgrad.estimators._simultaneous import Simultaneous

__all__ = ["Central", "Estimator", "Evaluate", "Forward", "Simultaneous", "Site"]
