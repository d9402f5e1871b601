"""One line that says what a box is."""

from typing import TYPE_CHECKING

from bondgrad.probing._randomness import OWNERS
from bondgrad.probing._rounding import precision_of
from bondgrad.probing._words import duration

if TYPE_CHECKING:
    from bondgrad.probing._report import Report

SLOW = 1e-3  # seconds for a row, worth a word


def verdict(report: "Report") -> str:
    """What this box is, the most important first."""
    parts = [*_company(report), *_randomness(report), *_history(report), *_shape(report), *_arithmetic(report)]
    parts += [*_failures(report), *_speed(report)]
    return ", ".join(parts) if parts else "nothing could be found out"


def _company(report: "Report") -> list[str]:
    if report.company is None or not report.company.matters:
        return []
    modules = [] if report.randomness is None else report.randomness.modules
    cause = "batch normalisation in training mode"
    known = any("batch normalisation" in name for name in modules)
    return [f"rows influence one another ({cause if known else 'something goes over the whole batch'})"]


def _randomness(report: "Report") -> list[str]:
    found = report.randomness
    if found is None:
        return []
    if found.deterministic:
        return [] if found.moving else ["deterministic"]
    dropout = [name for name in found.modules if "dropout" in name]
    if dropout and found.generator == "torch":
        return [f"random: {' and '.join(dropout)} in training mode, drawn from torch's generator"]
    if found.by_place:
        seeded = ", though it takes a seed" * found.takes_seed
        return [f"the same noise in every call, by place in the call, half-width {found.noise:.1g}{seeded}"]
    if found.takes_seed:
        return [f"random, half-width {found.noise:.1g}, but takes a seed"]
    if found.generator is not None:
        return [f"random: noise of half-width {found.noise:.1g}, drawn from {OWNERS[found.generator]}"]
    return [f"noisy device, half-width {found.noise:.1g}"]


def _history(report: "Report") -> list[str]:
    found = report.history
    if found is None:
        return []
    return ["drifts"] * found.drifts + ["remembers earlier questions"] * bool(found.remembers)


def _shape(report: "Report") -> list[str]:
    parts = []
    if report.rounding is not None and report.rounding.quantised:
        parts.append(f"quantised in steps of {report.rounding.largest_quantum:.2g}")
    elif report.rounding is not None and report.rounding.rough:
        parts.append("rough")
    elif report.smoothness is not None:
        names = {"smooth": "smooth", "kinks": "with kinks", "jumps": "with jumps", "unclear": ""}
        parts += [names[report.smoothness.kind]] if names[report.smoothness.kind] else []
    if report.steps is not None and not report.steps.changes:
        parts.append("constant")
    elif report.ranges is not None and report.ranges.saturated:
        parts.append("saturated")
    return parts


def _arithmetic(report: "Report") -> list[str]:
    found = report.rounding
    if found is None or found.quantised or (report.randomness is not None and not report.randomness.deterministic):
        return []
    if found.shortcut is None:
        return [found.precision]
    return [f"{found.precision}, but {precision_of(found.shortcut)} as set here"]


def _failures(report: "Report") -> list[str]:
    found = report.ranges
    in_places = found is not None and (found.failures or found.failing_rows > 0)
    return ["fails at random"] * (report.flaky > 0) + ["fails in places"] * bool(in_places)


def _speed(report: "Report") -> list[str]:
    found = report.speed
    if found is None:
        return []
    slow = [f"takes {duration(found.latency)} a {'call' if found.vectorised else 'row'}"]
    slow = slow if found.latency >= SLOW else []
    if not found.takes_many_rows:
        return [*slow, "one row at a time"]
    kinds = {True: ["vectorised"], False: ["not vectorised"], None: []}
    return slow + kinds[found.vectorised]
