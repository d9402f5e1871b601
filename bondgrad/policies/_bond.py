"""The policy of the paper: bounds of the step from running moments of the gradient at the inputs of the box."""

import functools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from bondgrad.errors import positive_float
from bondgrad.measuring._step_trial import Differences
from bondgrad.policies._policy import Batch, Observation, Policy, State, Steps
from bondgrad.torch_support import _device as device

Bounds = Literal["bond", "sqrt6", "error-terms", "adam", "max-v"]
Reduce = Literal["sum", "mean", "mean-abs"]

LEAST_STEP = 0.01  # the shortest step, in units of the longest, cbrt(3 b) times the root mean square of the input
LARGEST_SQUARE = 1e34  # of a gradient that enters the moments: the sum of a thousand must not overflow


class Bond(Policy):
    """Draws |Δ| uniformly between a lower and an upper bound, with a random sign.

    With m̂ and v̂ the bias-corrected moments (as in Adam, one value per input) of the gradient at the box's inputs, and
    b the half-width of the noise:

        lower = b / min_j |m̂_j|        upper_i = max_j |m̂_j| · sqrt(|m̂_i| / v̂_i)

    An input with no gradient seen yet (all of them at the first step) draws z ~ N(0, sqrt(b)) and moves by
    sign(z)·max(|z|, b).

    The formulas are made safe for any box. Where lower > upper, which is common with many inputs, the draw is between
    the two as well. A step is clamped between a hundredth and the whole of cbrt(3 b) times the root mean square of its
    input over the batch, which is the step of `Optimal` for a box whose third derivative is 1 in units of its inputs. A
    gradient that is zero or not finite never enters the moments.

    Args:
        bounds: Which formulas. "bond": the above. "sqrt6": upper_i times sqrt(6), lower_i = b / |m̂_i|. "max-v": v̂_i
            replaced by its maximum. "adam": upper_i = eta·|m̂_i| / sqrt(v̂_i). "error-terms": the derivation before it
            was simplified, with the simple bounds where it has no solution.
        reduce: How the gradients of the rows become one per input.
        betas: Decay per step of the two moments.
        eta: The learning rate in the "adam" bound.
        max_step: Largest step, instead of the range above. `math.inf`: the formulas without any clamping.

    Reference: the paper's Algorithms 1-3 and the appendix on bounds.
    """

    def __init__(
        self,
        bounds: Bounds = "bond",
        reduce: Reduce = "mean-abs",
        betas: tuple[float, float] = (0.9, 0.999),
        eta: float = 1e-3,
        max_step: float | None = None,
    ) -> None:
        for name, value, known in (("bounds", bounds, get_args(Bounds)), ("reduce", reduce, get_args(Reduce))):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        if not isinstance(betas, Sequence) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
        self.bounds, self.reduce = bounds, reduce
        self.betas = (float(betas[0]), float(betas[1]))
        self.eta = positive_float("eta", eta)
        self.max_step = max_step if max_step in (None, math.inf) else positive_float("max_step", max_step)

    def init(self, in_features: int) -> State:
        """See `Policy.init`."""
        # [0]: sums of g and of g² over the steps so far, discounted by `betas`. [1]: sums of ones, discounted likewise.
        # Their quotients are the bias-corrected moments of Adam. Zero: no gradient was seen yet.
        state = {"sums": torch.zeros(2, 2, in_features, dtype=torch.float32)}
        if self.bounds == "error-terms":
            # The last gradient, and the root mean square of the last steps.
            state["last"] = torch.zeros(2, in_features, dtype=torch.float32)
        return state

    def measure(self, x: Tensor) -> Tensor:
        """See `Policy.measure`: sums of squares [d], for `_clamped`."""
        return x.square().sum(0)

    def steps(self, state: State, batch: Batch, n: int, noise: float) -> Steps:
        """See `Policy.steps`."""
        x = batch.x
        sums, weights = state["sums"].to(x.dtype).unbind()
        m, v = (sums / weights).unbind()  # [d] each; NaN where no gradient was seen
        magnitude = m.abs()
        smallest, largest = magnitude.aminmax()
        seen = None
        if not device.reading_is_free(x.device) or not float(smallest) > 0:
            seen = magnitude > 0  # False also where the sum of the gradients is zero
            smallest = torch.where(seen, magnitude, math.inf).amin()
            largest = torch.where(seen, magnitude, 0).amax()
        lower, upper = self._bounds(magnitude, v, smallest, largest, noise)
        if "last" in state:
            g, step = state["last"].to(x.dtype)
            low, high = self.error_terms(m, v, g, step, noise)
            lower = torch.where(torch.isfinite(low), low, lower)
            upper = torch.where(torch.isfinite(high), high, upper)
        u = batch.uniform(n)
        fraction = u.abs()
        size = torch.lerp(lower, upper, fraction)  # either bound may be the larger
        if seen is not None:
            # |z| of a normal draw, from the same random number, which is kept below 1 since erfinv(1) is infinite.
            z = torch.erfinv(fraction * (1 - torch.finfo(x.dtype).eps)) * math.sqrt(2 * noise)
            size = torch.where(seen, size, z.clamp(min=noise))
        return Steps(self._clamped(size, batch, noise), u, lower, upper)

    def _clamped(self, size: Tensor, batch: Batch, noise: float) -> Tensor:
        """The sizes, clamped to a range relative to the root mean square of each input, or to `max_step`."""
        if self.max_step is not None:
            return size.clamp(max=self.max_step)
        first = math.sqrt(noise)  # the scale of the first step, for inputs that are all zero or not all finite
        norm = torch.linalg.vector_norm(batch.x, dim=0) if batch.sums is None else batch.sums.sqrt()  # [d]
        best = norm.mul_(math.cbrt(3 * noise) / math.sqrt(batch.rows))
        if not _all_positive_and_below(best, math.inf):
            best = best.nan_to_num_(first, first)
            best = torch.where(best > 0, best, first)
        return torch.clamp(size, best * LEAST_STEP, best)

    def _bounds(self, m: Tensor, v: Tensor, smallest: Tensor, largest: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        """The simple lower and upper bound, [d] or one for all; not valid for inputs without a gradient so far.

        Args:
            m: [d] magnitude of the first moment.
            v: [d] second moment.
            smallest: The smallest m of the inputs with a gradient.
            largest: The largest m of these.
            noise: Half-width b of the noise.
        """
        lower = smallest.reciprocal().mul_(noise)
        if self.bounds == "adam":
            return lower, self.eta * m / v.sqrt()
        if self.bounds == "max-v":
            v = v.nan_to_num(0).amax()
        upper = (m / v).sqrt_().mul_(largest)
        return (noise / m, math.sqrt(6) * upper) if self.bounds == "sqrt6" else (lower, upper)

    def error_terms(self, m: Tensor, v: Tensor, g: Tensor, step: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        """Lower and upper bound [d] with all error terms of the derivation; not finite where they have no solution.

        Args:
            m: [d] first moment.
            v: [d] second moment, for the third derivative.
            g: [d] the last gradient.
            step: [d] the root mean square of the last steps.
            noise: Half-width b of the noise.
        """
        error = v / 6 * step.square() + noise / step + (m - g).abs()
        crossing = (6 * noise / v).pow(1 / 3)  # the step at which truncation and noise are equal
        below = g.abs() - error - v / 6 * crossing.square()
        above = g.abs() - error - noise / crossing
        return noise / below.clamp_min(0), (6 / v * above).sqrt()

    def summarize(self, state: State, seen: Observation) -> Tensor:
        """See `Policy.summarize`: sums of gradients [d]; for "error-terms" [2, d], with sums of squared steps."""
        total = torch.linalg.vector_norm(seen.g, 1, dim=0) if self.reduce == "mean-abs" else seen.g.sum(0)
        if self.bounds != "error-terms":
            return total
        return torch.stack((total, seen.steps.size.square().mean(0).sum(0)))

    def observe(self, state: State, summary: Tensor, rows: int, differences: Differences) -> State:
        """See `Policy.observe`."""
        total = summary[0] if "last" in state else summary
        reduced = (total if self.reduce == "sum" else total / rows).float()
        square = reduced.square()
        decay, one = _constants(self.betas, reduced.shape[0], reduced.device)
        new = {"sums": torch.addcmul(torch.stack((reduced, square, one, one)).view(2, 2, -1), state["sums"], decay)}
        if "last" not in state and _all_positive_and_below(square, LARGEST_SQUARE):
            return new
        valid = (square > 0) & (square < LARGEST_SQUARE)  # false for NaN
        if "last" in state:
            new["last"] = torch.stack((reduced, (summary[1] / rows).sqrt().float()))
            valid &= torch.isfinite(new["last"][1])
        return {name: torch.where(valid, value, state[name]) for name, value in new.items()}


def _all_positive_and_below(values: Tensor, limit: float) -> bool:
    """Whether all values are above zero and below the limit; False on a device that would have to be waited for."""
    if not device.reading_is_free(values.device):
        return False
    least, most = map(float, values.aminmax())
    return least > 0 and most < limit  # False for NaN


@functools.cache
def _constants(betas: tuple[float, float], in_features: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The decays of the sums [2, 1] and ones [d], cached."""
    decay = torch.tensor(betas, dtype=torch.float32, device=device).unsqueeze(1)
    return decay, torch.ones(in_features, dtype=torch.float32, device=device)
