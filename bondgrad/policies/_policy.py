"""What every policy answers: how far is each input moved?"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

State = dict[str, Tensor]


class Steps(NamedTuple):
    """The perturbations of one training step, and the bounds they were drawn from."""

    size: Tensor  # [n, B, d] >= 0; n draws for each of B rows and d inputs
    sign: Tensor  # [n, B, d] of which only the sign counts
    lower: Tensor  # [d], or one for all: the bounds of the size
    upper: Tensor  # [d]


class Policy(ABC):
    """Decides the size of every perturbation.

    A policy never keeps state of its own: `init` makes it, `observe` returns a new one, and `BlackBox` holds it in
    buffers, so that it is saved, moved and copied with the model. Only sizes are decided here. Limits, and the rule
    that a step is never lost in the rounding of x, are applied to every policy alike by `BlackBox`.
    """

    def init(self, in_features: int) -> State:
        """State before the first step: float32 tensors of fixed shape. Empty for a policy without memory."""
        return {}

    @abstractmethod
    def steps(self, state: State, x: Tensor, n: int, noise: float, generator: torch.Generator) -> Steps:
        """Draw `n` perturbations for every entry of x.

        Args:
            state: What `init` or the last `observe` returned.
            x: [B, d] the rows to be moved.
            n: Draws per entry.
            noise: Half-width b of the noise on the box's outputs.
            generator: The only source of random numbers.
        """

    def observe(self, state: State, g: Tensor, steps: Steps) -> State:
        """Learn from the gradient g [B, d] that the steps gave. Returns the new state."""
        return state


def constant_steps(size: float, x: Tensor, n: int, generator: torch.Generator) -> Steps:
    """One size for every entry, with a random sign."""
    sizes = x.new_full((x.shape[1],), size)  # [d]
    return Steps(sizes.expand(n, *x.shape), symmetric(x, n, generator), sizes, sizes)


def symmetric(x: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Uniform draws from [-1, 1), [n, B, d]: a sign and a fraction in one random number."""
    return torch.empty((n, *x.shape), dtype=x.dtype, device=x.device).uniform_(-1, 1, generator=generator)
