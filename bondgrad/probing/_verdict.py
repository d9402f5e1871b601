"""One line that says what a box is."""

from typing import TYPE_CHECKING

from bondgrad.probing._number_format import applying, duration
from bondgrad.probing._randomness import GENERATORS
from bondgrad.probing._rounding import precision_of

if TYPE_CHECKING:
    from bondgrad.probing._report import Report

SLOW_ROW = 1e-3  # seconds from which on the time of a row is mentioned


def verdict(report: "Report") -> str:
    """What this box is, the most important first."""
    history, ranges, steps, speed = report.history, report.ranges, report.steps, report.speed
    constant = steps is not None and not steps.changes
    unit = "call" if speed is not None and speed.vectorised else "row"
    kinds = {True: "vectorised", False: "not vectorised", None: ""}
    parts = applying(
        _row_coupling(report),
        _randomness(report),
        history is not None and history.drifts and "drifts",
        history is not None and history.remembers and "remembers earlier questions",
        _shape(report),
        constant and "constant",
        not constant and ranges is not None and ranges.saturated and "saturated",
        _precision(report),
        report.flaky > 0 and "fails at random",
        ranges is not None and (ranges.failing_rows > 0 or len(ranges.failures) > 0) and "fails in places",
        speed is not None and speed.latency >= SLOW_ROW and f"takes {duration(speed.latency)} a {unit}",
        speed is not None and (kinds[speed.vectorised] if speed.takes_many_rows else "one row at a time"),
    )
    return ", ".join(parts) or "nothing could be found out"


def _row_coupling(report: "Report") -> str:
    """Whether rows influence one another, and through what."""
    if report.company is None or not report.company.matters:
        return ""
    modules = [] if report.randomness is None else report.randomness.modules
    known = any("batch normalisation" in name for name in modules)
    cause = "batch normalisation in training mode" if known else "something goes over the whole batch"
    return f"rows influence one another ({cause})"


def _randomness(report: "Report") -> str:
    """What kind of noise there is."""
    found = report.randomness
    if found is None or found.deterministic:
        return "" if found is None or found.moving else "deterministic"
    dropout = [name for name in found.modules if "dropout" in name]
    noise = f"half-width {found.noise:.1g}"
    if dropout and found.generator == "torch":
        return f"random: {' and '.join(dropout)} in training mode, drawn from torch's generator"
    if found.by_place:
        seeded = ", though it takes a seed" * found.takes_seed
        return f"the same noise in every call, by place in the call, {noise}{seeded}"
    if found.takes_seed:
        return f"random, {noise}, but takes a seed"
    if found.generator is not None:
        return f"random: noise of {noise}, drawn from {GENERATORS[found.generator]}"
    return f"noisy device, {noise}"


def _shape(report: "Report") -> str:
    """Whether outputs come in steps, are rough, or how smooth they are."""
    if report.rounding is not None and (report.rounding.quantised or report.rounding.rough):
        return f"quantised in steps of {report.rounding.largest_quantum:.2g}" if report.rounding.quantised else "rough"
    kinds = {"smooth": "smooth", "kinks": "with kinks", "jumps": "with jumps", "unclear": ""}
    return "" if report.smoothness is None else kinds[report.smoothness.kind]


def _precision(report: "Report") -> str:
    """How finely the box computes, where that can be seen."""
    found = report.rounding
    if found is None or found.quantised or (report.randomness is not None and not report.randomness.deterministic):
        return ""
    return found.precision + ("" if found.shortcut is None else f", but {precision_of(found.shortcut)} as set here")
