"""How much every input matters."""

from dataclasses import dataclass, replace

import torch

from bondgrad.measuring._sampler import Sampler
from bondgrad.probing._facts import Facts, Findings
from bondgrad.probing._number_format import sentences


@dataclass(frozen=True)
class SensitivitySettings:
    """Where inputs are moved, and what is concluded from that."""

    rows: int = 4  # at which every input is moved, if the budget allows
    share: float = 0.4  # of the evaluations left: ranges and structure come after it
    visible: float = 0.1  # of the spread: where less cannot be told from noise, no input is called dead


SETTINGS = SensitivitySettings()


@dataclass(frozen=True)
class Sensitivity:
    """What moving an input by its spread does to the outputs."""

    change: list[float]  # by input: change of the outputs over their spread, root mean square
    dead: list[int] | None  # inputs that nothing reacts to. None: too noisy, or too coarse, to tell

    @property
    def words(self) -> str:
        """What a person wants to know."""
        order = sorted(range(len(self.change)), key=lambda i: -self.change[i])
        strongest = ", ".join(f"{i} ({self.change[i]:.2g})" for i in order[:3])
        least = f"; least: {order[-1]} ({self.change[order[-1]]:.2g})" if len(order) > 3 else ""
        dead = self.dead or []
        names = ", ".join(map(str, dead[:12])) + ", ..." * (len(dead) > 12)
        return sentences(
            f"Moved by their spread, these change the outputs most (in spreads of theirs): {strongest}{least}.",
            self.dead is None and "Too noisy or too coarse to say whether any is dead.",
            bool(dead) and f"Dead: input{'s' * (len(dead) > 1)} {names}.",
        )


def measure_sensitivity(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Sensitivity:
    """Move every input by its spread, at a few rows."""
    d = sampler.x.shape[1]
    count = sampler.affordable_count(SETTINGS.rows, 2 * d, SETTINGS.share)
    rows, inputs = facts.choose(count, generator).repeat_interleave(d), torch.arange(d).repeat(count)
    spread = sampler.spread[inputs, None]
    ends = sampler.either_side(rows, inputs, spread / 2)[0].squeeze(1)  # [rows * d, 2]
    change = sampler.ask_moved(rows, inputs, ends).diff(dim=1).abs().view(count, d, -1)
    part = (ends.diff(dim=1) / spread).clamp_min(1e-300).view(count, d, 1)  # what limits leave of the spread
    certain = facts.certain(1)
    dead = ~(change > certain).any(2).any(0) & torch.isfinite(change).all(2).any(0)
    visible = bool((certain < SETTINGS.visible * facts.output_spread).all())
    own = (change.square() - 2 * facts.noise.square()) / (facts.output_spread * part).square()  # without that of noise
    by_input = own.nanmean((0, 2)).nan_to_num(0).clamp_min(0).sqrt()
    return Sensitivity(by_input.tolist(), dead.nonzero().squeeze(1).tolist() if visible else None)


def confirm_dead(found: Findings) -> Sensitivity | None:
    """Call inputs dead only if no other finding contradicts it: coarse outputs may react elsewhere."""
    sensitivity, ranges, smoothness, rounding = found.sensitivity, found.ranges, found.smoothness, found.rounding
    if sensitivity is None or not sensitivity.dead:
        return sensitivity
    jumps = smoothness is not None and smoothness.kind == "jumps"
    coarse = jumps or (rounding is not None and rounding.quantised) or (ranges is not None and ranges.saturated)
    idle = sensitivity.dead if found.dependence is None else found.dependence.idle
    moving = [] if ranges is None else ranges.moving
    dead = [i for i in sensitivity.dead if i in idle and i not in moving]
    return replace(sensitivity, dead=None if coarse else dead)
