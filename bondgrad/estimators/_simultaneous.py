"""All inputs moved at once: BONDS."""

import torch
from torch import Tensor

from bondgrad._arguments import positive_int
from bondgrad.estimators._estimator import Estimator, Evaluate, Site, change, chunks, clamped, difference, span


class Simultaneous(Estimator):
    """Moves all inputs of a row at once, to both sides, along `n` random directions.

    With c_k = gy · (Y(x⁺_k) - Y(x⁻_k)) and s_k = x⁺_k - x⁻_k for direction k,

        g_i = Σ_k c_k s_ki / Σ_k s_ki²

    For n = 1 this is c / s_i, the paper's BONDS. For more it is the mean of the n estimates c_k / s_ki, each weighted
    by s_ki², which is how well its step stands out of the noise; the plain mean would be ruled by the smallest steps.
    The error falls with 1/sqrt(n). Costs 2n evaluations per row, whatever the number of inputs.

    Where the structure of the box is known, c_k becomes c_ki: of the outputs only those count that depend on input i.
    The others bring nothing but noise to its estimate.

    Args:
        n: Directions per row.
        normalize_rows: Scale every row of g to norm 1.
    """

    together = True

    def __init__(self, n: int = 1, normalize_rows: bool = False) -> None:
        super().__init__(normalize_rows)
        self.n = self.draws = positive_int("n", n)

    def __repr__(self) -> str:
        return f"Simultaneous(n={self.n}, normalize_rows={self.normalize_rows})"

    def evaluations(self, groups: int) -> int:
        """See `Estimator.evaluations`."""
        return 2 * self.n

    def vjp(self, site: Site, evaluate: Evaluate, max_rows: int) -> Tensor:
        """See `Estimator.vjp`."""
        x = site.x
        batch, d = x.shape
        alone = None if site.groups is None else site.groups.part(slice(0, 1), x.device)
        c = x.new_empty(batch, self.n, 1 if alone is None else d)
        s = x.new_empty(batch, self.n, d)
        for rows, part in chunks(batch, self.n, 2, max_rows, site.whole):
            here = x[rows].unsqueeze(1)  # [b, 1, d]
            delta = site.delta[part, rows].transpose(0, 1)  # [b, j, d]
            ends = tuple(clamped(end, site.low, site.high) for end in (here + delta, here - delta))
            y, ok = evaluate(torch.stack(ends, 2), rows)  # [b, j, 2, d_out], [b, j, 2]
            base, gy = site.y[rows], site.gy[rows]
            if alone is None:
                c[rows, part, 0] = change(y, ok, base, gy)
            else:
                moved = difference(y, None if ok is None else ok.unsqueeze(3), base).mul_(gy.unsqueeze(1))
                c[rows, part] = alone.total(moved.flatten(0, 1).unsqueeze(1)).view(moved.shape[0], -1, d)
            s[rows, part] = span(ends, None if ok is None else ok.unsqueeze(2), here)
        if self.n == 1:
            return c[:, 0] / s[:, 0]
        lost = ~torch.isfinite(c)  # a direction of which nothing is known
        c, s = c.masked_fill(lost, 0), s.masked_fill(lost, 0)
        weight = s / s.abs().amax(1, keepdim=True)  # relative to the largest, lest the squares underflow
        return (c * weight).sum(1) / (s * weight).sum(1)
