"""How much every input matters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.probing._asker import Asker, LeftOut

ROWS = (4, 2, 1)  # as the budget allows
SHARE = 0.4  # of what is left
VISIBLE = 0.1  # of the spread: an input that moves outputs less cannot be told from a dead one
NUMBERS = 2**21  # in points that exist at a time


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
        text = f"Moved by their spread, these change the outputs most (in spreads of theirs): {strongest}"
        text += f"; least: {order[-1]} ({self.change[order[-1]]:.2g})." if len(order) > 3 else "."
        if self.dead is None:
            return text + " Too noisy or too coarse to say whether any is dead."
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
        raise LeftOut
    rows = asker.choose(count, generator)
    at_once = max(1, NUMBERS // (2 * count * d))
    parts = [_moved(asker, rows, inputs) for inputs in torch.split(torch.arange(d), at_once)]
    change, span = torch.cat([change for change, _ in parts], 1), torch.cat([span for _, span in parts], 1)
    certain = asker.certain(1)
    dead = ~(change > certain).any(2).any(0) & torch.isfinite(change).all(2).any(0)
    tellable = bool((certain < VISIBLE * asker.output_spread).all())
    own = (change.square() - 2 * asker.noise.square()) / asker.output_spread.square()  # without that of the noise
    own = own * (asker.spread / span.clamp_min(1e-300)).square()[:, :, None]
    by_input = own.nanmean((0, 2)).nan_to_num(0).clamp_min(0).sqrt()
    return Sensitivity(by_input.tolist(), dead.nonzero().squeeze(1).tolist() if tellable else None)


def _moved(asker: Asker, rows: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """[r, n, d_out] how far answers change when each of inputs [n] moves, and [r, n] how far limits let it move."""
    (n,), d = inputs.shape, asker.x.shape[1]
    half = asker.spread[inputs] / 2
    ends = asker.x[rows][:, None, None].repeat(1, n, 2, 1)  # [r, n, 2, d]
    ends[:, torch.arange(n), 0, inputs] += half
    ends[:, torch.arange(n), 1, inputs] -= half
    made = asker.realise(ends)
    span = made[:, torch.arange(n), 0, inputs] - made[:, torch.arange(n), 1, inputs]
    y = asker.ask(made.view(-1, d), rows.repeat_interleave(2 * n)).view(len(rows), n, 2, -1)
    return (y[:, :, 0] - y[:, :, 1]).abs(), span
