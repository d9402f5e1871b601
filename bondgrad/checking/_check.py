"""The function `check`: measuring until it is known whether a gradient is right."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bondgrad.calling._inputs import Limits, check_rows, context_rows
from bondgrad.checking._evidence import Evidence, compare
from bondgrad.checking._jumps import Ladder, explained_by_jumps, inputs_moved_far
from bondgrad.checking._progress import CheckProgress, RequestPace
from bondgrad.checking._report import Check, Obstacle, Verdict, notes, problems
from bondgrad.checking._sampler import GradientSampler
from bondgrad.checking._slopes import SETTINGS, LossSlopes, rungs
from bondgrad.checking._stairs import OutputChanges
from bondgrad.errors import checked_seed, positive_float, positive_int
from bondgrad.evaluators import Evaluator
from bondgrad.measuring._sampler import BudgetExceeded
from bondgrad.measuring._spread import Spread
from bondgrad.measuring._statistics import LOOKS, mean


def check(
    box: Callable[..., Any],
    x: Tensor,
    *context: Tensor,
    limits: tuple[Any, Any] | None = None,
    resolution: Any = None,  # noqa: ANN401
    tolerance: float = 0.01,
    budget: int = 100_000,
    seconds: float | None = None,
    seed: int = 0,
    evaluator: Evaluator | None = None,
    progress: Callable[[CheckProgress], None] | None = None,
) -> Check:
    """Find out whether the gradient that autograd takes through a box is right; `bondgrad.checking` explains how.

    The box is given copies, so that it may change its inputs. It is in eval mode during the check. Afterwards its
    buffers, the random numbers of torch, numpy and Python, and what a BlackBox has learnt and counted are restored. A
    BlackBox computes the gradient of its next training step, so that one that has trained is judged with the steps it
    has learnt. (Give the layer, not a function around it, which would hide it.)

    Args:
        box: [N, d] -> [N, d_out], every row by itself, with a gradient: a BlackBox, a module, or a function that calls
            an autograd.Function.
        x: [N, d] typical rows, in float32 or float64. Their spread is the scale on which inputs are moved.
        context: Further inputs of the box, one entry per row.
        limits: (low, high): no point outside is evaluated. A BlackBox, or a module with one inside, is refused with
            limits, since a BlackBox keeps to its own `limits` and `resolution`: set them there. The check keeps to
            those, too, also for a module around the BlackBox that has attributes of these names with the same values.
        resolution: The step in which inputs can be set, as that of a DAC, a number or one per input: every point is a
            whole number of steps above the lower limit, or from zero where there is none, and slopes are compared over
            what was set. The gradient is then that of the function that the settings sample. A BlackBox has its own.
        tolerance: Relative error of an input's gradient that still counts as right.
        budget: The most evaluations to spend: rows evaluated by the box, or by the function inside a BlackBox. Those of
            rows that are asked again, since they failed, may exceed it in the last request.
        seconds: The most time to spend. It is looked at between requests, and requests for outputs are small enough for
            that. Gradients are taken of whole batches, as without a limit, and are not begun if they seem to take
            longer than the time left. With little time fewer rows are tried, and the verdict may be "undecided": it
            says how much time a batch needs. None: no limit.
        seed: The seed for gy, for the choice of rows, and for the steps.
        evaluator: Evaluates the box at rows where only outputs are needed, in requests with the purpose "probe". None:
            `evaluators.Local()`. Gradients are always taken in this process, of no more than its `max_rows` rows at a
            time. A BlackBox evaluates its function with its own evaluator, for outputs as for gradients.
        progress: Called after every request with a `CheckProgress`: what is measured, evaluations so far, the budget,
            and seconds. `progress=print` prints a line for each.
    """
    if not callable(box):
        raise TypeError(f"box must be callable, got {type(box).__name__}: give a BlackBox, a module or a function")
    _check_typical_rows(x)
    tolerance = positive_float("tolerance", tolerance)
    generator = torch.Generator("cpu").manual_seed(checked_seed(seed))
    pace = RequestPace(None if seconds is None else positive_float("seconds", seconds), progress)
    sampler = GradientSampler(box, positive_int("budget", budget), evaluator, pace)
    bounds = sampler.limits(limits, resolution, x.shape[1])
    with sampler.without_trace():
        try:
            slopes = _typical_rows(sampler, x.detach(), context_rows(context, x.shape[:1]), bounds, generator)
            gradient_check = GradientCheck(slopes, tolerance, generator)
        except BudgetExceeded as reason:
            return Check.unfinished(x.shape[1], tolerance, sampler.evaluations, str(reason))
        evidence = gradient_check.run()
        verdict: Verdict = "right" if bool(evidence.enough.all()) else "undecided"
        verdict = "wrong" if bool(evidence.wrong.any()) else verdict
        found = evidence.factor[:-1], evidence.standard_error[:-1], evidence.error, evidence.visible
        rest = gradient_check.rate(), tolerance, sampler.evaluations, problems(evidence, tolerance, slopes.scale)
        obstacle = gradient_check.obstacle(evidence)
        return Check(verdict, *found, *rest, notes(verdict, evidence, obstacle, slopes.scale), obstacle)


def _check_typical_rows(x: Tensor) -> None:
    """Raise an error unless x [N, d] can be the rows of a check."""
    check_rows(x)
    if x.dtype.itemsize < 4:
        raise ValueError(f"x must be in float32 or float64, got {x.dtype}: call x.float()")
    if not bool(torch.isfinite(x).all()):
        raise ValueError("x must be finite: leave out rows with NaN or infinite values")


def _typical_rows(
    sampler: GradientSampler, x: Tensor, context: tuple[Tensor, ...], limits: Limits, generator: torch.Generator
) -> LossSlopes:
    """Choose rows of x [N, d], and gy such that every output has the same weight.

    Gradients are computed at many rows. Rows at which one is not finite are among the few that are chosen, to measure
    whether the box has a slope there: at the end of its domain, such as that of a root, the gradient may be infinite.
    """
    start, d = sampler.gradient_cost(0), x.shape[1]  # evaluations by which policies may have to find a first step
    gradient = sampler.gradient_cost(1) - start
    # Evaluations per row: `look` for its output and one gradient, `each` at least for checking its gradient.
    look, left = 2 * sampler.output_cost + gradient, sampler.budget - start
    outputs = 2 * rungs(x.dtype) * d + SETTINGS.copies * (6 * d + 1) + 1
    each = outputs * sampler.output_cost + SETTINGS.gradients * gradient
    if left < each + look:
        raise ValueError(f"budget must be at least {each + look + start} for {d} inputs, got {sampler.budget}")
    scale = Spread.of(x.double()).typical
    low, high = limits.like(x)
    margin = SETTINGS.margin * torch.minimum(high - low, scale.to(x.dtype))
    x = limits.clamped(x.clamp(low + margin, high - margin))
    count = min(SETTINGS.finite_rows, sampler.budget // SETTINGS.finite_part // look, (left - each) // look)
    rows = torch.randperm(len(x), generator=generator)[:count].to(x.device)
    y = sampler.outputs(x[rows], tuple(c[rows] for c in context)).double()
    answered = torch.isfinite(y).all(1)
    if not bool(answered.any()):
        raise ValueError(
            f"box must have finite answers at x, but has none at the {len(rows)} rows that were tried: give rows at "
            "which it answers"
        )
    # Now the time of a row is known: a layer finds its first step at no fewer rows than are judged.
    fewer = max(SETTINGS.rows, int(min(count, sampler.pace.affordable / SETTINGS.finite_part / gradient)))
    rows, y = rows[answered][:fewer], y[answered][:fewer]
    gy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device) / Spread.of(y).typical
    finite = ~sampler.gradients(x[rows], tuple(c[rows] for c in context), gy, generator).isinf().any(1)
    chosen = torch.cat(((~finite).nonzero()[: SETTINGS.suspects], finite.nonzero())).squeeze(1)
    chosen = chosen[: max(1, min(SETTINGS.rows, sampler.left // each))]
    rows, gy = rows[chosen], gy[chosen]
    return LossSlopes(sampler, x[rows], tuple(c[rows] for c in context), gy, scale, limits)


class GradientCheck:
    """Measures gradients and slopes at the same rows, and repeats both until every input is decided.

    Args:
        slopes: Measures the loss near the rows.
        tolerance: Relative error of an input's gradient that still counts as right.
        generator: For the random part of the steps.
    """

    def __init__(self, slopes: LossSlopes, tolerance: float, generator: torch.Generator) -> None:
        self.slopes, self.tolerance, self.generator = slopes, tolerance, generator
        slopes.sampler.pace.stage = "slopes over a ladder of steps"
        y, ladder, eps = slopes.outputs(1), slopes.ladder(), torch.finfo(slopes.x.dtype).eps
        self.base, changes = slopes.base(y), OutputChanges(y.squeeze(1), eps)  # [r, 1]
        self.moves, self.losses = slopes.losses(ladder, changes)  # [r, d, rungs, 2]
        quotients = (self.losses.diff(dim=3) / self.moves.diff(dim=3)).squeeze(3)
        self.ladder = Ladder(self.base, self.moves, self.losses, eps)
        slopes.sampler.pace.stage = "gradients at these rows"
        self.gradients = slopes.gradients(SETTINGS.gradients, generator)  # [copies, r, d]
        slopes.sampler.pace.stage = "slopes"
        self.samples = slopes.measure(slopes.best_steps(ladder, quotients), SETTINGS.copies, generator)
        self.staircase = slopes.staircase(changes)
        # Only a layer chooses its steps: a gradient that was written by hand has to be the slope at a point anyway.
        noise = self.samples.loss.var(0).mean() / 2  # two ends, each with its noise, over twice the step
        self.moved_far = inputs_moved_far(mean(self.gradients)[0], quotients, noise) & slopes.sampler.has_layers  # [d]
        self.at_jump = torch.zeros_like(self.samples.step, dtype=torch.bool)  # [r, d] entries left out for jumps
        if self.staircase is not None:
            self.at_jump |= self.staircase.without_slope
        self.jump_error = 0.0  # largest relative error of an input before they were
        self.unconfirmed = False  # whether an error was not seen again for want of evaluations or of time
        slopes.sampler.pace.stage = "slopes and gradients once more"

    def run(self) -> Evidence:
        """Measure until an input is wrong, every input is decided, or the budget is spent.

        Steps may have crossed kinks. So an input that seems wrong must seem wrong again with shorter steps, unless the
        function shows no kinks and one factor explains the error: the effect of kinks differs from row to row. Rows
        at which jumps of the box explain the error are left out. So are in the end all rows of an input that a layer
        moves far and that is not decided: its gradient is not judged.
        """
        at_kink = self.at_jump
        to_confirm = torch.zeros_like(self.samples.step[0])  # [d] errors to be confirmed with shorter steps
        for look in range(1, LOOKS + 1):
            evidence = compare(self.gradients, self.samples, at_kink, self.tolerance)
            if self.staircase is not None and self.staircase.everywhere:
                return _without_slopes(evidence)
            if self._is_certain(evidence, to_confirm):
                jumps = self._jumps(evidence)
                if not bool(jumps.any()):
                    return evidence
                evidence = self._without(jumps, evidence)
                if self._is_certain(evidence, to_confirm):
                    return evidence
            wrong, at_kink, shortened = evidence.wrong, evidence.entries.at_kink, to_confirm > 0
            suspect = (wrong[:-1] | wrong[-1]) & ~shortened  # [d]
            evidence = evidence._replace(wrong=torch.zeros_like(wrong), enough=evidence.enough & ~suspect)
            hopeless = self.at_jump.any(0) & ~evidence.entries.known.any(0)  # [d]
            self.unconfirmed = bool(suspect.any())
            shorter = (evidence.bending & ~hopeless) | suspect
            if bool((evidence.enough | hopeless).all()) or look == LOOKS or not self.more(shorter):
                break
            # An error that is visible with shorter steps, and is not found with them, was due to the longer ones.
            to_confirm = torch.where(evidence.visible < to_confirm, 0, to_confirm)
            together = (evidence.factor[-1] - 1).abs().nan_to_num(0)  # relative error of all inputs together
            to_confirm = torch.where(suspect, torch.maximum(evidence.error, together), to_confirm)
        not_judged = evidence.entries.known & self.moved_far & ~evidence.enough  # [r, d]
        if bool(not_judged.any()):
            evidence = self._without(not_judged, evidence)
            evidence = evidence._replace(wrong=torch.zeros_like(evidence.wrong))  # no error was confirmed
        return evidence

    def _without(self, jumps: Tensor, evidence: Evidence) -> Evidence:
        """The evidence without more entries, bool [r, d], at which the box jumps."""
        self.at_jump |= jumps
        self.jump_error = max(self.jump_error, float(evidence.error[jumps.any(0)].max()))
        return compare(self.gradients, self.samples, evidence.entries.at_kink | jumps, self.tolerance)

    def _is_certain(self, evidence: Evidence, to_confirm: Tensor) -> bool:
        """Whether an input is wrong beyond doubt; to_confirm [d] is above zero where steps have been shortened."""
        shortened, at_kink = to_confirm > 0, evidence.entries.at_kink
        has_kinks = int(at_kink.sum()) > max(1, SETTINGS.kinks_part * at_kink.numel())
        confirmed = torch.cat((shortened | evidence.missing, shortened.all(0, keepdim=True)))
        return bool((evidence.wrong & (confirmed | (evidence.uniform & (not has_kinks)))).any())

    def _jumps(self, evidence: Evidence) -> Tensor:
        """Entries [r, d] of inputs that seem wrong at which the reason is that the box jumps.

        A jump is near some rows only: it explains the error there if the input is right at other rows. An input that is
        right at too few rows is wrong for another reason, unless a layer moves it far; then none of its rows is judged.
        """
        s, g, var_s, var_g, known, _, _ = evidence.entries
        if self.staircase is not None and self.staircase.regular:  # rounding is known, and part of the standard errors
            return torch.zeros_like(known)
        error, wrong = g - s, evidence.wrong[:-1]
        usual = (s.square().sum(0) / known.sum(0).clamp(min=1)).sqrt()  # [d]
        deviation = SETTINGS.kink_z * (var_s + var_g).sqrt()
        clear = known & (s.abs() > deviation)
        right = clear & (error.abs() <= 2 * self.tolerance * s.abs() + deviation)
        some_right = right.sum(0) >= SETTINGS.right_part * clear.sum(0).clamp(min=1)  # [d]
        self.slopes.sampler.pace.stage = "jumps of the box"
        all_rows = known & self.moved_far & wrong & ~some_right
        some_rows = known & (error.abs() > torch.maximum(self.tolerance * usual, deviation))
        some_rows &= (wrong | evidence.wrong[-1]) & some_right
        with contextlib.suppress(BudgetExceeded):
            noise = self.samples.loss.std(0)
            return all_rows | explained_by_jumps(self.slopes, self.ladder, s, error, some_rows, noise)
        return all_rows

    def obstacle(self, evidence: Evidence) -> Obstacle:
        """What there is to say of the box, and of what makes the check difficult."""
        _, _, var_s, var_g, _, _, _ = evidence.entries
        noisy = bool((self.samples.loss.std(0) > SETTINGS.seen * self.samples.rounding).any())
        if bool(var_g.sum() > var_s.sum()) and not (noisy and self.slopes.sampler.has_layers):
            hidden_by = "the scatter of the gradient from call to call"
        else:
            hidden_by = "noise" if noisy else "roughness of the outputs"
        sampler = self.slopes.sampler
        return Obstacle(
            hidden_by,
            self.unconfirmed,
            sampler.is_late,
            sampler.has_layers and noisy,
            self.at_jump,
            self.jump_error,
            self.staircase,
            not bool((self.losses - self.base[..., None, None]).nan_to_num(0).any()),
        )

    def more(self, shorter: Tensor) -> bool:
        """Double the copies, or measure anew with shorter steps of some inputs, bool [d].

        Returns False if no budget or no time is left.
        """
        with contextlib.suppress(BudgetExceeded):
            return self._more(shorter)
        return False

    def _more(self, shorter: Tensor) -> bool:
        slopes, left, copies = self.slopes, self.slopes.sampler.left, len(self.samples.slope)
        if bool(shorter.any()):
            copies = min(copies, left // slopes.cost(1))
            if copies < SETTINGS.copies:
                return False
            step = torch.where(shorter, self.samples.step / SETTINGS.factor, self.samples.step)
            self.samples = slopes.measure(step, copies, self.generator)
            return True
        # Slopes or gradients that add little to the variance are not measured again.
        var_s, var_g = (mean(t)[1].nansum(0) for t in (self.samples.slope, self.gradients))  # [d]
        more_s = copies * bool((var_s > SETTINGS.minor * (var_s + var_g)).any())
        more_g = len(self.gradients) * bool((var_g > SETTINGS.minor * (var_s + var_g)).any())
        cost = slopes.cost(more_s) + slopes.sampler.gradient_cost(more_g * len(slopes.x))
        more_s, more_g = (int(min(1, left / max(1, cost)) * more) for more in (more_s, more_g))
        if more_s:
            self.samples = self.samples.joined(slopes.measure(self.samples.step, more_s, self.generator))
        if more_g:
            self.gradients = torch.cat((self.gradients, slopes.gradients(more_g, self.generator)))
        return more_s + more_g > 0

    def rate(self) -> Tensor:
        """Exponent [d] of the step in the remainder of Taylor's series, over the finest rungs above the noise."""
        move = self.moves[..., 0]  # [r, d, rungs]
        remainder = self.losses[..., 0] - self.base[:, None] - move * mean(self.gradients)[0][..., None]
        size, length = (t.square().nanmean(0).sqrt() for t in (remainder, move))  # [d, rungs]
        noise = self.samples.loss.var(0) + self.samples.rounding.square()  # [r, d]
        # Rungs shorter than the first one that is lost in noise may exceed the noise by chance.
        seen = size > SETTINGS.seen * noise.nanmean(0).sqrt()[:, None]
        count = seen.long().cumprod(1).sum(1, keepdim=True)  # [d, 1]
        first, last = ((count - back).clamp(min=0) for back in (3, 1))
        size, length = ((t.gather(1, first) / t.gather(1, last)).log() for t in (size, length))
        return torch.where(length > 0, size / length, math.nan).squeeze(1)


def _without_slopes(evidence: Evidence) -> Evidence:
    """The evidence of a box without slopes: a gradient that is not finite is wrong, nothing else can be said."""
    none = torch.zeros_like(evidence.enough)
    return evidence._replace(wrong=torch.cat((evidence.missing, none[:1])), enough=none)
