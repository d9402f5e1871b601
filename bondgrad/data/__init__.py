"""Data sets."""

from bondgrad.data._california import CaliforniaHousing, california_housing

__all__ = ["CaliforniaHousing", "california_housing"]
