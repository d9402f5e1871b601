"""The noise of a box, from repeated outputs that would be equal without it."""

import math

from torch import Tensor


def noise_from_repeats(answers: Tensor, dim: int, order: int, over: tuple[int, ...]) -> Tensor:
    """Standard deviation of the noise in answers, from their differences of some order along one dimension.

    Differences of order k have binomial(2k, k) times the variance of the noise, and a drift that is a polynomial of
    degree k - 1 along the dimension cancels in them. This is von Neumann's estimator for k = 1, and that of ECNoise for
    higher orders, where the answers are outputs of a smooth function at equally spaced points.

    Args:
        answers: [...] outputs; NaN where there is none.
        dim: The dimension of repeated evaluations, or of equally spaced points.
        order: The order k of the differences, at least 1.
        over: Dimensions over which squares are averaged.

    Returns:
        The standard deviation, without the dimensions in `over`; zero where there were no differences.

    References:
        J. von Neumann et al., "The mean square successive difference", Annals of Mathematical Statistics, 1941.
        J. Moré and S. Wild, "Estimating computational noise", SIAM Journal on Scientific Computing, 2011.
    """
    square = answers.diff(order, dim=dim).square().nanmean(over).nan_to_num(0, 0, 0)
    return (square / math.comb(2 * order, order)).sqrt()
