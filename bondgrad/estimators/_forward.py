"""Forward differences: half the cost of central ones, and a larger error."""

import torch
from torch import Tensor

from bondgrad.estimators._differences import column_vjp
from bondgrad.estimators._estimator import Estimator, Evaluate, Site


class Forward(Estimator):
    """Moves one input at a time, to one side, and compares with the output of the forward pass.

        g_i = gy · (Y(x + Δ_i e_i) - Y(x)) / (x⁺_i - x_i)

    A gradient costs half of `Central`'s evaluations, but the error falls only in proportion to the step.

    Args:
        normalize_rows: Scale every row of g to norm 1.
    """

    order = 1
    shared_base = True

    def evaluations(self, groups: int) -> int:
        """See `Estimator.evaluations`."""
        return groups

    def vjp(self, site: Site, evaluate: Evaluate, max_rows: int) -> Tensor:
        """See `Estimator.vjp`."""
        if site.low is not None and site.high is not None:
            # A step that would leave the limits goes to the side with more room.
            up, down = site.high - site.x, site.x - site.low  # [B, d] each
            blocked = torch.where(site.delta > 0, up, down) < site.delta.abs()
            site = site._replace(delta=torch.where(blocked, torch.copysign(site.delta, up - down), site.delta))
        return column_vjp(site, evaluate, max_rows, signs=(1,))
