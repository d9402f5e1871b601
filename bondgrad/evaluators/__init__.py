"""Evaluators: where the box is evaluated."""

from bondgrad.evaluators._driver import Driver
from bondgrad.evaluators._evaluator import Answer, Evaluator, Request
from bondgrad.evaluators._local import Local

__all__ = ["Answer", "Driver", "Evaluator", "Local", "Request"]
