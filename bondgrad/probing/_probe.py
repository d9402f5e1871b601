"""bondgrad.probe: what is this box like?"""

import contextlib
import keyword
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bondgrad.calling._function import RowFunction
from bondgrad.calling._inputs import check_callable, check_input, context_rows
from bondgrad.calling._limits import Limits
from bondgrad.errors import checked_seed, positive_float, positive_int
from bondgrad.measuring._no_trace import no_trace
from bondgrad.probing._asker import Asker, LeftOut
from bondgrad.probing._company import measure_company
from bondgrad.probing._dependence import measure_dependence
from bondgrad.probing._history import Looks, measure_memory
from bondgrad.probing._meeting import meet
from bondgrad.probing._randomness import measure_randomness
from bondgrad.probing._ranges import measure_ranges
from bondgrad.probing._report import TITLES, Report
from bondgrad.probing._rounding import compare_surroundings, measure_rounding
from bondgrad.probing._sensitivity import measure_sensitivity
from bondgrad.probing._smoothness import measure_smoothness
from bondgrad.probing._speed import measure_speed
from bondgrad.probing._steps import measure_steps
from bondgrad.torch_support._precision import all_of, arithmetic, autocast_dtype

T = TypeVar("T")
BUDGET = 20_000  # evaluations
SECONDS = 60.0
LEAST = 16  # evaluations without which nothing can be said
ROWS = 256  # typical rows that are asked about


def probe(
    fn: Callable[..., Any],
    x: Tensor,
    *context: Tensor,
    limits: tuple[Any, Any] | None = None,
    budget: int = BUDGET,
    seconds: float = SECONDS,
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
        budget: Most evaluations, in rows.
        seconds: Most time. One call that takes longer is not interrupted.
        seed: Of the choice of rows and lines.

    Example:
        >>> report = probe(lambda x: torch.sin(x).cumsum(1), torch.randn(100, 3))
        >>> report.verdict.split(", ")[:3]
        ['deterministic', 'smooth', 'float32']
    """
    session = Session(fn, x, context, limits=limits, budget=budget, seconds=seconds, seed=seed)
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
        budget: int = BUDGET,
        seconds: float = SECONDS,
        seed: int = 0,
        name: str | None = None,
        module: str | None = None,
        sample: str | None = None,
    ) -> None:
        check_callable(fn)
        if isinstance(x, Tensor) and x.ndim != 2:
            raise ValueError(f"x must be rows, [N, d], got {list(x.shape)}")
        check_input(x, x.shape[-1] if isinstance(x, Tensor) else 0)
        if not bool(torch.isfinite(x).all()):
            raise ValueError("x must be finite: leave out rows with NaN or infinite values")
        if positive_int("budget", budget) < LEAST:
            raise ValueError(f"budget must be at least {LEAST} evaluations, got {budget}")
        rows = x.detach().float() if x.dtype.itemsize < 4 else x.detach()
        rows = rows.to(RowFunction(fn, None).compute_device(rows.device))
        self._autocast = autocast_dtype(rows)
        self._limits = None if limits is None else Limits(limits, x.shape[1])
        self._random = torch.Generator("cpu").manual_seed(checked_seed(seed))
        keep = torch.randperm(len(x), generator=self._random, device="cpu")[:ROWS]
        contexts = tuple(c.to(rows.device) for c in context_rows(context, x.shape[:1]))
        seconds = positive_float("seconds", seconds)
        self.asker = Asker(fn, rows, keep, contexts, self._limits, budget, seconds)
        self._fn, self._name, self._module = fn, name or _variable(fn), module
        self._sample = sample or f"{len(x):,} rows given"
        self._found: dict[str, Any] = {}
        self._left_out: list[str] = []

    def run(self) -> Generator[str, None, None]:
        """Measure. Before each measurement its name is given, for those who watch."""
        asker, generator = self.asker, self._random
        with no_trace(self._fn):
            yield "First questions"
            self._attempt("First questions", lambda: meet(asker))
            self._attempt("Typical rows", asker.look)
            if len(asker.usable) == 0:
                asked = f"no finite answer at {asker.asked} rows that were asked" if asker.asked else "no row was asked"
                self._left_out.append(f"all else: {asked}")
                return
            with self._full():
                looks = Looks(asker, generator)
            measurements: dict[str, Callable[[], Any]] = {
                "randomness": lambda: measure_randomness(asker, generator),
                "speed": lambda: measure_speed(asker),
                "memory": lambda: measure_memory(asker, generator),
                "rounding": lambda: measure_rounding(asker, generator),
                "steps": lambda: measure_steps(asker, generator),
                "company": lambda: measure_company(asker, generator),
                "smoothness": lambda: measure_smoothness(asker, generator),
                "sensitivity": lambda: measure_sensitivity(asker, generator),
                "ranges": lambda: measure_ranges(asker, generator),
                "dependence": lambda: measure_dependence(asker, generator),
            }
            for name, measure in measurements.items():
                title = TITLES.get(name, "Memory")
                yield title
                if name == "dependence" and self._mixed():
                    self._left_out.append(f"{title}: rows influence one another, so it cannot be seen")
                    continue
                self._attempt("", looks.look)
                self._found[name] = self._attempt(title, measure)
                if name == "randomness" and asker.flaky and len(asker.usable) < asker.asked:  # perhaps by chance
                    self._attempt("", asker.look)
                if name == "memory" and self._found[name] is not None:
                    asker.remembers = self._found[name][0]
                    looks = Looks(asker, generator) if asker.remembers else looks  # the others came after anything
                if name == "rounding" and self._found[name] is not None:
                    self._compare(generator)
            self._doubt_dead_inputs()
            yield TITLES["history"]
            self._attempt("", looks.look)
            with self._full():
                self._found["history"] = looks.judge(self._found.get("memory"))

    def report(self) -> Report:
        """What is known by now."""
        asker, function = self.asker, self.asker.function
        return Report(
            name=self._name,
            module=self._module,
            in_features=asker.x.shape[1],
            out_features=asker.y.shape[1],
            dtype=str(asker.dtype).removeprefix("torch."),
            is_module=isinstance(self._fn, nn.Module),
            sample=self._sample,
            limits=None if self._limits is None else self._limits.numbers(),
            flaky=asker.flaky,
            left_out=list(self._left_out),
            evaluations=function.evaluations,
            calls=function.calls,
            seconds=asker.elapsed,
            **{name: self._found.get(name) for name in TITLES},
        )

    def _attempt(self, title: str, measure: Callable[[], T]) -> T | None:
        """What is measured, in full precision; None, and a note, if the budget does not reach. No title: no note."""
        before, unspent = self.asker.affordable(), self.asker.budget - self.asker.function.evaluations
        try:
            with self._full():
                return measure()
        except LeftOut as reason:
            if title:
                why = "in the time left" if before < unspent or self.asker.time_left() <= 0 else "of the budget"
                text = str(reason) or f"the {before:,} evaluations {why} do not reach"
                self._left_out.append(f"{title}: {text}")
            return None

    def _full(self) -> AbstractContextManager[Any]:
        return all_of([arithmetic(True, self.asker.device, None), self.asker.workplace()])

    def _compare(self, generator: torch.Generator) -> None:
        """Once more with autocast and TF32 as they are set around the probe."""
        around = arithmetic(False, self.asker.device, self._autocast)
        with contextlib.suppress(LeftOut), around, self.asker.workplace():
            self._found["rounding"] = compare_surroundings(self.asker, self._found["rounding"], self._full(), generator)

    def _doubt_dead_inputs(self) -> None:
        """Call inputs dead only if nothing else speaks against it: coarse outputs may react elsewhere."""
        found, others = self._found.get("sensitivity"), self._found
        if found is None or not found.dead:
            return
        dead = set(found.dead)
        if others.get("ranges") is not None:
            dead -= set(others["ranges"].moving)
        if others.get("dependence") is not None:
            dead &= set(others["dependence"].idle)
        jumps = others.get("smoothness") is not None and others["smoothness"].kind == "jumps"
        steps = others.get("rounding") is not None and others["rounding"].quantised
        flat = others.get("ranges") is not None and others["ranges"].saturated
        coarse = jumps or steps or flat
        self._found["sensitivity"] = replace(found, dead=None if coarse else sorted(dead))

    def _mixed(self) -> bool:
        """Whether rows influence one another."""
        return self._found.get("company") is not None and bool(self._found["company"].matters)


def _variable(fn: Callable[..., Any]) -> str:
    """A name for the box in Python: that of a function. Objects have none."""
    name = str(getattr(fn, "__name__", ""))
    return name if name.isidentifier() and not keyword.iskeyword(name) else "fn"
