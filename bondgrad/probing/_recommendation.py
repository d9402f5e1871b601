"""The recommended BlackBox: its arguments, each with its reason, and its code."""

import math
import textwrap
from typing import TYPE_CHECKING

from bondgrad.probing._advice import CORES, Advice, TrainingStep, advise
from bondgrad.probing._number_format import percent

if TYPE_CHECKING:
    from bondgrad.probing._report import Report

WIDTH = 78  # of lines of code, for comments
Reasoned = tuple[str, str]  # the value of an argument, in Python, and why it is recommended


def code(report: "Report") -> str:
    """The recommended BlackBox, in Python. Reasons of long lines stand above them, so that it can be pasted."""
    lines = []
    for name, (value, reason) in recommend(report).items():
        line = f"    {name}={value},"
        if len(line) + len(reason) + 4 <= WIDTH:
            lines.append(f"{line}  # {reason}")
        else:
            lines += [*textwrap.wrap(reason, WIDTH, initial_indent="    # ", subsequent_indent="    # "), line]
    known = report.module is not None and not report.evaluator_has_box
    own = [f"from {report.module} import {report.name.partition('.')[0]}"] if known else []
    standard = ["import os", ""] if any(CORES in line for line in lines) else []
    box = "    None,  # it belongs to the evaluator" if report.evaluator_has_box else f"    {report.name},"
    return "\n".join([*standard, "import bondgrad", *own, "", "box = bondgrad.BlackBox(", box, *lines, ")"])


def recommend(report: "Report") -> dict[str, Reasoned]:
    """The recommended arguments of BlackBox, each with its reason."""
    found, advice = report.dependence, find_advice(report)
    wanted: dict[str, Reasoned | None] = {"in_features": (str(report.in_features), "the width of its rows")}
    if report.out_features:
        wanted["out_features"] = (str(report.out_features), "the width of its answers")
    wanted["limits"] = choose_limits(report)
    wanted["policy"] = choose_policy(report)
    if found is not None and found.groups < found.inputs:
        value = '"auto"' if found.blocks is None else f"bondgrad.structure.Blocks({found.blocks[0]}, {found.blocks[1]})"
        wanted["structure"] = (value, f"{2 * found.groups:,} evaluations a row instead of {2 * found.inputs:,}")
        # The search for structure is given the noise; the default policy measures it by itself.
        wanted["noise"] = choose_noise(report) if found.blocks is None else None
    wanted["evaluator"] = choose_evaluator(report, advice)
    if advice is not None and advice.argument == "eager":
        wanted["eager"] = (advice.value, advice.reason)
    return {name: argument for name, argument in wanted.items() if argument is not None}


def choose_limits(report: "Report") -> Reasoned | None:
    """The limits that were given, or those within which the box works, which are narrower."""
    works = None if report.ranges is None else report.ranges.limits
    limits, reason = (works, "beyond these it fails") if works is not None else (report.limits, "given")
    if limits is None:
        return None
    low, high = map(_number_or_list, limits)
    return f"({low}, {high})", f"{reason}: nothing outside is ever evaluated"


def choose_policy(report: "Report") -> Reasoned | None:
    """A fixed step, where it was measured to have more right signs than the default policy."""
    found = report.gradients
    if found is None or found.step is None:
        return None
    reason = f"{percent(found.predicted)} of signs were right, with the default {percent(found.default)}"
    return f"bondgrad.policies.Fixed({found.step!r})", reason


def choose_noise(report: "Report") -> Reasoned | None:
    """The argument `noise` and its reason, if noise is larger than the rounding that BlackBox assumes anyway."""
    random, rounding = report.randomness, report.rounding
    if random is not None and not random.deterministic:
        return None if random.quiet_in_eval else (f"{random.noise:.2g}", "measured: 95 of 100 answers lie within it")
    if rounding is None or rounding.half_width == 0:
        return None
    reason = f"answers are {rounding.precision}, fewer than {rounding.returned} has"
    if rounding.named:
        reason = f"it computes in {rounding.precision}, coarser than the {rounding.returned} that it returns"
    if rounding.largest_quantum > 0:
        reason = "half a step of its quantised answers"
    elif rounding.rough:
        reason = "the measured roughness of its answers"
    return f"{rounding.half_width:.2g}", reason


def choose_evaluator(report: "Report", advice: Advice | None) -> Reasoned | None:
    """The evaluator: several workers where they help, calls of a size that the box takes, and retries."""
    most, options = None if report.speed is None else report.speed.max_rows, _options(report)
    reasons = [] if report.failures is None else [report.failures.phrase]
    if most is not None:
        reasons.insert(0, "it takes one row at a time" if most == 1 else "it refuses calls with many more rows")
    if report.evaluator_given:
        given = "put here the one that was given to probe"
        return "evaluator", given + (f", with {', '.join(options)}: {'; '.join(reasons)}" if options else "")
    if advice is not None and advice.argument == "evaluator":
        return advice.value, "; ".join([advice.reason, *reasons])
    return (f"bondgrad.evaluators.Local({', '.join(options)})", "; ".join(reasons)) if options else None


def find_advice(report: "Report") -> Advice | None:
    """What would shorten a training step: an evaluator, or `eager`; or why none would. None: nothing is known."""
    speed, history, company = report.speed, report.history, report.company
    remembers, coupled = history is not None and history.remembers, company is not None and company.matters
    if speed is None or report.evaluator_given or remembers or coupled:
        return None
    nature = "" if report.randomness is None else "deterministic" if report.randomness.deterministic else "random"
    step = TrainingStep(report.batch, 2 * report.groups, speed, nature)
    return advise(step, report.overlap, report.can_be_eager, "".join(f", {option}" for option in _options(report)))


def _options(report: "Report") -> list[str]:
    """Arguments of the evaluator, in Python."""
    most = None if report.speed is None else report.speed.max_rows
    options = [] if most is None else [f"max_rows={most}"]
    return options if report.failures is None else [*options, f"retries={report.failures.retries}"]


def _number_or_list(values: list[float]) -> str:
    """Python code for the values: one number if all are equal, else a list."""
    texts = [repr(v) if math.isfinite(v) else f'float("{v}")' for v in values]
    return texts[0] if len(set(texts)) == 1 else f"[{', '.join(texts)}]"
