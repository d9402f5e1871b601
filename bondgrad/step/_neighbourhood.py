"""The box near the rows of one batch."""

import math
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from bondgrad.calling._inputs import Limits
from bondgrad.calling._memory import InternalState
from bondgrad.errors import BoxError, EvaluationLimitError, is_mistake
from bondgrad.estimators import Evaluate, Site, within_limits
from bondgrad.evaluators import Outcome
from bondgrad.evaluators._evaluator import Purpose
from bondgrad.evaluators._readings import mean_of_readings, reading_seed
from bondgrad.step._records import Parts, StatesByStart
from bondgrad.structure.discovery._search_batch import SearchBatch
from bondgrad.torch_support import _device as device

T = TypeVar("T")


class Neighbourhood:
    """The box near the rows of one batch.

    Args:
        parts: The layer's.
        x: [B, W] the rows, inside the limits; W is d, or T·d for sequences.
        y: [B, W_out] the box there.
        context: [B, ...] each: what else the box is given.
        states: What it remembered before the time steps at which it can start.
    """

    def __init__(
        self, parts: Parts, x: Tensor, y: Tensor, context: tuple[Tensor, ...] = (), states: StatesByStart = ()
    ) -> None:
        self.parts, self.x, self.y, self.context = parts, x, y, context
        self.structure = parts.structure  # or as a search has found it since
        self.states = states or ((0, ()),)
        self.whole = isinstance(parts.memory, InternalState)  # whether all rows go together
        # The state of a box that is given it, by the time step at which it can start.
        self._state_at: dict[int, tuple[Tensor, ...]] = {0: ()} if self.whole else dict(self.states)
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self.grid = parts.grid
        if parts.limits is not None:
            self.low, self.high = parts.limits.like(x)
        # Numbers of evaluations for a gradient that were not finite, by the time step at which they start.
        self.failures: dict[int, list[Tensor]] = {}
        self.errors: list[Exception] = []  # that the box raised in trials
        self.evaluations: defaultdict[Purpose, int] = defaultdict(int)

    # ---- asking

    def ask(self, points: Tensor, rows: slice | Tensor, purpose: Purpose, start: int = 0) -> Outcome:
        """The outputs of the box at points [b, ..., d] near b of the rows, from a time step on.

        Args:
            points: Their last dimension but one is the ends of a move, which are asked next to each other.
            rows: Which b rows.
            purpose: What for.
            start: The time step.

        Returns:
            The outputs [b, ..., d_out], and [b, ...] which of them are finite.
        """
        self._count(points, purpose)
        points = self._settable(points)
        seed = None if self.parts.next_seed is None else self.parts.next_seed()
        if isinstance(self.parts.memory, InternalState):
            return self._ask_from_internal_state(self.parts.memory, points, purpose, seed)
        # With the same random numbers at all ends of a move their noise is gone from the difference.
        if seed is None or points.shape[-2] <= 2:
            return self._ask_near(points, rows, purpose, start, seed)
        ends = [self._ask_near(end, rows, purpose, start, seed).y.clone() for end in torch.split(points, 1, -2)]
        y = torch.cat(ends, -2)
        return Outcome(y, finite_rows(y))

    def _settable(self, points: Tensor) -> Tensor:
        """The points [..., W] on the grid, where there is one: estimators of users may not look at it."""
        if self.grid is None or self.low is None or self.high is None:
            return points
        width = points.shape[-1]  # less than that of the rows, if the first time steps are left out
        return within_limits(points, self.low[:width], self.high[:width], self.grid)

    def ask_again(self, purpose: Purpose) -> Tensor:
        """The outputs [B, W_out] of another evaluation at the rows themselves."""
        everything = torch.arange(len(self.x), device=self.x.device)
        return self.run(lambda: self.ask(self.x[:, None, None].clone(), everything, purpose).y.flatten(1))

    def _ask_near(
        self, points: Tensor, rows: slice | Tensor, purpose: Purpose, start: int, seed: int | None
    ) -> Outcome:
        shape, beside = points.shape[:-1], (*self.context, *self._state_at[start])
        if beside:
            beside = tuple(t[rows].repeat_interleave(shape[1:].numel(), 0) for t in beside)
        pairs = shape[-1] == 2
        flat = points.reshape(-1, points.shape[-1])
        y, ok = self.parts.driver.ask(self.parts.function, flat, beside, pairs, seed, purpose)
        return Outcome(y.view(*shape, -1), None if ok is None else ok.view(shape))

    def _ask_from_internal_state(
        self, memory: InternalState, points: Tensor, purpose: Purpose, seed: int | None
    ) -> Outcome:
        """A box that keeps its own state is asked about all rows in one request per point, from the same snapshot."""
        driver, function = self.parts.driver, memory.from_snapshot(self.states[0][1], self.parts.function)
        ends = points.shape[-2]
        answers = []
        for move in points.flatten(1, -3).unbind(1):  # [B, ends, W]
            for reading in range(driver.repeats):  # of the ends in turns
                number = reading_seed(seed, reading)
                for end in move.unbind(1):
                    rest = (self.context, False, number, purpose, True)
                    answers.append(driver.ask(function, end.contiguous(), *rest, repeats=1).y.clone())
        joined = torch.stack(answers, 1)  # [B, moves · readings · ends, W_out]
        if driver.repeats > 1:
            joined = mean_of_readings(joined.view(-1, driver.repeats, ends, joined.shape[2]))
        joined = joined.view(*points.shape[:-1], -1)
        return Outcome(joined, finite_rows(joined))

    def _count(self, points: Tensor, purpose: Purpose) -> None:
        """Count the evaluations that points [b, ..., d] take."""
        self.evaluations[purpose] += points.numel() // points.shape[-1] * self.parts.driver.repeats

    def run(self, work: Callable[[], T]) -> T:
        """Run `work`, and again with fewer rows at once where memory runs out, unless all rows must go together."""
        return work() if self.whole else self.parts.driver.run(work)

    def _portion(self, start: int, wanted: int) -> int:
        batch = self.x.shape[0]
        tensors = (self.x, self.y, *self.context, *self._state_at[start])
        row_bytes = sum([t.itemsize * (t.numel() // batch) for t in tensors])
        return self.parts.driver.portion(row_bytes, wanted, self.x.device)

    # ---- gradients

    def slopes(self, gy: Tensor, delta: Tensor, known: list[Outcome] | None = None) -> Tensor:
        """The gradient [B, W] for gy [B, W_out], with perturbations [n, B, W], before any scaling of its rows.

        Not finite where no evaluation says anything about an entry. What is `known` of the evaluations, in the order
        of the requests that `planned` returned, is not asked. A request may have the moves of a single row, at which
        the box fails: it is given up, as `BoxError` says, when none of the requests was answered.
        """
        errors: list[tuple[BoxError, int]] = []  # of requests that were not answered at all, and their numbers of rows
        answered = False

        def ask(points: Tensor, rows: slice, start: int) -> Outcome:
            nonlocal answered
            try:
                outcome = self.ask(points, rows, "gradient", start)
            except BoxError as error:
                if is_mistake(error) or self.whole:  # of a box with memory, a request is all rows
                    raise
                errors.append((error, points.shape[:-1].numel()))
                y = self._no_outputs(points)
                return Outcome(y, torch.isfinite(y).all(-1))
            answered = True
            return outcome

        def evaluate_from(start: int) -> Evaluate:
            failures = self.failures[start] = []  # those of an attempt that ended for lack of memory do not count
            answers = None if known is None else iter(known)

            def evaluate(points: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
                if answers is None:
                    y, ok = ask(points, rows, start)
                else:
                    y, ok = next(answers)
                    self._count(points, "gradient")
                if ok is None and device.reading_is_free(y.device):
                    return y, None
                ok = finite_rows(y) if ok is None else ok
                assert ok is not None
                failed = ~ok
                if self.low is not None and device.reading_is_free(y.device):  # where x is not, it is known already
                    failed &= torch.isfinite(points).all(-1)
                failures.append(failed.sum())
                return y, ok

            return evaluate

        slopes = self._estimate(gy, delta, evaluate_from, all_at_once=known is not None)
        if errors and not answered:
            raise errors[0][0]
        for error, count in errors:
            self.parts.driver.record.tell(error, 0, count)
        return slopes

    def _no_outputs(self, points: Tensor) -> Tensor:
        """NaN in the place of the outputs at points [..., W]."""
        width = self.y.shape[1] * points.shape[-1] // self.x.shape[1]
        return self.y.new_full((*points.shape[:-1], width), math.nan)

    def planned(self, gy: Tensor, delta: Tensor) -> list[tuple[Tensor, slice]]:
        """The requests of the estimator, points [b, ..., ends, W] and rows of the batch, none of which is made."""
        requests: list[tuple[Tensor, slice]] = []
        width = self.y.shape[1]

        def evaluate(points: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
            requests.append((self._settable(points), rows))
            return self.y.new_zeros(1).expand(*points.shape[:-1], width).clone(), None

        self._estimate(gy, delta, lambda _: evaluate, all_at_once=True)
        return requests

    def trial_slopes(self, gy: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The same as `slopes`, and [B, W] which of them had all evaluations. Errors of the box count as failures."""
        answers: dict[int, list[Tensor]] = {}

        def asking_from(start: int) -> Evaluate:
            told = answers[start] = []

            def evaluate(points: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
                try:
                    told.append(self.ask(points, rows, "trial", start).y.clone())  # a box may answer in the same memory
                except EvaluationLimitError:
                    raise
                except BoxError as error:  # outside its domain, perhaps, where a usual step does not lead
                    self.errors.append(error)
                    told.append(self._no_outputs(points))
                return told[-1], None

            return evaluate

        slopes = self._estimate(gy, delta, asking_from)
        sound = torch.isfinite(slopes)
        if bool(sound.all()):
            return slopes, sound

        def repeating_from(start: int) -> Evaluate:
            again = iter([(y, torch.isfinite(y).all(-1)) for y in answers[start]])
            return lambda _points, _rows: next(again)

        return self._estimate(gy, delta, repeating_from), sound

    def _estimate(
        self, gy: Tensor, delta: Tensor, evaluate_from: Callable[[int], Evaluate], all_at_once: bool = False
    ) -> Tensor:
        """The sum of the estimator's gradients over the time steps at which evaluations can start.

        With `all_at_once` the requests do not depend on the memory there is, which may be less when they are answered.
        """
        estimator, x, y, d = self.parts.estimator, self.x, self.y, self.parts.in_features
        time = x.shape[1] // d
        d_out = y.shape[1] // time
        self.structure.check(d, d_out)  # a pattern may have been loaded for another box
        g: Tensor | None = None
        starts = [0] if estimator.together else [start for start, _ in self.states]
        for start, groups in self.structure.windows(d, d_out, time, starts):
            at, out = start * d, start * d_out
            site = Site(x, y, gy, delta, self.low, self.high, groups, self.whole, self.grid)
            if start > 0:
                low, high = (None if limit is None else limit[at:] for limit in (self.low, self.high))
                rest = (low, high, groups, self.whole, self.grid)
                site = Site(x[:, at:], y[:, out:], gy[:, out:], delta[:, :, at:], *rest)
            wanted = x.shape[0] * estimator.evaluations(x.shape[1] if groups is None else groups.count)

            def work(site: Site = site, start: int = start, wanted: int = wanted) -> Tensor:
                most = sys.maxsize if all_at_once else self._portion(start, wanted)
                return estimator.vjp(site, evaluate_from(start), most)

            part = self.run(work).to(x.dtype)
            if g is None:
                g = part
            else:
                g[:, at:] += part
        assert g is not None
        return g

    # ---- measuring

    def subset(self, which: Tensor) -> "Neighbourhood":
        """The box near some of the rows. Its evaluations and errors count as those of this neighbourhood."""
        states = self.states
        if not self.whole:
            states = tuple((start, tuple(t[which] for t in state)) for start, state in states)
        part = Neighbourhood(self.parts, self.x[which], self.y[which], tuple(t[which] for t in self.context), states)
        part.structure, part.evaluations, part.errors = self.structure, self.evaluations, self.errors
        return part

    def output_norm(self, gy: Tensor) -> Tensor:
        """The norm of the loss's gradient gy [B, W_out] at the outputs that depend on an input: [B, W], or [B, 1]."""
        d = self.parts.in_features
        time = self.x.shape[1] // d
        groups = self.structure.windows(d, gy.shape[1] // time, time, [0])[0].groups
        # Relative to the largest entry, so that the squares neither overflow nor underflow.
        largest = gy.abs().amax(1, keepdim=True).clamp_min(torch.finfo(gy.dtype).tiny)
        square = (gy / largest).square()
        return (square.sum(1, keepdim=True) if groups is None else groups.sum_by_input(square)).sqrt() * largest

    def search_batch(self, noise: float, rounding: float) -> SearchBatch:
        """The box in the form in which a search for its structure uses it."""

        def evaluate(points: Tensor, rows: Tensor) -> Tensor:
            return self.ask(points, rows, "structure").y

        most, d = self._portion(0, sys.maxsize), self.parts.in_features
        low, high = (self.parts.limits or Limits((-math.inf, math.inf), d)).like(self.x)
        seeded = self.parts.function.seed_position is not None
        rest = (d, self.whole, self.grid, seeded)
        return SearchBatch(self.x, self.y, evaluate, most, noise, rounding, low, high, *rest)


def finite_rows(y: Tensor) -> Tensor | None:
    """Which of the outputs [..., d_out] are finite, [...]; None: all of them, if that can be told without waiting."""
    # A sum is finite only if all its terms are, which spares the closer look.
    if device.reading_is_free(y.device) and math.isfinite(y.sum()):
        return None
    return torch.isfinite(torch.linalg.vector_norm(y, math.inf, dim=-1))  # one pass over y
