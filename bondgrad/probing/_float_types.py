"""The type in which a box computes, as far as its outputs and their rounding tell."""

import bisect
import math

import torch
from torch import Tensor

from bondgrad.errors import counted
from bondgrad.probing._facts import Facts

TYPE_NAMES = ("float64", "float32", "float16", "bfloat16")
FLOAT_TYPES = tuple(getattr(torch, name) for name in TYPE_NAMES)
LARGEST_FLOORS = (3e-12, 2e-5, 7e-4, 2e-2)  # the largest floor that each of these types causes in a network
# Arithmetic that explains a floor up to each of LARGEST_FLOORS, and a name for floors above all of them.
PRECISION_NAMES = ("float64", "float32", "TF32 or float16", "bfloat16", "coarser than bfloat16")
TYPE_VALUES = 24  # least number of different values, other than zero, to tell the type that holds them


def arithmetic_of(floor: float) -> str:
    """The name of the finest arithmetic that explains the floor, which may have other causes."""
    return PRECISION_NAMES[bisect.bisect_left(LARGEST_FLOORS, floor)]


def precision_of(floor: float, known: int) -> str:
    """The name of the type with the number `known`, if it explains the floor; if not, how many digits are good."""
    if floor <= LARGEST_FLOORS[known]:
        return TYPE_NAMES[known]
    return f"good to about {counted(max(1, round(-math.log10(2 * floor))), 'digit')}"


def type_of(unit: float) -> int:
    """The number in FLOAT_TYPES of the type with this relative rounding unit."""
    return bisect.bisect_left([torch.finfo(dtype).eps for dtype in FLOAT_TYPES], unit)


def coarsest_type(y: Tensor) -> int:
    """The number in FLOAT_TYPES of the coarsest type that holds all of y [n, d_out] exactly; zero: too few values."""
    y = y[torch.isfinite(y) & (y != 0)]
    holds = [n for n, dtype in enumerate(FLOAT_TYPES) if bool((y.to(dtype).double() == y).all())]
    return holds[-1] if len(torch.unique(y)) >= TYPE_VALUES else 0


def output_unit(facts: Facts) -> float:
    """The relative rounding unit of the coarsest type that explains the outputs."""
    return float(torch.finfo(FLOAT_TYPES[max(type_of(facts.unit), coarsest_type(facts.y))]).eps)
