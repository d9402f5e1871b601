"""How much every input matters."""

from dataclasses import dataclass

import torch

from bondgrad.probing._asker import Asker, Spent

ROWS = (4, 2, 1)  # as the budget allows
SHARE = 0.4  # of what is left


@dataclass(frozen=True)
class Sensitivity:
    """What moving an input by its spread does to the outputs."""

    change: list[float]  # by input: change of the outputs over their spread, root mean square
    dead: list[int]  # inputs that nothing reacts to, beyond noise and rounding

    @property
    def words(self) -> str:
        """What a person wants to know."""
        order = sorted(range(len(self.change)), key=lambda i: -self.change[i])
        strongest = ", ".join(f"{i} ({self.change[i]:.2g})" for i in order[:3])
        text = f"Moved by its spread, an input changes the outputs by this much of theirs: strongest {strongest}"
        text += f", weakest {order[-1]} ({self.change[order[-1]]:.2g})." if len(order) > 3 else "."
        if self.dead:
            names = ", ".join(map(str, self.dead[:12])) + ", ..." * (len(self.dead) > 12)
            text += f" Dead: input{'s' * (len(self.dead) > 1)} {names}."
        return text


def measure_sensitivity(asker: Asker, generator: torch.Generator) -> Sensitivity:
    """Move every input by its spread, at a few rows."""
    d = asker.x.shape[1]
    allowed = SHARE * asker.affordable()
    count = next((n for n in ROWS if 2 * d * n <= allowed), 0)
    if count == 0:
        raise Spent
    rows = asker.choose(count, generator)
    ends = asker.x[rows][:, None, None].repeat(1, d, 2, 1)  # [rows, d, 2, d]
    half = asker.spread / 2
    ends[:, :, 0].diagonal(0, 1, 2).add_(half)
    ends[:, :, 1].diagonal(0, 1, 2).sub_(half)
    made = asker.realise(ends)
    span = (made[:, :, 0] - made[:, :, 1]).diagonal(0, 1, 2)  # [rows, d] what limits have left of it
    y = asker.ask(made.flatten(0, 2), rows.repeat_interleave(2 * d)).view(count, d, 2, -1)
    change = (y[:, :, 0] - y[:, :, 1]).abs()
    certain = torch.maximum(6 * asker.noise, asker.rounding)
    dead = ~(change > certain).any(2).any(0) & torch.isfinite(change).all(2).any(0)
    scaled = change / asker.output_spread * (asker.spread / span.clamp_min(1e-300))[:, :, None]
    return Sensitivity(
        scaled.square().nanmean((0, 2)).sqrt().nan_to_num(0).tolist(), dead.nonzero().squeeze(1).tolist()
    )
