"""The function `probe`, which makes all measurements of a box, and the session behind it."""

import contextlib
import keyword
import math
from collections.abc import Callable, Generator
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from bondgrad.calling._elsewhere import ElsewhereBox, chosen_box
from bondgrad.calling._function import RowFunction, snapshot_owner
from bondgrad.calling._inputs import Limits, check_callable, check_rows, context_rows
from bondgrad.calling._per_row import PerRow
from bondgrad.errors import checked_seed, positive_float, positive_int
from bondgrad.evaluators import Evaluator
from bondgrad.measuring._no_trace import no_trace
from bondgrad.measuring._sampler import BudgetExceeded, MeasurementSkipped, Sampler
from bondgrad.probing._facts import find_first_facts
from bondgrad.probing._hangs import count_hangs
from bondgrad.probing._influences import SETTINGS, DriftMonitor
from bondgrad.probing._number_format import duration
from bondgrad.probing._overlap import may_overlap
from bondgrad.probing._report import Findings, Report

T = TypeVar("T")
LEAST_BUDGET = 16  # least number of evaluations with which a measurement is possible
TYPICAL_ROWS = 256  # most typical rows near which the box is evaluated


def probe(
    fn: Callable[..., Any] | None,
    x: Tensor,
    *context: Tensor,
    limits: tuple[Any, Any] | None = None,
    evaluator: Evaluator | None = None,
    budget: int = 20_000,
    seconds: float = 60.0,
    seed: int = 0,
) -> Report:
    """Find out what a box is like, and which BlackBox it needs.

    Evaluates the box at typical rows: repeatedly, among other rows, over ladders of steps, and over the range of every
    input. The most useful measurements come first; those for which the budget or the time does not suffice are left
    out, and the report says so. The box runs in full precision, as in a BlackBox; the report says what the settings
    around the probe (autocast, TF32) would change. A module keeps the mode that it is in. Afterwards its buffers and
    the global random numbers are restored.

    Args:
        fn: The box, [N, d] -> [N, d_out], in torch or in numpy. None: the box belongs to the evaluator.
        x: [N, d] typical rows, better some hundred than a few: ranges and spreads are taken from them.
        context: Further inputs of fn, one entry per row.
        limits: (low, high), numbers or one per input: no point outside is ever evaluated.
        evaluator: Where rows are evaluated, in requests of no more than its `max_rows`. The measured times include
            those of the evaluator. None: in a thread of this process. A box that waits most of the time, as for a
            device, and shows no memory is called in two threads at the same time, a few times, to recommend an
            evaluator.
        budget: Most evaluations, in rows.
        seconds: Most time. A call in this process that takes longer is given up, and the report says so; its thread
            cannot be ended. Other evaluators have a `timeout` of their own.
        seed: The seed for the choice of rows and lines.

    Example:
        >>> report = probe(lambda x: torch.sin(x).cumsum(1), torch.randn(100, 3))
        >>> report.verdict.split(", ")[:3]
        ['deterministic', 'smooth', 'float32']
    """
    session = Session(fn, x, context, limits=limits, evaluator=evaluator, budget=budget, seconds=seconds, seed=seed)
    for _ in session.run():
        pass
    return session.report()


class Session:
    """A probe that runs one measurement at a time and can be stopped; `report()` has the findings so far."""

    def __init__(
        self,
        fn: Callable[..., Any] | None,
        x: Tensor,
        context: tuple[Tensor, ...] = (),
        *,
        limits: tuple[Any, Any] | None = None,
        evaluator: Evaluator | None = None,
        budget: int = 20_000,
        seconds: float = 60.0,
        seed: int = 0,
    ) -> None:
        fn = chosen_box(fn, evaluator)
        check_callable(fn)
        check_rows(x)
        if not bool(torch.isfinite(x).all()):
            raise ValueError("x must be finite: leave out rows with NaN or infinite values")
        if positive_int("budget", budget) < LEAST_BUDGET:
            raise ValueError(f"budget must be at least {LEAST_BUDGET} evaluations, got {budget}")
        function = RowFunction(fn, None)
        rows = x.detach().float() if x.dtype.itemsize < 4 else x.detach()
        rows = rows.to(function.compute_device(rows.device))
        self._generator = torch.Generator("cpu").manual_seed(checked_seed(seed))
        chosen = torch.randperm(len(x), generator=self._generator, device="cpu")[:TYPICAL_ROWS]
        bounds = Limits((-math.inf, math.inf) if limits is None else limits, x.shape[1])
        contexts, seconds = context_rows(context, x.shape[:1]), positive_float("seconds", seconds)
        self._hangs = count_hangs(evaluator, seconds)
        asked = self._hangs or evaluator
        self.sampler = Sampler(function, rows, chosen, contexts, bounds, asked, budget, seconds)
        self._known: dict[str, Any] = {
            "name": _variable(fn),
            "in_features": x.shape[1],
            "dtype": str(rows.dtype).removeprefix("torch."),
            "sample": f"{len(x):,} rows given",
            "limits": None if limits is None else bounds.numbers(),
            "evaluator_given": evaluator is not None,
            "evaluator_has_box": isinstance(fn, ElsewhereBox),
            "can_be_eager": function.seed_position is None and snapshot_owner(fn) is None,
            "batch": len(x),
        }
        self._findings = Findings()
        self._left_out: list[str] = []

    def run(self) -> Generator[str, None, None]:
        """Make all measurements in order, each given the earlier findings; yields the title of each beforehand."""
        sampler = self.sampler
        with no_trace(sampler.function.fn), contextlib.closing(sampler):
            yield "First questions"
            facts = self._attempt("First questions and all that follow", find_first_facts, sampler, self._findings)
            if facts is None:
                return
            monitor = DriftMonitor(facts.usable[: max(SETTINGS.rows, sampler.caller.smallest)])
            measurements = [(kind.name, kind.metadata["title"], kind.metadata["by"]) for kind in fields(Findings)]
            for name, title, measure in (*measurements, ("history", "History", monitor.measure_drift)):
                if name == "overlap" and not may_overlap(sampler, facts):
                    continue
                if sampler.hung is not None:
                    break
                yield title
                self._attempt("", monitor.look, sampler, facts)
                facts = facts.with_finding(name, self._attempt(title, measure, sampler, facts, self._generator))
                self._findings = facts.found
                if name == "randomness":  # it shows whether calls fail at random
                    facts = self._attempt("", facts.asked_again, sampler) or facts

    def report(self) -> Report:
        """The report of all findings so far."""
        sampler = self.sampler
        return Report(
            **self._known,
            **vars(self._findings),
            out_features=sampler.caller.out_features,
            hung="" if sampler.hung is None else str(sampler.shortage()),
            timeouts="" if self._hangs is None else self._hangs.finding,
            flaky=sampler.caller.random_failures,
            left_out=list(self._left_out),
            evaluations=sampler.evaluations,
            calls=sampler.calls,
            seconds=sampler.elapsed,
        )

    def _attempt(self, title: str, measure: Callable[..., T], *arguments: object) -> T | None:
        """The result of a measurement; None if it is skipped, which is noted in `left_out` if there is a title."""
        try:
            with self.sampler.workplace:
                return measure(*arguments)
        except MeasurementSkipped as reason:
            self._left_out += [f"{title}: {reason}{self._time_lost(reason)}"] if title else []
            return None

    def _time_lost(self, reason: MeasurementSkipped) -> str:
        """Why there is no time left, as far as that is known, to be added to the reason."""
        lost = self._hangs.seconds if self._hangs is not None and isinstance(reason, BudgetExceeded) else 0.0
        return f", since calls that hang took {duration(lost)}" if lost > 0 else ""


def _variable(fn: Callable[..., Any]) -> str:
    """The name of the box in recommended code: that of a function, or `fn` for objects without a valid name."""
    name = str(getattr(fn, "__name__", ""))
    name = name if name.isidentifier() and not keyword.iskeyword(name) else "fn"
    return f"bondgrad.per_row({name})" if isinstance(fn, PerRow) else name
