"""Central differences: BOND."""

from torch import Tensor

from bondgrad.estimators._differences import column_vjp
from bondgrad.estimators._estimator import Estimator, Evaluate, Site


class Central(Estimator):
    """Moves one input at a time, to both sides.

        g_i = gy · (Y(x + Δ_i e_i) - Y(x - Δ_i e_i)) / (x⁺_i - x⁻_i)

    The error falls with the square of the step. A gradient costs two evaluations per input and row. With
    `policies.Bond` this is BOND, Algorithm 1 of the paper.

    Args:
        normalize_rows: Scale every row of g to norm 1.
    """

    def evaluations(self, groups: int) -> int:
        """See `Estimator.evaluations`."""
        return 2 * groups

    def vjp(self, site: Site, evaluate: Evaluate, max_rows: int) -> Tensor:
        """See `Estimator.vjp`."""
        return column_vjp(site, evaluate, max_rows, signs=(1, -1))
