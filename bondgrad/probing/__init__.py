"""Probing: what a box is like, and which BlackBox it needs."""

from bondgrad.probing._probe import Session, probe
from bondgrad.probing._report import Cost, Report

__all__ = ["Cost", "Report", "Session", "probe"]
