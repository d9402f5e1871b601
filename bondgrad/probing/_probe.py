"""bondgrad.probe: what is this box like?"""

import keyword
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bondgrad.calling._function import RowFunction
from bondgrad.calling._inputs import check_callable, check_rows, context_rows
from bondgrad.calling._limits import Limits
from bondgrad.errors import checked_seed, positive_float, positive_int
from bondgrad.evaluators import Evaluator
from bondgrad.measuring._no_trace import no_trace
from bondgrad.measuring._sampler import MeasurementSkipped, Sampler
from bondgrad.probing._call_limits import find_call_limits
from bondgrad.probing._dependence import measure_dependence
from bondgrad.probing._facts import Facts
from bondgrad.probing._history import SETTINGS, DriftMonitor, measure_memory
from bondgrad.probing._randomness import measure_randomness
from bondgrad.probing._ranges import measure_ranges
from bondgrad.probing._report import TITLES, Report
from bondgrad.probing._rounding import measure_rounding
from bondgrad.probing._row_coupling import measure_row_coupling
from bondgrad.probing._sensitivity import confirm_dead, measure_sensitivity
from bondgrad.probing._smoothness import measure_smoothness
from bondgrad.probing._speed import measure_speed
from bondgrad.probing._steps import measure_steps

T = TypeVar("T")
Measurement = Callable[[Sampler, Facts, torch.Generator], T]
LEAST_BUDGET = 16  # evaluations without which nothing can be said
TYPICAL_ROWS = 256  # that are asked about


def probe(
    fn: Callable[..., Any],
    x: Tensor,
    *context: Tensor,
    limits: tuple[Any, Any] | None = None,
    evaluator: Evaluator | None = None,
    budget: int = 20_000,
    seconds: float = 60.0,
    seed: int = 0,
) -> Report:
    """Find out what a box is like, and which BlackBox it needs.

    Asks the box about typical rows, again and again, next to one another, over ladders of steps, and over the range of
    every input. The most useful comes first; what the budget or the time does not reach for is left out, and the report
    says so. Everything is asked in full precision, as a BlackBox would; the report says what the settings around the
    probe (autocast, TF32) would change. A module is asked in the mode that it is in. Afterwards its buffers are what
    they were, and so are the global random numbers.

    Args:
        fn: The box, [N, d] -> [N, d_out], in torch or in numpy.
        x: [N, d] typical rows, better some hundred than a few: ranges and spreads are taken from them.
        context: Further inputs of fn, one entry per row.
        limits: (low, high): no point outside is ever evaluated.
        evaluator: Where rows are evaluated, in requests of no more than its `max_rows`; what is measured is then the
            box as that evaluator serves it, its times included. None: in this process.
        budget: Most evaluations, in rows.
        seconds: Most time. One call that takes longer is not interrupted.
        seed: Of the choice of rows and lines.

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
    """A probe that can be watched, and stopped: what was found by then is in its report."""

    def __init__(
        self,
        fn: Callable[..., Any],
        x: Tensor,
        context: tuple[Tensor, ...] = (),
        *,
        limits: tuple[Any, Any] | None = None,
        evaluator: Evaluator | None = None,
        budget: int = 20_000,
        seconds: float = 60.0,
        seed: int = 0,
        name: str | None = None,
        module: str | None = None,
        sample: str | None = None,
    ) -> None:
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
        contexts = tuple(c.to(rows.device) for c in context_rows(context, x.shape[:1]))
        bounds = None if limits is None else Limits(limits, x.shape[1])
        seconds = positive_float("seconds", seconds)
        self.sampler = Sampler(function, rows, chosen, contexts, bounds, evaluator, budget, seconds)
        self._known: dict[str, Any] = {
            "name": name or _variable(fn),
            "module": module,
            "in_features": x.shape[1],
            "dtype": str(rows.dtype).removeprefix("torch."),
            "is_module": isinstance(fn, nn.Module),
            "sample": sample or f"{len(x):,} rows given",
            "limits": None if bounds is None else bounds.numbers(),
            "evaluator_given": evaluator is not None,
        }
        self._found: dict[str, Any] = dict.fromkeys(TITLES)
        self._left_out: list[str] = []

    def run(self) -> Generator[str, None, None]:
        """Measure. Before each measurement its name is given, for those who watch."""
        sampler = self.sampler
        with no_trace(sampler.function.fn):
            yield "First questions"
            self._attempt("First questions", lambda: find_call_limits(sampler))
            facts = self._attempt("Typical rows", lambda: Facts.at_typical_rows(sampler))
            if facts is None or len(facts.usable) == 0:
                asked = "no row was asked" if facts is None else f"no finite answer at {len(facts.y)} rows asked about"
                self._left_out.append(f"all else: {asked}")
                return
            yield from self._measure_all(facts)

    def _measure_all(self, facts: Facts) -> Generator[str, None, None]:
        """All measurements, the most useful first, each given what those before it have found."""
        sampler, found = self.sampler, self._found
        with sampler.workplace():
            monitor = DriftMonitor(facts.choose(max(SETTINGS.rows, sampler.caller.smallest), self._generator))

        def measured(name: str, measure: Measurement[T]) -> Generator[str, None, T | None]:
            title = TITLES.get(name, name.capitalize())
            yield title
            self._attempt("", lambda: monitor.look(sampler, facts))
            result = self._attempt(title, lambda: measure(sampler, facts, self._generator))
            found.update({name: result} if name in TITLES else {})
            return result

        facts = facts.with_randomness((yield from measured("randomness", measure_randomness)))
        if sampler.caller.random_failures and len(facts.usable) < len(facts.y):  # perhaps by chance
            again = self._attempt("", lambda: sampler.ask_rows(torch.arange(len(facts.y))))
            facts = facts if again is None else facts.with_answers(again)
        yield from measured("speed", measure_speed)
        memory = yield from measured("memory", measure_memory)
        facts = facts.with_memory(memory)
        if facts.remembers:
            monitor.forget()
        facts = facts.with_rounding((yield from measured("rounding", measure_rounding)))
        yield from measured("steps", measure_steps)
        facts = facts.with_row_coupling((yield from measured("company", measure_row_coupling)))
        yield from measured("smoothness", measure_smoothness)
        sensitivity = yield from measured("sensitivity", measure_sensitivity)
        yield from measured("ranges", measure_ranges)
        yield from measured("dependence", measure_dependence)
        found["sensitivity"] = None if sensitivity is None else confirm_dead(sensitivity, found)
        yield from measured("history", lambda _, facts, __: monitor.judge(facts, memory))

    def report(self) -> Report:
        """What is known by now."""
        sampler = self.sampler
        return Report(
            **self._known,
            **self._found,
            out_features=sampler.caller.out_features,
            flaky=sampler.caller.random_failures,
            left_out=list(self._left_out),
            evaluations=sampler.evaluations,
            calls=sampler.calls,
            seconds=sampler.elapsed,
        )

    def _attempt(self, title: str, measure: Callable[[], T]) -> T | None:
        """What is measured; None, and a note, if the measurement is skipped. Without a title there is no note."""
        try:
            with self.sampler.workplace():
                return measure()
        except MeasurementSkipped as reason:
            if title:
                self._left_out.append(f"{title}: {reason}")
            return None


def _variable(fn: Callable[..., Any]) -> str:
    """A name for the box in Python: that of a function. Objects have none."""
    name = str(getattr(fn, "__name__", ""))
    return name if name.isidentifier() and not keyword.iskeyword(name) else "fn"
