"""What every policy answers: how far is each input moved?"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._step_trial import Differences, StartingPoint, StepTrial

State = dict[str, Tensor]


class Batch(NamedTuple):
    """The rows of one step, and the only source of its random numbers.

    Where several processes train one model, the rows are a part of a joint batch. Every process then draws the numbers
    of all rows and uses those of its own, so that the result does not depend on how many processes there are.
    """

    x: Tensor  # [B, d] the rows to be moved
    generator: torch.Generator
    rows: int  # in the joint batch; B where there is one process
    first: int = 0  # of them that is ours
    sums: Tensor | None = None  # [k] `Policy.measure`, summed over the joint batch; None where there is one process

    def uniform(self, n: int) -> Tensor:
        """`n` draws from [-1, 1) for every entry of x, [n, B, d]: a sign and a fraction in one random number."""
        return self._ours(self._empty(n).uniform_(-1, 1, generator=self.generator))

    def normal(self, n: int, sigma: float) -> Tensor:
        """`n` draws from N(0, sigma) for every entry of x, [n, B, d]."""
        return self._ours(self._empty(n).normal_(0, sigma, generator=self.generator))

    def _empty(self, n: int) -> Tensor:
        return torch.empty((n, self.rows, self.x.shape[1]), dtype=self.x.dtype, device=self.x.device)

    def _ours(self, drawn: Tensor) -> Tensor:
        ours = self.x.shape[0]
        return drawn if self.rows == ours else drawn[:, self.first : self.first + ours]


class Steps(NamedTuple):
    """The perturbations of one training step, and the bounds they were drawn from."""

    size: Tensor  # [n, B, d] >= 0; n draws for each of B rows and d inputs
    sign: Tensor  # [n, B, d] of which only the sign counts
    lower: Tensor  # [d], or one for all: the bounds of the size
    upper: Tensor  # [d]


class Observation(NamedTuple):
    """What a training step showed to a policy."""

    x: Tensor  # [B, d] the rows
    g: Tensor  # [B, d] the gradient there
    steps: Steps  # that it was estimated with
    differences: Differences  # of the estimator
    trial: StepTrial | None = None  # what was measured besides; None: nothing, or the policy is not a `MeasuringPolicy`


class Policy(ABC):
    """Decides the size of every perturbation.

    A policy never keeps state of its own: `init` makes it, `observe` returns a new one, and `BlackBox` holds it in
    buffers, so that it is saved, moved and copied with the model. Only sizes are decided here. Limits, and the rule
    that a step is never lost in the rounding of x, are applied to every policy alike by `BlackBox`.

    What a policy learns from a batch goes through sums over rows (`measure` before a step, `summarize` after it), so
    that the parts of a joint batch in several processes can be added up.

    Only `steps` must be written. A policy that measures its steps by itself is a `MeasuringPolicy`.
    """

    least_ulps = 4.0  # units of the rounding of x that `BlackBox` adds to every step, lest it vanishes in them

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def init(self, in_features: int) -> State:
        """State before the first step: float32 tensors of fixed shape. Empty for a policy without memory."""
        return {}

    def measure(self, x: Tensor) -> Tensor:
        """Sums over the rows of x [B, d] that `steps` must know of the whole batch, [k]. None by default."""
        return x.new_empty(0)

    @abstractmethod
    def steps(self, state: State, batch: Batch, n: int, noise: float) -> Steps:
        """Draw `n` perturbations for every entry of x.

        Args:
            state: What `init` or the last `observe` returned.
            batch: The rows to be moved.
            n: Draws per entry.
            noise: Half-width b of the noise on the box's outputs.
        """

    def summarize(self, state: State, seen: Observation) -> Tensor:
        """Sums over the rows of what was seen in a step: what `observe` needs of them, in any shape."""
        return seen.g.new_empty(0)

    def observe(self, state: State, summary: Tensor, rows: int, differences: Differences) -> State:
        """Learn from what `summarize` said of `rows` rows. Returns the new state."""
        return state


class MeasuringPolicy(Policy):
    """A policy that measures the box now and then, to find its steps by itself.

    It has a `share` of the evaluations of training for trials. A trial measures slopes at some rows with half, once and
    twice their steps, and is given to `summarize`. `observe` is called at steps with a trial only, unless several
    processes are at work. Before its first gradient, and whenever `needs_start` says so, `start` finds first steps.
    """

    share: float  # of the evaluations of training that trials may cost
    start_slopes: int  # how often `start` measures slopes at most

    @abstractmethod
    def start(self, state: State, start: StartingPoint) -> State:
        """Find first steps. Returns the new state."""

    @abstractmethod
    def needs_start(self, state: State) -> bool:
        """Whether no steps are known yet, or what was known is of no use any more."""

    @abstractmethod
    def standard_error(self, state: State, size: Tensor) -> Tensor:
        """Standard deviation of the slopes over steps `size` [B, d], for a loss gradient of norm 1; NaN: unknown."""


def constant_steps(size: float, batch: Batch, n: int) -> Steps:
    """One size for every entry, with a random sign."""
    sizes = batch.x.new_full((batch.x.shape[1],), size)  # [d]
    return Steps(sizes.expand(n, *batch.x.shape), batch.uniform(n), sizes, sizes)
