"""How many signs of a gradient would be right in training: with the default policy, and with fixed steps."""

import contextlib
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bondgrad.calling._modules import in_eval_mode
from bondgrad.errors import BoxError
from bondgrad.measuring._sampler import BudgetExceeded, MeasurementSkipped, Sampler
from bondgrad.metrics import sign_accuracy
from bondgrad.policies import Calibrated
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import percent, sentences
from bondgrad.probing._one_seed import ask_ends


@dataclass(frozen=True)
class GradientSettings:
    """The rows and steps of the trial, what the reference is, and when a fixed step is recommended."""

    rows: int = 24  # typical rows, each with a random gradient of the loss
    least_rows: int = 8  # fewer are not tried
    inputs: int = 8  # most inputs, chosen at random
    steps: tuple[int, int] = (8, 20)  # least and most training steps of the default layer, each with a trial
    calls: int = 7  # of the box in such a step, about
    other_calls: int = 40  # for first steps, the reference and fixed steps
    counted: int = 3  # of which the last ones are compared with the reference
    rungs: tuple[float, ...] = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # fixed steps, in spreads of the inputs
    factor: float = 0.3  # by which long steps may stretch or shrink all slopes of an input, before that is measured
    short: float = 0.01  # step of the reference, in spreads, for a module that is noisy except in eval mode
    reliable: float = 0.9  # share of the squares of slopes that must not be noise, for a reference
    drowned: float = 0.5  # share of the squares that is noise, beyond which nothing can be said
    jump_share: float = 1 / 30  # part of a typical slope that a jump may make, where the reference can be so short
    good: float = 0.97  # share of right signs from which on no fixed step is tried
    gain: float = 0.03  # by which a fixed step must be better than the default to be recommended
    errors: float = 2.0  # and by so many standard errors; but where there are jumps, a fixed step needs only be as good
    enough: int = 80  # if fewer signs than this were compared
    near: float = 0.02  # the shortest step counts as best that is so close to the best one
    uneven: float = 3.0  # largest ratio of the spreads of inputs for which one step is recommended


SETTINGS = GradientSettings()


class _SoonCalibrated(Calibrated):
    """The default policy, with a trial in every step, so that it has found its steps after a few."""

    share = 1.0


@dataclass(frozen=True)
class Gradients:
    """The share of right signs, by policy."""

    default: float  # with the default policy, after some training steps
    fixed: dict[float, float]  # by step, the same for all inputs; empty: the default is good, or there was no time
    error: float  # standard error of the share with the default policy
    reference: str  # slopes that count as right
    even: bool = True  # whether the inputs spread alike, so that one step suits all
    jumps: bool = False  # whether the box jumps, so that its default steps are not safe to trust
    entries: int = field(default=0)  # number of signs

    @property
    def step(self) -> float | None:
        """The fixed step to be recommended; None: the default policy is as good, or nearly so."""
        if not self.fixed or not self.even:
            return None
        best = max(self.fixed.values())
        cannot_tell = self.jumps and self.entries < SETTINGS.enough
        if best - self.default < (0.0 if cannot_tell else max(SETTINGS.gain, SETTINGS.errors * self.error)):
            return None
        return min(step for step, signs in self.fixed.items() if signs >= best - SETTINGS.near)

    @property
    def predicted(self) -> float:
        """The share of right signs with the recommended policy."""
        return self.default if self.step is None else self.fixed[self.step]

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        step, about = self.step, f"({self.entries} entries; right is {self.reference})"
        share = f"{percent(self.default)} ± {percent(self.error)}"
        default = f"With the default policy, {share} of the signs of a gradient are right {about}."
        best = max(self.fixed, key=lambda h: self.fixed[h], default=0.0)
        return sentences(
            default,
            step is not None and f"With a fixed step of {step:.2g}, {percent(self.predicted)} are.",
            step is None and bool(self.fixed) and f"The best fixed step, {best:.2g}, has {percent(self.fixed[best])}.",
        )


def measure_gradients(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Gradients:
    """Compare the gradients of the default layer, and those of fixed steps, with slopes that count as right."""
    if facts.remembers or (facts.found.company is not None and facts.found.company.matters):
        raise MeasurementSkipped("answers depend on other rows, so that a short trial says little")
    random = facts.found.randomness
    quiet = random is not None and bool(random.quiet_in_eval)
    with in_eval_mode(sampler.function.fn) if quiet else contextlib.nullcontext():
        try:
            return _Trial(sampler, facts, generator, facts.noisy and not quiet).measure()
        finally:
            sampler.seed = None


class _Trial:
    """Some rows and inputs, at which gradients are compared.

    Args:
        sampler: Evaluates the box.
        facts: What is known of it.
        generator: Chooses rows, inputs, and gradients of the loss.
        noisy: Whether outputs have noise.
    """

    def __init__(self, sampler: Sampler, facts: Facts, generator: torch.Generator, noisy: bool) -> None:
        self.sampler, self.facts, self.generator, self.copies = sampler, facts, generator, 1 + noisy
        d = sampler.x.shape[1]
        moving = [i for i in range(d) if facts.found.sensitivity is None or facts.found.sensitivity.change[i] != 0]
        k = min(SETTINGS.inputs, len(moving))
        if k == 0:
            raise MeasurementSkipped("no input changes an output")
        # Evaluations for each row and input: of a step of the default layer with its trial, and of all else.
        a_step, others = 3.2, 9 + 2 * self.copies * (len(SETTINGS.rungs) + 1)
        (few, many), left = SETTINGS.steps, sampler.affordable
        n = min(SETTINGS.rows, int(left / ((few * a_step + others) * k)))
        k = k if n >= SETTINGS.least_rows else int(left / ((few * a_step + others) * SETTINGS.least_rows))
        n = max(n, SETTINGS.least_rows)
        if k == 0:
            raise BudgetExceeded(f"the {left:,} evaluations left do not reach")
        calls = sampler.affordable_calls - SETTINGS.other_calls
        sampler.require(0, few * SETTINGS.calls + SETTINGS.other_calls)
        self.steps = max(few, min(many, int((left / (k * n) - others) / a_step), calls // SETTINGS.calls))
        self.inputs = torch.tensor(moving)[torch.randperm(len(moving), generator=generator)[:k]].sort().values
        self.rows = facts.choose(n, generator)
        self.gy = torch.randn(n, sampler.caller.out_features, dtype=torch.float64, generator=generator)  # [n, d_out]
        self.spread = sampler.spread[self.inputs]  # [k]

    def measure(self) -> Gradients:
        """The finding."""
        right, noise, words = self.noisy_reference() if self.copies > 1 else self.quiet_reference()
        default = self.share(self.default_slopes(), right, noise)
        fixed, unit = {}, float(self.spread.median())
        error = math.sqrt(max(default * (1 - default), 0.01) / right.numel())
        if default < SETTINGS.good:
            with contextlib.suppress(BudgetExceeded):
                for rung in SETTINGS.rungs:
                    slopes = self.slopes(torch.full_like(self.spread, rung * unit))
                    fixed[float(f"{rung * unit:.2g}")] = self.share(slopes, right, noise)
        even = bool(self.sampler.spread.max() <= SETTINGS.uneven * self.sampler.spread.min())
        smoothness = self.facts.found.smoothness
        jumps = smoothness is not None and smoothness.kind == "jumps"
        return Gradients(default, fixed, error, words, even, jumps, right.numel())

    def slopes(self, h: Tensor) -> Tensor:
        """Slopes [copies, n, k] for gy by central differences over steps h [k]."""
        (n, k), sampler = (len(self.rows), len(self.inputs)), self.sampler
        rows, inputs = self.rows.repeat_interleave(k), self.inputs.repeat(n)
        ends = sampler.either_side(rows, inputs, h.repeat(n)[:, None])[0].squeeze(1)  # [n * k, 2]
        found = []
        for copy in range(self.copies):
            y = ask_ends(sampler, rows, inputs, ends, seed=copy)  # [n * k, 2, d_out]
            slopes = y.diff(dim=1).squeeze(1) / ends.diff(dim=1)
            found.append((slopes.view(n, k, -1) * self.gy[:, None]).sum(2))
        return torch.stack(found)

    def quiet_reference(self) -> tuple[Tensor, Tensor, str]:
        """Slopes [n, k] that count as right for a box without noise, their variance, which is zero, and what they are.

        Where there are jumps, the step is so long that they matter little beside a typical slope, one spread at most.
        """
        found, none = self.facts.found, torch.zeros(len(self.inputs), dtype=torch.float64)
        jumps = 0.0 if found.smoothness is None or found.smoothness.kind != "jumps" else found.smoothness.jump
        rounding, steps = found.rounding, found.steps
        coarse = rounding is not None and (rounding.quantised or rounding.rough)
        best = None if steps is None or steps.constant else SETTINGS.short if self.facts.noisy else steps.best
        if jumps == 0 and not coarse and best is not None:
            return self.slopes(best * self.spread)[0], none, "the slope"
        change = self.spread.new_ones(len(self.spread))
        if found.sensitivity is not None and jumps > 0:
            change = self.spread.new_tensor(found.sensitivity.change)[self.inputs].nan_to_num(1)
        size = math.inf if coarse or jumps == 0 else jumps / SETTINGS.jump_share
        h = (size / change).clamp(max=1) * self.spread  # [k]
        return self.slopes(h)[0], none, f"the slope over {float((h / self.spread).median()):.2g} × an input's spread"

    def noisy_reference(self) -> tuple[Tensor, Tensor, str]:
        """Slopes [n, k] that count as right for a box with noise, their variance [k] by noise, and what they are.

        Slopes over two steps are extrapolated to none, where that is reliable; if not, those over a spread count.
        """
        short = self.slopes(self.spread / 4)
        for part in (1 / 2, 1):
            wide = self.slopes(part * self.spread)
            guess = (4 * short - wide) / 3
            noise, mean = guess.var(0).mean(0) / self.copies, guess.mean(0)
            if bool((noise <= (1 - SETTINGS.reliable) * mean.square().mean(0)).all()):
                return mean, noise, "the slope, extrapolated from two steps"
            short = wide
        mean, noise = short.mean(0), short.var(0).mean(0) / self.copies
        if float(noise.sum()) > SETTINGS.drowned * float(mean.square().mean(0).sum()):
            raise MeasurementSkipped("noise drowns slopes over an input's spread; average several readings")
        return mean, noise, "the slope over an input's spread"

    def share(self, slopes: Tensor, right: Tensor, variance: Tensor) -> float:
        """The share of right signs among slopes [copies, n, k], given slopes [n, k] and their variance [k] by noise.

        A reference with noise of its own has wrong signs, too. Errors are then taken to be normal: their variance is
        that between copies, and that of the mean from the reference, as far as its own noise does not explain it.
        """
        if self.copies == 1:
            return float(torch.stack([sign_accuracy(g, right) for g in slopes]).mean())
        mean, c = slopes.nanmean(0), len(slopes)
        own = slopes.var(0).nan_to_num(0).mean(0)  # [k]
        size = right.square().mean(0)
        # The factor of all slopes of an input, near one where noise hides it.
        known, trust = torch.maximum(size - variance, size / 10), size * len(right) * c * SETTINGS.factor**2
        factor = ((mean * right).nanmean(0) / known * trust + own) / (trust + own)
        by_chance = own / c * (1 + math.sqrt(2 / len(right)))
        other = (mean - factor * right).square().nanmean(0) - by_chance - factor.square() * variance
        kept = (1 - variance / size).clamp(0, 1)  # the part of the squares of `right` that is not noise
        z = factor * kept.sqrt() * right.abs() / (own + other.clamp_min(0)).sqrt().clamp_min(1e-300)
        return float(torch.special.ndtr(z.nan_to_num(0)).mean())

    def default_slopes(self) -> Tensor:
        """Gradients [counted, n, k] of a layer as it is by default, after some training steps at other rows."""
        from bondgrad.box import BlackBox

        sampler, inputs = self.sampler, self.inputs

        def moved(points: Tensor, numbers: Tensor) -> Tensor:
            """Outputs at rows of which the chosen inputs have other values: points [m, k] near rows [m]."""
            full = sampler.x[numbers]
            full[:, inputs] = points.double()
            return sampler.ask(full, numbers).to(sampler.function.dtype)

        def seeded(points: Tensor, numbers: Tensor, seed: int | None = None) -> Tensor:
            sampler.seed = seed
            return moved(points, numbers)

        low, high = sampler.low[inputs], sampler.high[inputs]
        limits = (low, high) if bool((low.isfinite() | high.isfinite()).any()) else None
        fn: Any = moved if sampler.function.seed_position is None else seeded
        layer = BlackBox(fn, len(inputs), policy=_SoonCalibrated(), limits=limits, full_precision=False, seed=0)
        found = []
        for step in range(self.steps):
            rows, gy = self.rows, self.gy
            if step < self.steps - SETTINGS.counted:
                rows = self.facts.choose(len(rows), self.generator)
                gy = torch.randn(gy.shape, dtype=gy.dtype, generator=self.generator)
            x = sampler.x[rows][:, inputs].to(sampler.dtype).requires_grad_()
            with warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore")
                try:
                    found.append(torch.autograd.grad(layer(x, rows), x, gy.to(x.dtype))[0].double())
                except BoxError as error:
                    if isinstance(error.__cause__, BudgetExceeded):
                        raise error.__cause__ from None
                    raise MeasurementSkipped("the default layer got no gradient") from error
        return torch.stack(found[-SETTINGS.counted :])
