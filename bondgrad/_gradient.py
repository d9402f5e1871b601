"""The backward pass: from perturbations, through evaluations, to the gradient at the box's inputs."""

import contextlib
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from bondgrad import _arguments as arguments
from bondgrad._device import is_capturing, look_is_free
from bondgrad._forward import Pass, Recall
from bondgrad._memory import Snapshots
from bondgrad._trace import Step
from bondgrad.estimators import Site
from bondgrad.policies import Batch
from bondgrad.structure import Structure
from bondgrad.structure._findings import Found
from bondgrad.structure._scene import Scene

if TYPE_CHECKING:
    from bondgrad.box import BlackBox

ULPS = 4  # the least step, in units of the rounding of x
T = TypeVar("T")
Ask = Callable[[Tensor, slice | Tensor], Tensor]  # (points [b, ..., d], which b rows) -> [b, ..., d_out]


class Circumstances(NamedTuple):
    """Of a forward pass, for its backward pass."""

    training: bool
    autocast: torch.dtype | None  # for a box that does not run in full precision
    forward: Pass = Pass()
    parameters: list[Tensor | None] | None = None  # of a box that is a module


def differentiate(
    layer: "BlackBox", how: Circumstances, x: Tensor, y: Tensor, gy: Tensor, context: tuple[Tensor, ...]
) -> Tensor:
    """The gradient [B, d] at x [B, d], where the box lives.

    Changes of state come last, so that a box that fails leaves none. Then come the hooks.
    """
    memory = layer.memory
    with memory.kept() if isinstance(memory, Snapshots) else contextlib.nullcontext():
        g, step = _differentiate(layer, how, arguments.inside(layer.limits, x), y, gy, context)
    if is_capturing(x.device):
        layer._trace.captured.append(step)
    else:
        layer._run_hooks(step)
    return g


def _differentiate(
    layer: "BlackBox", how: Circumstances, x: Tensor, y: Tensor, gy: Tensor, context: tuple[Tensor, ...]
) -> tuple[Tensor, Step]:
    """See `differentiate`. Rows may be sequences, [B, T·d]; to the policy every time step is a row."""
    d, policy, policy_state, findings = layer.in_features, layer.policy, layer.policy_state, layer.findings
    rows = x.reshape(-1, d) if x.shape[1] != d else x
    eps = torch.finfo(x.dtype).eps
    noise = max(eps, layer._function.rounding) if layer.noise is None else layer.noise
    capturing = is_capturing(x.device)
    asking = Asking(layer, x, y, context, how.forward.recall)
    found: Found | None = None
    if findings is not None and how.training and not capturing and findings.due(x.shape[1] // d):
        found = asking.run(lambda: findings.look(asking.scene(noise, layer._function.rounding or eps)))

    generator = policy_state.random.on(x.device) if capturing else policy_state.random.fork(x.device)
    state = policy_state.read(x.device)
    ranks, joint_rows, first, sums, _ = how.forward.part
    batch = Batch(rows, generator, joint_rows or rows.shape[0], first, None if sums is None else sums.to(x.device))
    steps = policy.steps(state, batch, layer.estimator.draws, noise)
    # A step below the rounding of x would vanish in x + step.
    steps = steps._replace(size=torch.add(steps.size, rows.abs(), alpha=ULPS * eps))
    spent = layer._function.evaluations
    structure = layer.structure if found is None else found.structure
    g = asking.gradient(structure, gy, torch.copysign(steps.size, steps.sign).view(-1, *x.shape))
    spent = layer._function.evaluations - spent
    g_rows = g.reshape(rows.shape)
    # Wrappers average the gradient over the processes, so a row has a share of what it would have alone.
    summary = policy.summarize(g_rows if ranks == 1 else g_rows / ranks, steps)
    new_state = policy.observe(state, summary, rows.shape[0]) if how.training and ranks == 1 else state
    if layer.estimator.normalize_rows:
        g_rows = normalized(g_rows) * ranks  # of which the wrappers leave one share

    trace = layer._trace
    if asking.failed:
        trace.add_failures(torch.stack(asking.failed).sum(), raises=layer.on_failure == "raise")
    trace.last = steps
    if how.training:
        policy_state.random.join(x.device, generator)
        policy_state.write(new_state)
        if ranks > 1:
            policy_state.ranks.remember(how.forward.part, summary)
        if findings is not None:
            if found is not None:
                findings.accept(found)
            findings.credit += spent
    g = g_rows.view(x.shape)
    step = Step(x, gy, g)
    if structure.in_time:
        step = Step(*(t.reshape(len(x), x.shape[1] // d, -1) for t in step))
    return g, step


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

    def gradient(self, structure: Structure, gy: Tensor, delta: Tensor) -> Tensor:
        """The gradient [B, W] for gy [B, W_out], with perturbations [n, B, W], before any scaling of its rows."""
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
            part = self._run(site, start, x.shape[0] * layer.estimator.evaluations(count))
            if g is None:
                g = part
            else:
                g[:, at:] += part
        assert g is not None
        if not look_is_free(x.device) or not math.isfinite(g.sum()):
            # What could not be estimated is zero; but where the loss's own gradient is not finite neither is ours, as
            # loss scalers expect.
            g = g.nan_to_num(0, 0, 0) + (gy * 0).sum(1, keepdim=True)
        return g

    def _run(self, site: Site, start: int, wanted: int) -> Tensor:
        """The estimator's work, for evaluations that start at one time step."""
        before = len(self.failed)
        ask = self._ask(start)

        def evaluate(points: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
            y = ask(points, rows)
            # A sum is finite only if all its terms are, which spares the closer look.
            if look_is_free(y.device) and math.isfinite(y.sum()):
                return y, None
            ok = torch.isfinite(torch.linalg.vector_norm(y, math.inf, dim=-1))  # one pass over y
            self.failed.append(ok.numel() - ok.sum())
            return y, ok

        def work() -> Tensor:
            del self.failed[before:]
            return self.layer.estimator.vjp(site, evaluate, self._portion(start, wanted))

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
            return evaluator.answers(function, points.view(-1, points.shape[-1]), nearby).view(*shape, -1)

        return ask

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


def normalized(g: Tensor) -> Tensor:
    """Rows of g [B, d] scaled to norm 1; rows of zeros stay zero."""
    # Scaled to a largest entry of 1 first, lest the squares of the norm over- or underflow.
    g = g / g.abs().amax(1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
    return torch.nn.functional.normalize(g, dim=1)
