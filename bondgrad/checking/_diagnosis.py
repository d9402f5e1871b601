"""What may be wrong with a gradient, in words."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bondgrad.checking._judge import WEAK, Evidence

MOST = 8  # inputs that are spoken of
HUGE = 10.0  # relative error, from which its size does not matter
CLOSE = 0.2  # relative difference of a gradient from another one that it looks like


def problems(evidence: Evidence, tolerance: float) -> tuple[str, ...]:
    """One for each input that is wrong, or for all."""
    wrong = evidence.wrong[:-1].nonzero().flatten().tolist()
    if not evidence.wrong.any():
        return ()
    if _alike(evidence, tolerance):
        return (f"all inputs: {_factor(evidence, -1)}",)
    if not wrong:
        return (f"no input by itself, but all together: {_factor(evidence, -1)}",)
    pairs = dict(_swapped(evidence, wrong))
    found = []
    for i in wrong:
        if i not in pairs:
            found.append(f"input {i}: {_describe(evidence, i)}")
        elif i < pairs[i]:
            found.append(f"inputs {i} and {pairs[i]} look swapped")
    rest = len(found) - MOST
    return (*found[:MOST], f"and {rest} more inputs") if rest > 0 else tuple(found)


def weak(factor: Tensor, visible: Tensor) -> tuple[str, ...]:
    """Words on inputs whose slope was not seen: their factor [d] is NaN, and visible [d] in other units."""
    unseen = (factor.isnan() & visible.isfinite()).nonzero().flatten().tolist()
    if not unseen:
        return ()
    which = ", ".join(map(str, unseen[:MOST])) + (" and others" if len(unseen) > MOST else "")
    least = percent(WEAK * float(visible[unseen].max()))
    return (f"too weak to be seen by themselves: inputs {which}; an error of {least} of the typical slope would be",)


def percent(fraction: float) -> str:
    """With one decimal, or as many as it takes."""
    return f"{100 * fraction:.1f} %" if fraction >= 1e-3 or fraction == 0 else f"{100 * fraction:.0e} %"


def _alike(evidence: Evidence, tolerance: float) -> bool:
    """Whether one factor explains all."""
    if evidence.factor.numel() < 3 or bool(evidence.missing.any()):
        return False
    factor, error = evidence.factor, evidence.standard_error
    apart = (factor[:-1] - factor[-1]).abs() > tolerance + 4 * error[:-1]  # false for NaN
    explained = evidence.unexplained <= torch.maximum(evidence.visible, 0.1 * (factor[-1] - 1).abs())
    return bool(evidence.wrong[-1]) and not bool(apart.any()) and bool(explained.all())


def _swapped(evidence: Evidence, wrong: list[int]) -> Iterator[tuple[int, int]]:
    """Inputs of which each has the other's gradient."""
    g, s, known = evidence.g, evidence.s, evidence.known
    for i in wrong:
        both = known & known[:, i, None]  # [r, d]
        mine, other = (torch.where(both, t, 0).norm(dim=0) for t in (s[:, i, None], s))  # [d] each
        like = torch.where(both, g[:, i, None] - s, 0).norm(dim=0) < CLOSE * other  # [d] whose slope g_i is
        back = torch.where(both, g - s[:, i, None], 0).norm(dim=0) < CLOSE * mine  # [d] who has the gradient of i
        partners = [j for j in (like & back & (both.sum(0) > 2)).nonzero().flatten().tolist() if j != i and j in wrong]
        if len(partners) == 1:
            yield i, partners[0]


def _describe(evidence: Evidence, i: int) -> str:
    if evidence.missing[i]:
        return "not finite where the box is"
    off, rest = abs(float(evidence.factor[i]) - 1), float(evidence.unexplained[i])
    if not (evidence.g[:, i] != 0).any():
        return "zero, but the box depends on it"
    if math.isfinite(off) and rest <= max(float(evidence.visible[i]), CLOSE * off):
        return _factor(evidence, i)
    error = float(evidence.error[i])
    size = f"{percent(error)} of its size" if error < HUGE else "many times its size"
    return f"off by {size}, differently from row to row"


def _factor(evidence: Evidence, i: int) -> str:
    factor, error = float(evidence.factor[i]), float(evidence.standard_error[i])
    if abs(factor + 1) < CLOSE:
        return "wrong sign"
    known = f" ± {percent(error)}" if error >= 5e-4 else ""
    if factor < 0:
        return f"wrong sign, and {-factor:.2f} times as large"
    off = factor - 1
    size = percent(abs(off)) if off < 1 else f"{factor:.2f} times"
    return f"{size}{known} too {'large' if off > 0 else 'small'}" if off < 1 else f"{size} as large as it should be"
