"""The step that balances truncation and noise, where both are known."""

import math

from bondgrad.errors import positive_float
from bondgrad.policies._policy import Batch, Policy, State, Steps, constant_steps


class Optimal(Policy):
    """Moves every input by the step that minimises the error bound of a central difference, with a random sign.

    With output noise of half-width b and a third derivative bounded by L, the error is at most L h²/6 + b/h, least at
    h = (3 b / L)^(1/3).

    Args:
        noise: Half-width b of the noise on the outputs, > 0.
        third_derivative: Bound L on the third derivative, > 0.
    """

    def __init__(self, noise: float, third_derivative: float) -> None:
        self.noise = positive_float("noise", noise)
        self.third_derivative = positive_float("third_derivative", third_derivative)

    def steps(self, state: State, batch: Batch, n: int, noise: float) -> Steps:
        """See `Policy.steps`."""
        return constant_steps(math.cbrt(3 * self.noise / self.third_derivative), batch, n)
