"""The interface of every policy."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.calling._grid import Grid
from bondgrad.measuring._first_step import StartingPoint
from bondgrad.measuring._step_trial import Differences, StepTrial

State = dict[str, Tensor]


class Batch(NamedTuple):
    """The rows of one training step, and the generator of its random numbers.

    Where several processes train one model, the rows are a part of a joint batch. Every process then draws the numbers
    of all rows and uses those of its own, so that the result does not depend on how many processes there are.
    """

    x: Tensor  # [B, d] the rows to be moved
    generator: torch.Generator
    rows: int  # the number of rows in the joint batch; B where there is one process
    first: int = 0  # the position of the first row of x in the joint batch
    sums: Tensor | None = None  # [k] `Policy.measure`, summed over the joint batch; None where there is one process

    def uniform(self, n: int) -> Tensor:
        """`n` uniform draws from [-1, 1) for every entry of x: [n, B, d]. Each gives a sign and a fraction."""
        return self._ours(self._empty(n).uniform_(-1, 1, generator=self.generator))

    def normal(self, n: int, sigma: float) -> Tensor:
        """`n` draws from N(0, sigma) for every entry of x: [n, B, d]."""
        return self._ours(self._empty(n).normal_(0, sigma, generator=self.generator))

    def _empty(self, n: int) -> Tensor:
        return torch.empty((n, self.rows, self.x.shape[1]), dtype=self.x.dtype, device=self.x.device)

    def _ours(self, drawn: Tensor) -> Tensor:
        """The draws [n, B, d] of the rows of x, given those of the joint batch [n, rows, d]."""
        ours = self.x.shape[0]
        return drawn if self.rows == ours else drawn[:, self.first : self.first + ours]


class Steps(NamedTuple):
    """The perturbations of one training step, and the bounds they were drawn from."""

    size: Tensor  # [n, B, d] >= 0; n draws for each of B rows and d inputs
    sign: Tensor  # [n, B, d] numbers of which only the sign is used
    lower: Tensor  # [d], or one for all inputs: the lower bound of the size
    upper: Tensor  # [d], or one for all inputs: the upper bound


class Observation(NamedTuple):
    """The results of a training step that a policy learns from."""

    x: Tensor  # [B, d] the rows
    g: Tensor  # [B, d] the gradient there
    steps: Steps  # the perturbations that g was estimated with
    differences: Differences  # order and base of the differences of the estimator
    trial: StepTrial | None = None  # slopes at several steps, for a `MeasuringPolicy`; None: there was no trial


class Policy(ABC):
    """Decides the size of every perturbation.

    A policy keeps no state in itself: `init` makes one, `observe` returns a new one, and `BlackBox` holds it in
    buffers, so that it is saved, moved and copied with the model. `BlackBox` applies the limits to the steps of every
    policy, and makes sure that no step is lost in the rounding of x.

    What a policy learns from a batch goes through sums over rows (`measure` before a step, `summarize` after it), so
    that the parts of a joint batch in several processes can be added up.

    A subclass must implement `steps` only. A policy that finds its steps by measurements is a `MeasuringPolicy`.
    """

    least_ulps = 4.0  # units of the rounding of x that `BlackBox` adds to every step, so that it is not lost in it
    resolution_steps = 1  # with a `resolution`, steps are whole multiples of so many of its steps, and one at least

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def init(self, in_features: int) -> State:
        """The state before the first step: float32 tensors of fixed shape; empty for a policy without a state."""
        return {}

    def measure(self, x: Tensor) -> Tensor:
        """Sums [k] over the rows of x [B, d] that `steps` needs of the whole batch. By default k is 0."""
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

    def settable(self, state: State, grid: Grid) -> State:
        """The state with steps that can be set, where inputs have a `resolution`, since it learns from those."""
        return state

    def summarize(self, state: State, seen: Observation) -> Tensor:
        """The sums over the rows of a step that `observe` needs, a tensor of any shape."""
        return seen.g.new_empty(0)

    def observe(self, state: State, summary: Tensor, rows: int, differences: Differences) -> State:
        """The new state after a step, given the `summary` of its rows by `summarize`, and their number."""
        return state


class MeasuringPolicy(Policy):
    """A policy that finds its steps by measurements of the box during training.

    Trials may cost a `share` of the evaluations of training. A trial measures the slopes at some rows over half, once
    and twice their steps, and is passed to `summarize`. `observe` is called at steps with a trial only, unless several
    processes train together. Before the first gradient, and whenever `needs_start` is true, `start` finds first steps.

    Where inputs have a `resolution`, steps are even numbers of its steps, so that half of a step can be set as well.
    """

    resolution_steps = 2

    share: float  # the part of the evaluations of training that trials may cost
    start_slopes: int  # the largest number of times that `start` measures slopes

    @abstractmethod
    def start(self, state: State, start: StartingPoint) -> State:
        """The state with first steps, found by evaluations of the box through `start`."""

    @abstractmethod
    def needs_start(self, state: State) -> bool:
        """Whether no steps are known yet, or not any more."""

    def looks_for_jumps(self, state: State) -> bool:
        """Whether the next trial also measures slopes over steps from a short one to the spread of the inputs."""
        return False

    def jumps(self, state: State) -> Tensor | None:
        """The inputs [d] along which the box jumps, or is piecewise constant, on the scale on which they vary.

        None: nobody looked.
        """
        return None

    def readings(self, state: State) -> int | None:
        """How many readings to take of every point; None: as many as `repeats` of the layer says."""
        return None

    @abstractmethod
    def standard_error(self, state: State, size: Tensor) -> Tensor:
        """Standard deviation of the slopes over steps `size` [B, d], for a loss gradient of norm 1; NaN: unknown."""


def constant_steps(size: float, batch: Batch, n: int) -> Steps:
    """The same size for every entry of x, with `n` random signs."""
    sizes = batch.x.new_full((batch.x.shape[1],), size)  # [d]
    return Steps(sizes.expand(n, *batch.x.shape), batch.uniform(n), sizes, sizes)
