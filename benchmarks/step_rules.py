"""Step choosers of the field, for a function of one number at one point, told nothing but the function.

The noise of the function is estimated by ECnoise for all of them (Moré and Wild, Estimating computational noise, SIAM
J. Sci. Comput. 33, 2011), as Shi, Xie, Xuan and Nocedal do it. The methods of the last four come from PyPI's
numericalderivative, the fit from derivkit.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Function = Callable[[float], float]


class Rule(NamedTuple):
    """A way to choose a step, and the difference that it is for. It raises ValueError where it finds no step."""

    step: Callable[[Function, float, float, float], float]  # of f, x, the noise of f, the spread of x
    forward: bool


class Choice(NamedTuple):
    """What a rule says about one point."""

    step: float
    failed: bool  # the rule found no step: this one is made for derivatives of 1
    evaluations: int


def noise_of_differences(values: list[float]) -> float | None:
    """ECnoise: the noise of a function from its values at equidistant points; None where the table shows none.

    The k-th differences of a smooth function vanish, and those of noise of deviation s have the deviation
    s sqrt((2k)!) / k!. The first level counts whose differences change sign and where three levels agree within a
    factor of four.
    """
    differences, levels, signs = np.array(values), [], []
    for k in range(1, len(values)):
        differences = np.diff(differences)
        levels.append(math.sqrt(math.factorial(k) ** 2 / math.factorial(2 * k) * np.mean(differences**2)))
        signs.append(bool(np.any(differences[1:] * differences[:-1] < 0)))
    for k in range(len(levels) - 2):
        three = levels[k : k + 3]
        if signs[k] and max(three) <= 4 * min(three):
            return levels[k]
    return None


def noise(f: Function, x: float, spread: float, count: int = 7) -> float:
    """The noise of f at x by ECnoise; points move apart until more than half of the values differ."""
    base, smallest = f(x), 1e-10
    for apart in (1e-10, 1e-8, 1e-6, 1e-4):
        half = count // 2
        values = [base if k == 0 else f(x + k * apart * spread) for k in range(-half, half + 1)]
        if np.count_nonzero(np.diff(values) == 0) > half or not np.all(np.isfinite(values)):
            continue
        found = noise_of_differences(values)
        if found:
            return found
        smallest = max(smallest, apart)
    return max(abs(base), 1.0) * 2.0**-52


def trusted(change: float, moved: tuple[float, float], base: float, eps: float) -> bool:
    """Moré and Wild's two conditions: the difference stands out of the noise, and the values are still alike."""
    alike = all(abs(value - base) <= 0.1 * max(abs(value), abs(base)) for value in moved)
    return abs(change) >= 100 * eps and alike


def derivative(f: Function, x: float, eps: float, order: int) -> float:
    """The size of the second or third derivative, coarsely, by Moré and Wild's two attempts."""
    base = f(x)

    def attempt(h: float) -> tuple[float, bool]:
        up, down = f(x + h), f(x - h)
        change = up - 2 * base + down if order == 2 else (f(x + 2 * h) - 2 * up + 2 * down - f(x - 2 * h)) / 2
        return abs(change) / h**order, trusted(change, (up, down), base, eps)

    first, good = attempt(eps ** (1 / (order + 2)))
    if good:
        return first
    if first == 0 or not math.isfinite(first):
        raise ValueError("no curvature was seen")
    second, good = attempt((eps / first) ** (1 / (order + 2)))
    if good or abs(first - second) <= second / 2:
        return second
    raise ValueError("two attempts at the curvature disagree")


def more_wild_forward(f: Function, x: float, eps: float, _: float) -> float:
    """Moré and Wild, Estimating derivatives of noisy simulations (ACM TOMS 38, 2012)."""
    return float(8**0.25 * math.sqrt(eps / derivative(f, x, eps, 2)))


def more_wild_central(f: Function, x: float, eps: float, _: float) -> float:
    """The same for central differences, whose mean square error is least at this step."""
    return float((3 * eps / derivative(f, x, eps, 3)) ** (1 / 3))


def shi_forward(f: Function, x: float, eps: float, _: float) -> float:
    """Shi, Xie, Xuan and Nocedal, Adaptive finite-difference interval estimation (SIAM J. Sci. Comput. 44, 2022)."""
    from numericalderivative import ShiXieXuanNocedalForward

    method = ShiXieXuanNocedalForward(f, x, absolute_precision=eps)
    return float(method.find_step(initial_step=2 * math.sqrt(eps), iteration_maximum=20)[0])


def shi_central(f: Function, x: float, eps: float, _: float) -> float:
    """The same for central differences."""
    from numericalderivative import GeneralFiniteDifference, ShiXieXuanNocedalGeneral

    method = ShiXieXuanNocedalGeneral(GeneralFiniteDifference(f, x, 1, 2, "central"), absolute_precision=eps)
    return float(method.find_step(iteration_maximum=20)[0])


def gill(f: Function, x: float, eps: float, spread: float) -> float:
    """Gill, Murray, Saunders, Wright, Computing forward-difference intervals (SIAM J. Sci. Stat. Comput. 4, 1983)."""
    from numericalderivative import GillMurraySaundersWright

    method = GillMurraySaundersWright(f, x, absolute_precision=eps)
    return float(method.find_step(1e-10 * spread, spread, iteration_maximum=20)[0])


def stepleman(f: Function, x: float, eps: float, spread: float) -> float:
    """Stepleman and Winarsky, Adaptive numerical differentiation (Math. Comp. 33, 1979)."""
    from numericalderivative import SteplemanWinarsky, SteplemanWinarskyInitialize

    method = SteplemanWinarsky(f, x, beta=4.0)
    start = spread
    precision = eps / max(abs(f(x)), eps)
    try:
        first = SteplemanWinarskyInitialize(method, relative_precision=precision)
        start, _ = first.find_initial_step(1e-10 * spread, spread, maximum_bisection=20)
    except ValueError:
        pass  # the search then starts at the spread
    return float(method.find_step(initial_step=start, iteration_maximum=25)[0])


RULES = {
    "ECnoise, Moré-Wild, forward": Rule(more_wild_forward, True),
    "ECnoise, Moré-Wild, central": Rule(more_wild_central, False),
    "Shi et al., forward": Rule(shi_forward, True),
    "Shi et al., central": Rule(shi_central, False),
    "Gill et al., forward": Rule(gill, True),
    "Stepleman-Winarsky, central": Rule(stepleman, False),
}


def choose(rule: Rule, f: Function, x: float, spread: float) -> Choice:
    """Ask a rule for a step at x; where it finds none, take the one for derivatives of size 1."""
    count = 0

    def counted(at: float) -> float:
        nonlocal count
        count += 1
        return f(at)

    eps = noise(counted, x, spread)
    failed = False
    with np.errstate(all="ignore"):
        try:
            step = rule.step(counted, x, eps, spread)
        except (ValueError, OverflowError, ZeroDivisionError):
            step = math.nan
    if not (math.isfinite(step) and step > 0):
        failed, step = True, 8**0.25 * math.sqrt(eps) if rule.forward else (3 * eps) ** (1 / 3)
    return Choice(step, failed, count)


def fitted_slope(f: Function, x: float) -> tuple[float, int]:
    """DerivKit's adaptive polynomial fit: the slope at x, and the number of evaluations."""
    from derivkit import DerivativeKit

    count = 0

    def counted(at: float) -> float:
        nonlocal count
        count += 1
        return f(float(at))

    return float(DerivativeKit(counted, x0=x).differentiate(method="adaptive", order=1)), count
