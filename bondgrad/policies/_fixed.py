"""The same step for all inputs, chosen by the user."""

from bondgrad.errors import positive_float
from bondgrad.policies._policy import Batch, Policy, State, Steps, constant_steps


class Fixed(Policy):
    """Moves every input by the same distance, with a random sign.

    Args:
        step: The distance, > 0.
    """

    def __init__(self, step: float) -> None:
        self.step = positive_float("step", step)

    def steps(self, state: State, batch: Batch, n: int, noise: float) -> Steps:
        """See `Policy.steps`."""
        return constant_steps(self.step, batch, n)
