"""The rows of a batch with the box at them, for a search of its structure, and the settings of such searches."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.calling._grid import Grid
from bondgrad.measuring._rounding import RoundingNoise
from bondgrad.measuring._spread import Spread


@dataclass(frozen=True)
class SearchSettings:
    """Settings of the search for structure. Changes of outputs are in units of their standard deviations.

    The numbers of rows, rounds and repeats are choices between cost and thoroughness: a round costs `rows` evaluations
    per input, twice as many for a box with noise, and `rows` times `repeats` for the noise itself.
    """

    suspicion: float = 4.0  # a larger change is tested again: by noise alone it is one comparison in 16,000
    certainty: float = 6.0  # a larger change is accepted: by noise alone it is one comparison in 500 million
    # Dependencies.
    rows: int = 8  # rows at which every input is moved in one round
    fractions: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 64)  # of the way to the farthest value, in turn over the rows
    rounds: int = 4  # the largest number of rounds
    unseen: float = 1e-3  # another round follows if a larger part of the dependencies is unseen, by estimate
    repeats: int = 16  # evaluations of a row to measure its noise; its standard error is 22 % if it is normal
    confirmations: int = 8  # pairs of evaluations for each dependency that is tested again
    false_alarm: float = 0.01  # probability of at least one dependency that does not exist, for normal noise
    miss: float = 0.01  # probability, at each row, to overlook a change of the size of `Detection.least`
    # Checks of a known pattern.
    most_moves: int = 16  # moves of a check; fewer where it may cost less
    moves: int = 2  # moves of a row, where each row has to be evaluated itself, too, since there is noise
    far: float = 0.5  # part of the moves in which inputs go all the way; in the others they go a part of it
    watch_confirmations: int = 16  # pairs of evaluations of a row at which a check suspects a change
    noise_weight: float = 0.25  # of the newest repeated evaluations in what is known of the noise
    # The length of a memory.
    starts: int = 4  # time steps at which inputs are moved, evenly over the sequence
    sequences: int = 2  # rows of the batch at which inputs are moved
    step: float = 0.05  # relative to the root mean square of an input; longer, if the noise of the outputs needs it
    tail: float = 0.003  # the part of the response (its root mean square) that may come after the horizon
    least_lags: int = 3  # lags with a visible response that are needed to fit its decay
    # When a layer searches, and when it changes its structure.
    least_answered: float = 0.5  # a pattern is used if evaluations succeeded for at least this part of it
    worthwhile: float = 0.75  # a shorter horizon is used if it is below this part of the present one
    share: float = 0.01  # the part of the evaluations of training that searches may cost, after the first
    floor: float = 2.0  # evaluations a step that they may cost at least, however few a gradient needs
    interval: int = 4  # steps from one search to the next, at least: each is a call of the box, and cannot be captured


SETTINGS = SearchSettings()


@dataclass(eq=False)
class SearchBatch:
    """Rows of a batch, and a function that evaluates the box at points near them."""

    x: Tensor  # [N, d] the rows, inside the limits
    y: Tensor  # [N, d_out] the outputs of the box there
    evaluate: Callable[[Tensor, Tensor], Tensor]  # (points [r, j, ends, d], rows [r]) -> [r, j, ends, d_out]
    max_points: int  # the largest number of points that may exist at a time
    noise: float  # half-width of the noise on the outputs, as far as it is known
    rounding: float  # relative rounding of the outputs
    low: Tensor  # [d] no point may be below this
    high: Tensor  # [d] no point may be above this
    features: int = 0  # the number of inputs of a time step, where rows are sequences
    whole: bool = False  # whether every request must contain all rows, because the box has a memory
    grid: Grid | None = None  # the values that inputs can have; None: all
    seeded: bool = False  # whether the box takes a seed, so that its noise is the same at all ends of a move

    def __post_init__(self) -> None:
        self.evaluations = 0  # spent so far, of which each may be several readings
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

        A box with a memory is evaluated at all rows of the batch, also where only some are asked for; `rows` must
        then be different from each other.
        """
        (r, j, ends, _), n = points.shape, len(self.x)
        if self.whole and r < n:
            everything = self.x[:, None, None].expand(n, j, ends, -1).index_copy(0, rows, points)
            return self.ask(everything, torch.arange(n, device=rows.device))[rows]
        self.evaluations += r * j * ends
        moves = max(1, self.max_points // (ends * (r if self.whole else 1)))  # the moves of a row in one request
        at_once = r if self.whole else max(1, moves // j)
        parts = []
        for near, some in zip(*(torch.split(t, at_once) for t in (points, rows)), strict=True):
            # Points are copied, since the box may write into its inputs.
            parts.append(torch.cat([self.evaluate(part.clone(), some) for part in torch.split(near, moves, 1)], 1))
        y = torch.cat(parts)
        return torch.where(torch.isfinite(y), y, math.nan)

    def targets(self, rows: Tensor, turns: Tensor) -> Tensor:
        """Values [r, d] between the inputs of these rows and their farthest values.

        Row i goes a part `SETTINGS.fractions[turns[i]]` of the way, with turns [r] counted modulo the number of
        fractions. Values are never beyond either end, also after rounding.
        """
        x, end = self.x[rows], self.farthest(rows)
        fractions = self.x.new_tensor(SETTINGS.fractions)
        way = fractions[turns % len(fractions), None] * (end - x)
        if self.grid is not None:  # no point is that of the row itself
            way = torch.copysign(self.grid.moves(way.abs()), end - x)
        point = x + way if self.grid is None else self.grid.nearest(x + way)
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
        step = step if self.grid is None else self.grid.moves(step)
        up, down = self.high - x, x - self.low  # the step goes to the side with more room
        near = torch.where(up >= down, torch.minimum(x + step, self.high), torch.maximum(x - step, self.low))
        return torch.where((target - x).abs() > step, target, near)
