"""Evaluators: where and in which portions the box is evaluated."""

from bondgrad.evaluators._evaluator import Evaluator
from bondgrad.evaluators._local import Local

__all__ = ["Evaluator", "Local"]
