"""Probing: measuring the properties of a box, and recommending a BlackBox for it."""

from bondgrad.probing._probe import Session, probe
from bondgrad.probing._report import Cost, Report

__all__ = ["Cost", "Report", "Session", "probe"]
