"""The box near the rows of one batch."""

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from bondgrad.calling._memory import Snapshots
from bondgrad.errors import BoxError
from bondgrad.estimators import Evaluate, Site
from bondgrad.step._forward import Recall, new_seed
from bondgrad.structure import Structure
from bondgrad.structure.discovery._search_batch import Scene
from bondgrad.torch_support._device import look_is_free

if TYPE_CHECKING:
    from bondgrad.box import BlackBox

T = TypeVar("T")
Ask = Callable[[Tensor, slice | Tensor], Tensor]  # (points [b, ..., d], which b rows) -> [b, ..., d_out]


class Asking:
    """The box near the rows of one batch.

    Args:
        layer: The layer.
        x: [B, W] the rows, inside the limits; W is d, or T·d for sequences.
        y: [B, W_out] the box there.
        context: [B, ...] each: what else the box is given.
        recall: What it remembered before the time steps at which it can start.
    """

    def __init__(
        self,
        layer: "BlackBox",
        x: Tensor,
        y: Tensor,
        context: tuple[Tensor, ...],
        recall: Recall,
    ) -> None:
        self.layer, self.x, self.y, self.context = layer, x, y, context
        self.recall = recall or ((0, ()),)
        self.whole = isinstance(layer.memory, Snapshots)
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        if layer.limits is not None:
            self.low, self.high = layer.limits.like(x)
        self.failed: list[Tensor] = []  # evaluations

    def scene(self, noise: float, rounding: float) -> Scene:
        """For finding out about the box."""
        most = self._portion(0, sys.maxsize)
        d = self.layer.in_features
        return Scene(self.x, self.y, self._ask(0), most, noise, rounding, self.low, self.high, d, self.whole)

    def part(self, which: Tensor) -> "Asking":
        """Of some of the rows."""
        recall = self.recall
        if not self.whole:
            recall = tuple((start, tuple(t[which] for t in leaves)) for start, leaves in self.recall)
        context = tuple(t[which] for t in self.context)
        return Asking(self.layer, self.x[which], self.y[which], context, recall)

    def again(self) -> Tensor:
        """The box at the rows themselves, [B, W_out], asked anew."""
        everything = torch.arange(len(self.x), device=self.x.device)
        return self._ask(0)(self.x[:, None, None].clone(), everything).flatten(1)

    def heard(self, structure: Structure, gy: Tensor) -> Tensor:
        """The norm of the loss's gradient gy [B, W_out] at the outputs that speak for an input: [B, W], or [B, 1]."""
        d = self.layer.in_features
        time = self.x.shape[1] // d
        groups = structure.windows(d, gy.shape[1] // time, time, [0])[0].groups
        # Relative to the largest, lest the squares over- or underflow.
        largest = gy.abs().amax(1, keepdim=True).clamp_min(torch.finfo(gy.dtype).tiny)
        square = (gy / largest).square()
        return (square.sum(1, keepdim=True) if groups is None else groups.total(square)).sqrt() * largest

    def tried(self, structure: Structure, gy: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """As `slopes`; and [B, W] which of them had all their evaluations. A box that raises gives no answer."""
        tape: dict[int, list[Tensor]] = {}

        def recording(start: int) -> Evaluate:
            ask = self._ask(start)
            answers: list[Tensor] = []
            tape[start] = answers

            def evaluate(points: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
                try:
                    answers.append(ask(points, rows).clone())  # a box may answer in the same memory each time
                except BoxError as error:  # outside its domain, perhaps, where a usual step does not lead
                    self.layer.health.raised(error)
                    width = self.y.shape[1] * points.shape[-1] // self.x.shape[1]
                    answers.append(self.y.new_full((*points.shape[:-1], width), math.nan))
                return answers[-1], None

            return evaluate

        slopes = self.slopes(structure, gy, delta, recording)
        sound = torch.isfinite(slopes)
        if bool(sound.all()):
            return slopes, sound

        def playing(start: int) -> Evaluate:
            answers = iter(tape[start])

            def evaluate(_points: Tensor, _rows: slice) -> tuple[Tensor, Tensor | None]:
                y = next(answers)
                return y, torch.isfinite(y).all(-1)

            return evaluate

        return self.slopes(structure, gy, delta, playing), sound

    def slopes(
        self, structure: Structure, gy: Tensor, delta: Tensor, evaluator: "Callable[[int], Evaluate] | None" = None
    ) -> Tensor:
        """The gradient [B, W] for gy [B, W_out], with perturbations [n, B, W], before any scaling of its rows.

        Not finite where no evaluation speaks for an entry. `evaluator` gives the box from a time step on, if it is not
        to be asked as usual.
        """
        layer, x, y = self.layer, self.x, self.y
        d = layer.in_features
        time = x.shape[1] // d
        d_out = y.shape[1] // time
        starts = [0] if layer.estimator.together else [start for start, _ in self.recall]
        structure.check(d, d_out)  # a pattern may have been loaded for another box
        g: Tensor | None = None
        for start, groups in structure.windows(d, d_out, time, starts):
            at, out = start * d, start * d_out
            site = Site(x, y, gy, delta, self.low, self.high, groups, self.whole)
            if start > 0:
                low, high = (None if limit is None else limit[at:] for limit in (self.low, self.high))
                site = Site(x[:, at:], y[:, out:], gy[:, out:], delta[:, :, at:], low, high, groups, self.whole)
            count = x.shape[1] if groups is None else groups.count
            part = self._run(site, start, x.shape[0] * layer.estimator.evaluations(count), evaluator or self._usual)
            if g is None:
                g = part
            else:
                g[:, at:] += part
        assert g is not None
        return g

    def _usual(self, start: int) -> Evaluate:
        """The box, with a look at what failed."""
        ask = self._ask(start)

        def evaluate(points: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
            y = ask(points, rows)
            # A sum is finite only if all its terms are, which spares the closer look.
            if look_is_free(y.device) and math.isfinite(y.sum()):
                return y, None
            ok = torch.isfinite(torch.linalg.vector_norm(y, math.inf, dim=-1))  # one pass over y
            self.failed.append(ok.numel() - ok.sum())
            return y, ok

        return evaluate

    def _run(self, site: Site, start: int, wanted: int, evaluator: "Callable[[int], Evaluate]") -> Tensor:
        """The estimator's work, for evaluations that start at one time step."""
        before = len(self.failed)

        def work() -> Tensor:
            del self.failed[before:]
            return self.layer.estimator.vjp(site, evaluator(start), self._portion(start, wanted))

        return self.run(work).to(self.x.dtype)

    def run(self, work: Callable[[], T]) -> T:
        """Run it; again with less at once, if that was too much and can be changed."""
        return work() if self.whole else self.layer.evaluator.run(work)

    def _portion(self, start: int, wanted: int) -> int:
        batch = self.x.shape[0]
        tensors = (self.x, self.y, *self.context, *self._leaves(start))
        row_bytes = sum([t.itemsize * (t.numel() // batch) for t in tensors])
        return self.layer.evaluator.portion(row_bytes, wanted, self.x.device)

    def _leaves(self, start: int) -> tuple[Tensor, ...]:
        """The state of a box that is given it."""
        return () if self.whole else dict(self.recall)[start]

    def _ask(self, start: int) -> Ask:
        """The box at points near rows, from a time step on; NaN where no answer came."""
        evaluator, function = self.layer.evaluator, self.layer._function
        if self.whole:
            return self._ask_one_by_one
        beside = (*self.context, *self._leaves(start))

        def ask(points: Tensor, rows: slice | Tensor) -> Tensor:
            shape = points.shape[:-1]
            nearby = tuple(t[rows].repeat_interleave(shape[1:].numel(), 0) for t in beside)
            return evaluator.answers(function, points.reshape(-1, points.shape[-1]), nearby).view(*shape, -1)

        def ask_each_end(points: Tensor, rows: slice | Tensor) -> Tensor:
            """With the same random numbers at both ends of a move: their noise is gone from the difference."""
            new_seed(self.layer)
            return torch.stack([ask(end, rows).clone() for end in points.unbind(-2)], -2)

        return ask if function.seed_position is None else ask_each_end

    def _ask_one_by_one(self, points: Tensor, _: slice | Tensor) -> Tensor:
        """For a box that keeps its state to itself, and is therefore asked about all rows, one move at a time."""
        memory = self.layer.memory
        assert isinstance(memory, Snapshots)
        answers = []
        for point in points.flatten(1, -2).unbind(1):
            memory.restore(self.recall[0][1])
            # Not by way of the evaluator, which might cut the batch.
            answers.append(self.layer._function(point.clone(), *(c.clone() for c in self.context)).clone())
        return torch.stack(answers, 1).view(*points.shape[:-1], -1)


def moves(x: Tensor, size: Tensor, sign: Tensor, ulps: float) -> Tensor:
    """Steps of that size [n, ...] and sign, made longer by so many units of the rounding of x [B, W]: [n, B, W]."""
    shape = (size.shape[0], *x.shape)
    size = torch.add(size.reshape(shape), x.abs(), alpha=ulps * torch.finfo(x.dtype).eps)
    return torch.copysign(size, sign.reshape(shape))
