"""For people who write estimators, policies or boxes: exact boxes, and the suite that every estimator must pass."""

from bondgrad.testing import boxes
from bondgrad.testing.conformance import CHECKS, Subject

__all__ = ["CHECKS", "Subject", "boxes"]
