"""The noise of a box, from answers that would be equal without it."""

import math

from torch import Tensor


def noise_from_repeats(answers: Tensor, dim: int, order: int, over: tuple[int, ...]) -> Tensor:
    """Standard deviation of answers, from their differences of some order along one dimension.

    Differences of order k have binomial(2k, k) times the variance of the answers, and a drift that is a polynomial of
    degree k - 1 in the order of asking is gone from them: von Neumann's estimator for k = 1, and that of ECNoise for
    higher ones, where the answers are those at equally spaced points of a smooth function.

    Args:
        answers: [...] NaN where there is none.
        dim: Along which the same question was asked again and again, or points are equally spaced.
        order: k, at least 1.
        over: Dimensions over which squares are averaged.

    Returns:
        The standard deviation, without the dimensions in `over`; zero where there were no differences.

    References:
        J. von Neumann et al., "The mean square successive difference", Annals of Mathematical Statistics, 1941.
        J. Moré and S. Wild, "Estimating computational noise", SIAM Journal on Scientific Computing, 2011.
    """
    square = answers.diff(order, dim=dim).square().nanmean(over).nan_to_num(0, 0, 0)
    return (square / math.comb(2 * order, order)).sqrt()
