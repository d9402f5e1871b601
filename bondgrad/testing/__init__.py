"""For people who write estimators, policies or boxes: exact boxes, and what estimators and policies must pass."""

from bondgrad.testing import boxes
from bondgrad.testing.conformance import CHECKS, Subject, check_estimator, check_policy

__all__ = ["CHECKS", "Subject", "boxes", "check_estimator", "check_policy"]
