"""A step the user chooses."""

import torch
from torch import Tensor

from bondgrad._arguments import positive_float
from bondgrad.policies._policy import Policy, State, Steps, constant_steps


class Fixed(Policy):
    """Moves every input by the same distance, with a random sign.

    Args:
        step: The distance, > 0.
    """

    def __init__(self, step: float) -> None:
        self.step = positive_float("step", step)

    def __repr__(self) -> str:
        return f"Fixed({self.step})"

    def steps(self, state: State, x: Tensor, n: int, noise: float, generator: torch.Generator) -> Steps:
        """See `Policy.steps`."""
        return constant_steps(self.step, x, n, generator)
