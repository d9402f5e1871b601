"""Tests for estimators and policies that users write, and boxes with known Jacobians."""

from bondgrad.testing import boxes
from bondgrad.testing.conformance import CHECKS, Subject, check_estimator, check_policy

__all__ = ["CHECKS", "Subject", "boxes", "check_estimator", "check_policy"]
