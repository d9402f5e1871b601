"""How much every input matters."""

from dataclasses import dataclass

import torch

from bondgrad.measuring._sampler import Sampler
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import sentences

ROWS = 4  # at which every input is moved, if the budget allows
VISIBLE = 0.1  # of the spread: where less cannot be told from noise, no input is called dead


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
    count = sampler.affordable_count(ROWS, 2 * d)
    rows, inputs = facts.choose(count, generator).repeat_interleave(d), torch.arange(d).repeat(count)
    spread = sampler.spread[inputs, None]
    ends = sampler.either_side(rows, inputs, spread / 2)[0].squeeze(1)  # [rows * d, 2]
    change = sampler.ask_moved(rows, inputs, ends).diff(dim=1).abs().view(count, d, -1)
    part = (ends.diff(dim=1) / spread).clamp_min(1e-300).view(count, d, 1)  # what limits leave of the spread
    own = (change.square() - 2 * facts.noise.square()) / (facts.output_spread * part).square()  # without that of noise
    by_input = own.nanmean((0, 2)).nan_to_num(0).clamp_min(0).sqrt()
    certain = facts.certain(1)
    still = ~(change > certain).any(2).any(0) & torch.isfinite(change).all(2).any(0)
    visible = bool((certain < VISIBLE * facts.output_spread).all())
    return Sensitivity(by_input.tolist(), dead_inputs(facts, still.nonzero().squeeze(1).tolist()) if visible else None)


def dead_inputs(facts: Facts, still: list[int]) -> list[int] | None:
    """Those of the inputs that no other finding calls alive. None: outputs are coarse, and may react elsewhere."""
    ranges, rounding, smoothness = facts.found.ranges, facts.found.rounding, facts.found.smoothness
    jumps = smoothness is not None and smoothness.kind == "jumps"
    coarse = jumps or (rounding is not None and rounding.quantised) or (ranges is not None and ranges.saturated)
    idle = still if facts.found.dependence is None else facts.found.dependence.idle
    moving = [] if ranges is None else ranges.moving
    return None if still and coarse else [i for i in still if i in idle and i not in moving]
