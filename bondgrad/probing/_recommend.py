"""What to write, and why."""

import math
from typing import TYPE_CHECKING

from bondgrad.probing._number_format import applying

if TYPE_CHECKING:
    from bondgrad.probing._report import Report

Reasoned = tuple[str, str]  # the value of an argument, in Python, and why it is recommended


def choose_noise(report: "Report") -> Reasoned | None:
    """The half-width of the noise, where it is more than the rounding that is assumed anyway."""
    random, rounding = report.randomness, report.rounding
    if random is not None and not random.deterministic:
        return None if random.quiet_in_eval else (f"{random.noise:.2g}", "measured: 95 of 100 answers lie within it")
    if rounding is None or rounding.half_width == 0:
        return None
    reason = f"it computes in {rounding.precision}, coarser than the {rounding.returned} that it returns"
    if rounding.largest_quantum > 0:
        reason = "half a step of its quantised answers"
    elif rounding.rough:
        reason = "it is as rough as that"
    return f"{rounding.half_width:.2g}", reason


def recommend(report: "Report") -> dict[str, Reasoned]:
    """The arguments of BlackBox that this box needs."""
    found, most = report.dependence, None if report.speed is None else report.speed.max_rows
    wanted: dict[str, Reasoned | None] = {"in_features": (str(report.in_features), "the width of its rows")}
    if report.out_features:
        wanted["out_features"] = (str(report.out_features), "the width of its answers")
    if report.limits is not None:
        low, high = map(_number_or_list, report.limits)
        wanted["limits"] = (f"({low}, {high})", "given: nothing outside is ever evaluated")
    if found is not None and found.groups < found.inputs:
        value = '"auto"' if found.blocks is None else f"bondgrad.structure.Blocks({found.blocks[0]}, {found.blocks[1]})"
        wanted["structure"] = (value, f"{2 * found.groups:,} evaluations a row instead of {2 * found.inputs:,}")
        # The search for structure asks for it; steps do not.
        wanted["noise"] = choose_noise(report) if found.blocks is None else None
    reason = "it takes one row at a time" if most == 1 else "it refuses calls with many more rows"
    if report.evaluator_given:
        remedy = "" if most is None else f", with max_rows={most}: {reason}"
        wanted["evaluator"] = ("evaluator", "the one given" + remedy)
    elif most is not None:
        wanted["evaluator"] = (f"bondgrad.evaluators.Local(max_rows={most})", reason)
    return {name: argument for name, argument in wanted.items() if argument is not None}


def warnings(report: "Report") -> list[str]:
    """What no argument can set right."""
    random, history = report.randomness, report.history
    modules = [] if random is None else random.modules
    drawn = random is not None and (random.generator is not None or random.by_place)
    dead = [] if report.sensitivity is None else report.sensitivity.dead or []
    return applying(
        report.flaky > 0
        and f"It fails at random: {report.flaky:,} times in {report.calls:,} calls, and not when asked again. Let it "
        "try again by itself: a call that raises ends a training.",
        len(modules) > 0
        and f"BlackBox keeps a module in eval mode, so {' and '.join(modules)} will not be as measured here.",
        (not modules and report.company is not None and report.company.matters)
        and "Rows influence one another: a gradient asks about many moved rows at once, and they will mix.",
        (drawn and random is not None and not random.quiet_in_eval and not random.takes_seed)
        and "Its random numbers can be repeated: let it take a parameter `seed`. Both ends of a difference are then "
        "given the same, in calls of their own, and what they draw cancels.",
        (history is not None and history.remembers)
        and "It remembers earlier questions: give it a state, or answers will depend on their order.",
        0 < len(dead) < report.in_features and f"{len(dead)} inputs move nothing and cost evaluations: leave them out.",
    )


def _number_or_list(values: list[float]) -> str:
    texts = [repr(v) if math.isfinite(v) else f'float("{v}")' for v in values]
    return texts[0] if len(set(texts)) == 1 else f"[{', '.join(texts)}]"
