"""All inputs moved at once: BONDS."""

import torch
from torch import Tensor

from bondgrad.errors import positive_int
from bondgrad.estimators._estimator import Estimator, Evaluate, Site, change, chunks, clamped, difference, span
from bondgrad.structure._groups import Groups


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
        c = x.new_empty(batch, self.n, 1 if site.groups is None else d)
        s = x.new_empty(batch, self.n, d)
        for rows, part in chunks(batch, self.n, 2, max_rows, site.whole):
            here = x[rows].unsqueeze(1)  # [b, 1, d]
            delta = site.delta[part, rows].transpose(0, 1)  # [b, j, d]
            ends = tuple(clamped(end, site.low, site.high) for end in (here + delta, here - delta))
            y, ok = evaluate(torch.stack(ends, 2), rows)  # [b, j, 2, d_out], [b, j, 2]
            heard = None if ok is None else ok.unsqueeze(2)  # [b, j, 1, 2]
            base, gy = site.y[rows], site.gy[rows]
            if site.groups is None:
                c[rows, part, 0] = change(y, ok, base, gy).to(c.dtype)
            elif ok is None:
                c[rows, part] = site.groups.total(difference(y, None, base).mul_(gy.unsqueeze(1))).to(c.dtype)
            else:
                sides, heard = _by_input(y, base, gy, site.groups)
                c[rows, part] = (sides[..., 0] - sides[..., 1]).to(c.dtype)
            s[rows, part] = span(ends, heard, here)
        if self.n == 1:
            return c[:, 0] / s[:, 0]
        lost = ~torch.isfinite(c)  # a direction of which nothing is known
        c, s = c.masked_fill(lost, 0), s.masked_fill(lost, 0)
        weight = s / s.abs().amax(1, keepdim=True)  # relative to the largest, lest the squares underflow
        return (c * weight).sum(1) / (s * weight).sum(1)


def _by_input(y: Tensor, base: Tensor, gy: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """The change of the loss on either side that the outputs of each input tell of, where some outputs failed.

    Args:
        y: [b, j, 2, d_out] the box at both ends of j moves.
        base: [b, d_out] the box at x.
        gy: [b, d_out].
        groups: Which outputs depend on which inputs.

    Returns:
        [b, j, d, 2] the changes, zero where an output failed, and whether none did.
    """
    known = torch.isfinite(base)[:, None, None]
    finite = torch.isfinite(y)
    finite &= known | finite.all(2, keepdim=True)  # one end alone needs something to be compared with
    moved = torch.where(finite, y - torch.where(known, base[:, None, None], 0), 0) * gy[:, None, None]
    heard = groups.total((~finite).to(y.dtype)) == 0  # [b, j, 2, d]
    sides = torch.where(heard, groups.total(moved), 0)
    return sides.transpose(2, 3), heard.transpose(2, 3)
