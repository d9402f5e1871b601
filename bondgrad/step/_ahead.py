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
from bondgrad.errors import RequestCancelled, is_out_of_memory
from bondgrad.estimators import Estimator
from bondgrad.evaluators import Driver, Outcome
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


class Ahead:
    """Evaluations of a gradient that are under way, or made, before its backward pass.

    What is never asked for is cancelled, as far as it has not started, and counted as waste.
    """

    def __init__(self, plan: Plan, driver: Driver) -> None:
        self.plan: Plan | None = plan  # until it is carried out
        self.steps, self.delta, self.structure = plan.steps, plan.delta, plan.structure
        self.rows = plan.rows
        self._evaluations = plan.rows * driver.repeats
        self.cancelled = threading.Event()
        self.outcome: Future[Outcome] = Future()
        self.thread: threading.Thread | None = None  # in which they are made
        self._shapes = [points.shape for points in plan.points]
        self._record, self._used = driver.record, False

    def take(self) -> "list[Outcome] | None":
        """The outcomes of the requests in their order, once; None: they were taken before, or memory ran out."""
        if self._used:
            return None
        self._used = True
        try:
            y, ok = self.outcome.result()
            if self.thread is not None:
                self.thread.join()  # it is over; what is left of it must not meet the end of the program
        except Exception as error:
            if is_out_of_memory(error):  # the step is taken as without
                return None
            raise
        except BaseException:  # Ctrl-C
            self.cancelled.set()
            raise
        return list(self._parts(y, ok))

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
        record, rows = self._record, self._evaluations

        def count(future: "Future[Outcome]") -> None:
            error = future.exception()
            record.wasted += error.rows if isinstance(error, RequestCancelled) else 0 if error else rows

        self.outcome.add_done_callback(count)

    def __del__(self) -> None:
        self.drop()


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
        y, ok = driver.run(lambda: driver.ask(function, everything, beside, pairs, purpose="step"))
        rows = ahead.rows
        ahead.outcome.set_result(Outcome(y[:rows].clone(), None if ok is None else ok[:rows]))
        return Outcome(y[rows:], None if ok is None else ok[rows:])
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
