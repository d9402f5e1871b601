"""One line that says what a box is."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bondgrad.probing._number_format import duration
from bondgrad.probing._randomness import GENERATORS
from bondgrad.probing._rounding import precision_of

if TYPE_CHECKING:
    from bondgrad.probing._report import Report

SLOW_ROW = 1e-3  # seconds from which on the time of a row is mentioned


def verdict(report: "Report") -> str:
    """What this box is, the most important first."""
    parts = [_row_coupling(report), _randomness(report), *_history(report), *_shape(report), _precision(report)]
    parts += [*_failures(report), *_speed(report)]
    return ", ".join(filter(None, parts)) or "nothing could be found out"


def _row_coupling(report: "Report") -> str:
    if report.company is None or not report.company.matters:
        return ""
    modules = [] if report.randomness is None else report.randomness.modules
    known = any("batch normalisation" in name for name in modules)
    cause = "batch normalisation in training mode" if known else "something goes over the whole batch"
    return f"rows influence one another ({cause})"


def _randomness(report: "Report") -> str:
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


def _history(report: "Report") -> Iterator[str]:
    if report.history is not None:
        yield "drifts" * report.history.drifts
        yield "remembers earlier questions" * bool(report.history.remembers)


def _shape(report: "Report") -> Iterator[str]:
    if report.rounding is not None and report.rounding.quantised:
        yield f"quantised in steps of {report.rounding.largest_quantum:.2g}"
    elif report.rounding is not None and report.rounding.rough:
        yield "rough"
    elif report.smoothness is not None:
        yield {"smooth": "smooth", "kinks": "with kinks", "jumps": "with jumps"}.get(report.smoothness.kind, "")
    if report.steps is not None and not report.steps.changes:
        yield "constant"
    elif report.ranges is not None and report.ranges.saturated:
        yield "saturated"


def _precision(report: "Report") -> str:
    found = report.rounding
    if found is None or found.quantised or (report.randomness is not None and not report.randomness.deterministic):
        return ""
    return found.precision + ("" if found.shortcut is None else f", but {precision_of(found.shortcut)} as set here")


def _failures(report: "Report") -> Iterator[str]:
    found = report.ranges
    yield "fails at random" * (report.flaky > 0)
    yield "fails in places" * (found is not None and (bool(found.failures) or found.failing_rows > 0))


def _speed(report: "Report") -> Iterator[str]:
    found = report.speed
    if found is not None:
        if found.latency >= SLOW_ROW:
            yield f"takes {duration(found.latency)} a {'call' if found.vectorised else 'row'}"
        kinds = {True: "vectorised", False: "not vectorised", None: ""}
        yield kinds[found.vectorised] if found.takes_many_rows else "one row at a time"
