"""Evaluations ahead: those of a gradient that do not depend on the loss begin in the forward pass (`eager=True`)."""

import math
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.calling._function import RowFunction
from bondgrad.calling._memory import Memory
from bondgrad.errors import is_out_of_memory
from bondgrad.estimators import Estimator
from bondgrad.evaluators import Driver, Outcome
from bondgrad.evaluators._driver import checked
from bondgrad.evaluators._evaluator import Cancellation
from bondgrad.policies import Steps
from bondgrad.step._neighbourhood import Neighbourhood
from bondgrad.step._perturbations import draw
from bondgrad.step._records import Parts, StepInputs
from bondgrad.step._trials import assumed_noise, rows_of
from bondgrad.structure import Structure
from bondgrad.torch_support._precision import arithmetic


def check_eager(eager: bool, memory: Memory | None, estimator: Estimator, function: RowFunction) -> None:
    """Refuse `eager` where it can never work."""
    why = None
    if memory is not None:
        why = "a box with memory is evaluated in the order of its passes"
    elif estimator.first_round_needs_gy:
        why = f"the points of {estimator} depend on the gradient of the loss"
    elif function.seed_position is not None:
        why = "a box that takes a seed has another one in the forward pass than in the backward pass"
    if eager and why is not None:
        raise ValueError(f"eager must be False here, since {why}: leave it out")


def check_seed(function: RowFunction, estimator: Estimator, stacklevel: int) -> None:
    """Warn where the noise of a box that takes a seed does not cancel."""
    if function.seed_position is not None and estimator.shared_base:
        warnings.warn(
            "fn takes a seed, but estimator='forward' compares with the answer of the forward pass, which has "
            "other random numbers: their noise does not cancel. Use estimator='central'.",
            stacklevel=stacklevel,
        )


class Plan(NamedTuple):
    """The evaluations of a gradient, before any of them is made."""

    steps: Steps
    delta: Tensor  # [n, B·T, d] the perturbations
    points: tuple[Tensor, ...]  # [b, ..., ends, W] of each request of the estimator
    context: tuple[Tensor, ...]  # of all points, [N, ...] each
    structure: Structure  # from which the points follow

    @property
    def rows(self) -> int:
        """The number of points."""
        return sum(points.numel() // points.shape[-1] for points in self.points)

    @property
    def pairs(self) -> bool:
        """Whether the points are pairs, next to each other."""
        return all(points.shape[-2] == 2 for points in self.points)

    def flat(self) -> Tensor:
        """All points, [N, W]."""
        return torch.cat([points.reshape(-1, points.shape[-1]) for points in self.points])


def plan_gradient(step: StepInputs) -> Plan:
    """Draw the perturbations of a step and make its points. The outputs and the loss's gradient need not be known.

    The estimator is asked for its points by a trial run, whose answers are zeros: points do not depend on answers.
    """
    box, batch = Neighbourhood(step.parts, step.x, step.y, step.context), rows_of(step)
    steps, delta = draw(step.parts, step.state, batch, assumed_noise(step, step.schedule.noise))
    requests = box.planned(step.gy, delta.reshape(delta.shape[:1] + step.x.shape))
    context = tuple(
        torch.cat([t[rows].repeat_interleave(points.shape[1:-1].numel(), 0) for points, rows in requests])
        for t in step.context
    )
    return Plan(steps, delta, tuple(points for points, _ in requests), context, box.structure)


def gradient_bytes(step: StepInputs) -> int:
    """The bytes of all inputs, contexts and outputs of the evaluations of a gradient."""
    parts, (rows, width) = step.parts, step.x.shape
    time = width // parts.in_features
    groups = parts.structure.windows(parts.in_features, step.y.shape[1] // time, time, [0])[0].groups
    each = sum(t.itemsize * (t.numel() // rows) for t in (step.x, step.y, *step.context))
    evaluations = parts.estimator.evaluations(width if groups is None else groups.count)
    return rows * evaluations * parts.driver.repeats * each


def fits_into_memory(step: StepInputs) -> bool:
    """Whether the evaluations of a gradient may exist at one time; warns where they may not."""
    driver, needed = step.parts.driver, gradient_bytes(step)
    if needed <= (driver.evaluator.memory or driver.device_memory):
        return True
    warnings.warn(
        f"eager=True needs {needed / 2**20:.0f} MiB for the evaluations of a gradient at one time, and is switched "
        "off. Give the evaluator a larger memory=, or use smaller batches.",
        stacklevel=2,
    )
    return False


class Taken(NamedTuple):
    """The evaluations of a gradient that were made ahead, for its backward pass."""

    steps: Steps
    delta: Tensor  # [n, B·T, d] the perturbations
    outcomes: list[Outcome]  # of each request of the estimator


class Ahead:
    """Evaluations of a gradient that are under way, or made, before its backward pass.

    What is never asked for is cancelled, as far as it has not started, and counted as waste.
    """

    def __init__(self, plan: Plan, driver: Driver, generator: torch.Generator) -> None:
        self.plan: Plan | None = plan  # until it is carried out
        self.generator = generator  # of random numbers, after those of the plan were drawn
        self.structure, self.rows, self.device = plan.structure, plan.rows, plan.delta.device
        self.cancelled = Cancellation()
        self.outcome: Future[Outcome] = Future()
        self.thread: threading.Thread | None = None  # in which they are made
        self._steps, self._delta, self._repeats = plan.steps, plan.delta, driver.repeats
        self._shapes = [points.shape for points in plan.points]
        self._record, self._used = driver.record, False

    def take(self, kept: Tensor | None = None) -> Taken | None:
        """The evaluations, once; None: they were taken before, memory ran out, or they are not to be divided by rows.

        Args:
            kept: [B] which rows of the batch are those of the gradient, the others count as waste. None: all.
        """
        if kept is not None and any(len(kept) != shape[0] for shape in self._shapes):
            self.drop()
        if self._used:
            return None
        self._used = True
        try:
            y, ok = self.outcome.result()
            if self.thread is not None:
                self.thread.join()  # it is over; what is left of it must not meet the end of the program
        except Exception as error:
            self._record.wasted += int(self._spent().sum())
            if is_out_of_memory(error):  # the step is taken as without
                return None
            raise
        except BaseException:  # Ctrl-C
            self.cancelled.set()
            raise
        outcomes = list(self._parts(y, ok))
        if kept is None:
            return Taken(self._steps, self._delta, outcomes)
        parts = torch.split(self._spent(), [math.prod(shape[:-1]) * self._repeats for shape in self._shapes])
        self._record.wasted += sum(int(part.view(len(kept), -1)[~kept.cpu()].sum()) for part in parts)
        size, sign, delta = (_of_rows(t, kept) for t in (self._steps.size, self._steps.sign, self._delta))
        outcomes = [Outcome(y[kept], None if ok is None else ok[kept.to(ok.device)]) for y, ok in outcomes]
        return Taken(self._steps._replace(size=size, sign=sign), delta, outcomes)

    def _spent(self) -> Tensor:
        """[R] the evaluations that were made for each reading of a point, in all attempts."""
        return self.cancelled.evaluations[: self.rows * self._repeats]  # others are of the forward pass

    def _parts(self, y: Tensor, ok: Tensor | None) -> Iterator[Outcome]:
        first = 0
        for shape in self._shapes:
            rows = slice(first, first + math.prod(shape[:-1]))
            first = rows.stop
            fine = None if ok is None else ok[rows].view(shape[:-1])
            yield Outcome(y[rows].view(*shape[:-1], -1), fine)

    def drop(self) -> None:
        """Cancel what has not started yet, and count the rest as waste."""
        if self._used:
            return
        self._used = True
        self.cancelled.set()
        record, cancelled, most = self._record, self.cancelled, self.rows * self._repeats

        def count(_: "Future[Outcome]") -> None:  # without a reference to this object, which may be about to go
            record.wasted += int(cancelled.evaluations[:most].sum())

        self.outcome.add_done_callback(count)

    def __del__(self) -> None:
        self.drop()


def _of_rows(t: Tensor, kept: Tensor) -> Tensor:
    """The entries of some rows of a batch, kept [B], of a tensor [n, B·T, d] about all of them."""
    return t.reshape(len(t), len(kept), -1)[:, kept].reshape(len(t), -1, t.shape[2])


def ask_ahead(
    ahead: Ahead, parts: Parts, x: Tensor, context: tuple[Tensor, ...], autocast: torch.dtype | None
) -> Outcome:
    """The outputs of the box at x [B, W], where the evaluations of a gradient are made in the same call, or begin.

    Where the evaluator takes several requests at a time, they run beside what comes after the forward pass.
    """
    plan, driver, function = ahead.plan, parts.driver, parts.function
    ahead.plan = None
    assert plan is not None
    points, pairs = plan.flat(), plan.pairs
    if not driver.evaluator.overlaps:
        everything, beside = torch.cat((points, x)), tuple(map(torch.cat, zip(plan.context, context, strict=True)))
        made, rows = ahead.cancelled, ahead.rows
        try:
            y, ok = driver.run(lambda: driver.ask(function, everything, beside, pairs, purpose="step", cancelled=made))
        except BaseException:
            ahead.outcome.cancel()
            ahead.drop()
            raise
        ahead.outcome.set_result(Outcome(y[:rows].clone(), None if ok is None else ok[:rows]))
        return Outcome(y[rows:]) if ok is None else checked(y[rows:])
    base, later, device = driver.reserve(), driver.reserve(), x.device
    cancelled, outcome = ahead.cancelled, ahead.outcome

    def evaluate() -> None:
        try:
            with arithmetic(parts.full_precision, device, autocast):  # which each thread has for itself
                found = driver.ask(
                    function, points, plan.context, pairs, purpose="gradient", number=later, cancelled=cancelled
                )
                outcome.set_result(found)
        except BaseException as error:
            outcome.set_exception(error)

    thread, numbers = threading.Thread(target=evaluate, daemon=True), iter((base,))
    ahead.thread = thread

    def begin() -> None:
        if thread.ident is None:
            thread.start()

    try:
        answer = driver.run(lambda: driver.ask(function, x, context, number=next(numbers, None), begun=begin))
        begin()  # if no worker could begin with the rows themselves
    except BaseException:
        ahead.drop()
        raise
    return answer
