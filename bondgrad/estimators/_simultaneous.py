"""All inputs moved at once: BONDS."""

import torch
from torch import Tensor

from bondgrad.errors import positive_int
from bondgrad.estimators._differences import chunks, input_difference, loss_change, output_difference
from bondgrad.estimators._estimator import Estimator, Evaluate, Site, within_limits
from bondgrad.structure._groups import Groups


class Simultaneous(Estimator):
    """Moves all inputs of a row at once, to both sides, along `n` random directions.

    With c_k = gy · (Y(x⁺_k) - Y(x⁻_k)) and s_k = x⁺_k - x⁻_k for direction k,

        g_i = Σ_k c_k s_ki / Σ_k s_ki²

    For n = 1 this is c / s_i, the paper's BONDS. For larger n it is the mean of the n estimates c_k / s_ki, each with
    the weight s_ki², since the noise of an estimate falls with its step; in a plain mean the smallest steps would
    dominate. The error falls with 1/sqrt(n). A gradient costs 2n evaluations per row, whatever the number of inputs.

    Where the structure of the box is known, c_k becomes c_ki, which sums only over the outputs that depend on input i:
    all others would add nothing but noise to its estimate.

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
        x = site.x  # [B, d]
        batch, d = x.shape
        c = x.new_empty(batch, self.n, 1 if site.groups is None else d)
        s = x.new_empty(batch, self.n, d)
        for rows, part in chunks(batch, self.n, 2, max_rows, site.whole):
            here = x[rows].unsqueeze(1)  # [b, 1, d]
            delta = site.delta[part, rows].transpose(0, 1)  # [b, j, d]
            ends = [within_limits(end, site.low, site.high, site.grid) for end in (here + delta, here - delta)]
            y, ok = evaluate(torch.stack(ends, 2), rows)  # [b, j, 2, d_out], [b, j, 2]
            answered = None if ok is None else ok.unsqueeze(2)  # [b, j, 1, 2]
            base, gy = site.y[rows], site.gy[rows]
            if site.groups is None:
                change = loss_change(y, ok, base, gy).unsqueeze(2)  # [b, j, 1]
            elif ok is None:
                change = site.groups.sum_by_input(output_difference(y, None, base).mul_(gy.unsqueeze(1)))  # [b, j, d]
            else:
                change, answered = _change_by_input(y, base, gy, site.groups)
            c[rows, part] = change
            s[rows, part] = input_difference(ends, answered, here)
        if self.n == 1:
            return c[:, 0] / s[:, 0]
        failed = ~torch.isfinite(c)
        c, s = (values.masked_fill(failed, 0) for values in (c, s))
        weight = s / s.abs().amax(1, keepdim=True)  # relative to the largest, so that squares do not underflow
        return (c * weight).sum(1) / (s * weight).sum(1)


def _change_by_input(y: Tensor, base: Tensor, gy: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """The change of the loss in the outputs that depend on each input, where some evaluations failed.

    Args:
        y: [b, j, 2, d_out] the outputs at both ends of j moves.
        base: [b, d_out] the outputs at the rows themselves.
        gy: [b, d_out] the gradient of the loss.
        groups: Which outputs depend on which inputs.

    Returns:
        The changes [b, j, d], where an end of which an output failed counts as not moved; and [b, j, d, 2] which ends
        count as moved.
    """
    known = torch.isfinite(base)[:, None, None]  # [b, 1, 1, d_out]
    finite = torch.isfinite(y)
    finite &= known | finite.all(2, keepdim=True)  # one end alone needs the row itself to be compared with
    products = torch.where(finite, y - torch.where(known, base[:, None, None], 0), 0) * gy[:, None, None]
    answered = groups.sum_by_input((~finite).to(y.dtype)) == 0  # [b, j, 2, d]
    above, below = torch.where(answered, groups.sum_by_input(products), 0).unbind(2)  # [b, j, d] each
    return above - below, answered.transpose(2, 3)
