"""The box at the rows of a batch, for a search of its structure, and the numbers that such a search goes by."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.measuring._rounding import RoundingNoise
from bondgrad.measuring._spread import Spread


@dataclass(frozen=True)
class SearchSettings:
    """How thoroughly structure is searched. Changes of outputs are counted in their standard deviations.

    The numbers of rows, rounds and repeats are choices between cost and thoroughness: a round costs `rows` evaluations
    per input, twice as many for a box with noise, and `rows` times `repeats` for the noise itself.
    """

    suspicion: float = 4.0  # a larger change is looked at again: by noise alone it is one comparison in 16,000
    certainty: float = 6.0  # a larger change is believed: by noise alone it is one comparison in 500 million
    # Dependencies.
    rows: int = 8  # at which every input is moved in one round
    fractions: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 64)  # of the way to the farthest value, in turn over the rows
    rounds: int = 4  # at most
    unseen: float = 1e-3  # the part of the dependencies that may be unseen, by estimate, without another round
    repeats: int = 16  # evaluations of a row that show its noise, with a standard error of 22 % if it is normal
    confirmations: int = 8  # pairs of evaluations for each dependency that is looked at again
    false_alarm: float = 0.01  # chance that the pattern has any dependency that is none, for normal noise
    miss: float = 0.01  # chance, at each row, to overlook a change of the size that `Detection.least` states
    # Checks of a known pattern.
    watched_rows: int = 16  # that are moved in one check, in three evaluations each
    watch_confirmations: int = 16  # pairs of evaluations of each row at which such a check suspects a change
    # The length of a memory.
    starts: int = 4  # time steps at which inputs are moved, evenly over the sequence
    sequences: int = 2  # rows of the batch at which they are moved
    step: float = 0.05  # relative to the root mean square of an input; more, if the noise of the outputs needs it
    tail: float = 0.003  # the part of the response (its root mean square) that may come after the horizon
    least_lags: int = 3  # at which a response must be seen, for its decay to be fitted
    # When a layer searches, and what it needs to change its structure.
    least_answered: float = 0.5  # the part of a pattern for which evaluations must not fail, for it to be used
    worthwhile: float = 0.75  # a shorter horizon is used if it is below this part of the present one
    share: float = 0.01  # the part of the evaluations of training that searches may cost, after the first


SETTINGS = SearchSettings()


@dataclass(eq=False)
class SearchBatch:
    """Rows of a batch, and a function that evaluates the box at points near them."""

    x: Tensor  # [N, d] the rows, inside the limits
    y: Tensor  # [N, d_out] the outputs of the box there
    evaluate: Callable[[Tensor, Tensor], Tensor]  # (points [r, j, ends, d], rows [r]) -> [r, j, ends, d_out]
    max_points: int  # how many points may exist at a time
    noise: float  # half-width of the noise on the outputs, as far as it is known
    rounding: float  # relative rounding of the outputs
    low: Tensor  # [d] no point may be below this
    high: Tensor  # [d] no point may be above this
    features: int = 0  # the number of inputs of a time step, where rows are sequences
    whole: bool = False  # whether every request must contain all rows, because the box has a memory

    def __post_init__(self) -> None:
        self.evaluations = 0  # that were spent so far
        self.rounding_noise = RoundingNoise.of(self.y, self.rounding)

    def choose_rows(self, count: int, generator: torch.Generator) -> Tensor:
        """Numbers [count] of random rows, different ones as far as there are; of all rows, if `whole`."""
        n = self.x.shape[0]
        if self.whole:
            return torch.arange(n, device=self.x.device)
        order = torch.randperm(n, generator=generator, device="cpu").to(self.x.device)
        return order[torch.arange(count, device=self.x.device) % n]

    def ask(self, points: Tensor, rows: Tensor) -> Tensor:
        """The outputs [r, j, ends, d_out] at points [r, j, ends, d] near rows [r]; NaN where they are not finite.

        A box with a memory is asked about all rows, though only some are of interest; these have to be different ones.
        """
        (r, j, ends, _), n = points.shape, len(self.x)
        if self.whole and r < n:
            everything = self.x[:, None, None].expand(n, j, ends, -1).index_copy(0, rows, points)
            return self.ask(everything, torch.arange(n, device=rows.device))[rows]
        self.evaluations += r * j * ends
        moves = max(1, self.max_points // (ends * (r if self.whole else 1)))  # of a row in one request
        at_once = r if self.whole else max(1, moves // j)
        parts = []
        for near, some in zip(*(torch.split(t, at_once) for t in (points, rows)), strict=True):
            # Points are copied, since the box may write into what it is given.
            parts.append(torch.cat([self.evaluate(part.clone(), some) for part in torch.split(near, moves, 1)], 1))
        y = torch.cat(parts)
        return torch.where(torch.isfinite(y), y, math.nan)

    def targets(self, rows: Tensor, turns: Tensor) -> Tensor:
        """Values [r, d] on the way to the farthest, at the fractions of it whose turns [r] it is.

        They are never beyond either end, whatever rounding does.
        """
        x, end = self.x[rows], self.farthest(rows)
        fractions = self.x.new_tensor(SETTINGS.fractions)
        point = x + fractions[turns % len(fractions), None] * (end - x)
        return point.clamp(torch.minimum(x, end), torch.maximum(x, end))

    def farthest(self, rows: Tensor) -> Tensor:
        """For each input of these rows, the farthest value that it has in the batch: [r, d].

        An input that hardly varies goes farther: as far as the step (3 b)^(1/3) that minimises the error of a central
        difference for noise of half-width b, relative to the root mean square of the input.
        """
        x = self.x[rows]
        lowest, highest = self.x.aminmax(dim=0)
        target = torch.where(x - lowest > highest - x, lowest, highest)
        size = Spread.of(self.x).size  # [d]
        step = torch.where(size > 0, math.cbrt(3 * self.noise) * size, math.sqrt(self.noise))
        up, down = self.high - x, x - self.low  # the step goes to the side with more room
        near = torch.where(up >= down, torch.minimum(x + step, self.high), torch.maximum(x - step, self.low))
        return torch.where((target - x).abs() > step, target, near)
