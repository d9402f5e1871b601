"""Trying the box out, at some rows of a training step."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bondgrad.errors import BoxError
from bondgrad.policies import Batch, Calibrated, First, Steps, Trial
from bondgrad.policies._trial import spread_of
from bondgrad.step._health import Vitals, examine
from bondgrad.step._neighbourhood import Asking, moves
from bondgrad.step._trace import Step
from bondgrad.structure import Structure

if TYPE_CHECKING:
    from bondgrad.box import BlackBox

FIRST_ROWS, ROWS = 8, 16
FOURTH = 4  # of the batch at most, or else trials cost more than training
MEASURING = 0.01  # of the evaluations of training, for noise="auto"
RANDOM = 8  # times as rough as random noise makes them may differences seem, before something else is suspected
CHANGED = 1.25  # factor of the measured noise that is worth a change; a captured step has to be captured anew then


class Tries:
    """The box at some rows of a batch.

    Args:
        asking: The box near the whole batch.
        structure: Which inputs move together.
        gy: [B, W_out] the loss's gradient at its outputs.
        batch: The rows of all time steps.
    """

    def __init__(self, asking: Asking, structure: Structure, gy: Tensor, batch: Batch) -> None:
        self.asking, self.structure, self.gy = asking, structure, gy
        # Where the loss has no gradient nothing can be learnt; so it is with all but the last step of a sequence.
        self.live = (torch.isfinite(gy).all(1) & (gy != 0).any(1)).nonzero().squeeze(1)
        self.heard = False  # whether the box gave any answer when a first step was looked for
        self.spread, self.deviation = spread_of(batch.x, batch.sums, batch.rows)  # [d] each
        if asking.low is not None and asking.high is not None:
            room = (asking.high - asking.low)[: len(self.spread)] / 4  # where a step can be doubled, in most places
            self.spread = torch.minimum(self.spread, room)

    def first(self) -> First:
        """For a policy that knows nothing yet."""
        part = _Part(self, FIRST_ROWS)
        shape = (self.asking.layer.estimator.draws, *part.rows.shape)
        # Any directions will do, if only they are the same at every step.
        generator = torch.Generator("cpu").manual_seed(0)
        sign = torch.empty(shape, device="cpu").uniform_(-1, 1, generator=generator).to(part.rows)

        def slopes(h: Tensor) -> Tensor:
            measured = part.slopes(h.expand(shape), sign)[0]
            self.heard |= bool(torch.isfinite(measured).any())
            return measured

        return First(self.spread, self.deviation, part.noise(), slopes)

    def trial(self, steps: Steps, slopes: Tensor | None = None) -> Trial:
        """Some rows with these steps, with half and with twice as long ones; `slopes` [B, W], if they are known."""
        part = _Part(self, ROWS)
        size, sign = part.of(steps.size), part.of(steps.sign)  # [n, r, d]
        half, sound = part.slopes(size / 2, sign)
        twice, also = part.slopes(size * 2, sign)
        once = part.slopes(size, sign)[0] if slopes is None else part.scaled(slopes[part.which] / part.size)
        step = size[0] if len(size) == 1 else size.square().mean(0).sqrt()
        return Trial(
            self.spread, step, torch.stack((half, once, twice)), sound & also, part.asking.again() - part.asking.y
        )

    def scout(self, batch: Batch) -> Trial:
        """Before anything is known of the box: with steps at which it answers sensibly."""
        policy = Calibrated()
        state = policy.start(policy.init(len(self.spread)), self.first())
        state = {name: value.to(batch.x.device) for name, value in state.items()}
        generator = torch.Generator(batch.x.device).manual_seed(0)
        steps = policy.steps(state, batch._replace(generator=generator), self.asking.layer.estimator.draws, 0.0)
        return self.trial(steps)


class _Part:
    """Some rows, evenly spaced; all, if they belong together."""

    def __init__(self, tries: Tries, wanted: int) -> None:
        whole = tries.asking
        (batch, width), d = whole.x.shape, len(tries.spread)
        live = torch.arange(batch, device=whole.x.device) if whole.whole else tries.live
        count = batch if whole.whole else min(len(live), max(1, min(wanted * d // width, batch // FOURTH)))
        self.which = live[torch.arange(count, device=live.device) * len(live) // count]
        self.asking, self.structure = whole.part(self.which), tries.structure
        gy = tries.gy[self.which]
        self.size = gy.abs().amax(1, keepdim=True)  # [r, 1], taken out first, lest squares overflow
        self.gy = gy / self.size  # not finite where gy is zero: nothing can be learnt there
        self.rows = self.asking.x.reshape(-1, d)  # [r, d]
        self.norm = self.asking.heard(self.structure, self.gy)

    def of(self, t: Tensor) -> Tensor:
        """Of something about all rows, [n, B·T, d]: [n, r, d]."""
        return t.reshape(len(t), -1, self.asking.x.shape[1])[:, self.which].view(len(t), *self.rows.shape)

    def scaled(self, slopes: Tensor) -> Tensor:
        """From slopes [b, W] for `gy`, those [r, d] for a loss gradient of norm 1."""
        return (slopes / self.norm).reshape(self.rows.shape)

    def noise(self) -> Tensor:
        """h² times the variance of the slopes, from answers to the same questions; zero for noise that cancels."""
        layer = self.asking.layer
        if layer._function.seed_position is not None:
            return self.rows.new_zeros(())
        times = 1 if self.asking.whole else -(-FIRST_ROWS // len(self.which))
        change = torch.stack([self.asking.again() - self.asking.y for _ in range(times)])  # [times, r, W_out]
        weight = self.gy.square().expand_as(change)
        known = torch.isfinite(change) & torch.isfinite(weight)
        variance = torch.where(known, change.square() * weight, 0).sum() / torch.where(known, weight, 0).sum() / 2
        estimator = layer.estimator  # one end of a move, over the step; or two, over twice the step
        return (variance * (2 if estimator.shared else 0.5) / estimator.draws).nan_to_num(0, 0, 0)

    def slopes(self, size: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
        """At steps of that size [n, r, d]: [r, d], and which of them had all their evaluations."""
        delta = moves(self.asking.x, size, sign, self.asking.layer.policy.least_ulps)
        slopes, sound = self.asking.tried(self.structure, self.gy, delta)
        return self.scaled(slopes), sound.view(self.rows.shape)


def tries_out(layer: "BlackBox") -> float:
    """The share of the evaluations of training that trials may cost."""
    return max(layer.policy.share, MEASURING if layer.noise == "auto" else 0.0)


def trial_due(layer: "BlackBox") -> bool:
    """Whether something is to be tried out in the next training step."""
    share = tries_out(layer)
    return share > 0 and layer.policy_state.schedule.due(share, early=layer.policy.share > 0)


def half_width(layer: "BlackBox", dtype: torch.dtype) -> float:
    """The noise on the outputs that is reckoned with, for rows of that dtype."""
    if isinstance(layer.noise, float):
        return layer.noise
    rounding = max(torch.finfo(dtype).eps, layer._function.rounding)
    return max(rounding, layer.policy_state.schedule.noise) if layer.noise == "auto" else rounding


def learn(layer: "BlackBox", trial: Trial, y: Tensor, asked: int) -> None:
    """Keep what a trial said of the noise, and what it cost; warn if something is wrong.

    Args:
        layer: The layer.
        trial: What was measured.
        y: [B, d_out] the answers in the forward pass.
        asked: Evaluations spent.
    """
    schedule = layer.policy_state.schedule
    schedule.tried(asked)
    if bool(trial.sound.any()):  # else it did not answer
        vitals = examine(trial, y, layer.estimator)
        layer.health.watch(vitals)
        schedule.noise = _half_width_after(vitals, layer)


def _half_width_after(vitals: Vitals, layer: "BlackBox") -> float:
    """Of the noise on the outputs, once more is known of it."""
    schedule = layer.policy_state.schedule
    # Answers that differ say it best. But noise that both ends of a move have in common does no harm, and answers that
    # are rounded may be all alike.
    random = layer._function.seed_position is None and vitals.noise * RANDOM > vitals.rough
    deviation = vitals.noise if random else vitals.rough
    noise = math.sqrt(3) * deviation  # half-width of a uniform distribution
    if schedule.noise > 0 and noise > 0:
        noise = math.sqrt(noise * schedule.noise)
    if not math.isfinite(noise) or 1 / CHANGED < noise / (schedule.noise or math.inf) < CHANGED:
        return schedule.noise
    return noise


def standard_error(layer: "BlackBox", step: Step) -> Tensor:
    """See `BlackBox.standard_error`."""
    last, state = layer._trace.last, layer.policy_state.read(step.x.device)
    size = None if last is None else last.size.square().mean(0).sqrt().view(step.x.shape)
    if size is not None and layer.limits is not None:  # moves are cut short there
        low, high = layer.limits.like(step.x)
        size = (torch.minimum(step.x + size, high) - torch.maximum(step.x - size, low)) / 2
    error = None if size is None else layer.policy.standard_error(state, size)
    if error is None:
        raise BoxError(f"{layer.policy} does not measure the noise: use policy='calibrated', and ask in a step hook")
    x, gy = step.x.flatten(1), step.gy.flatten(1)  # [B, W] and [B, W_out], of sequences too
    heard = Asking(layer, x, gy, (), ()).heard(layer.structure, gy)
    return (error.flatten(1) * heard).view(step.x.shape)
