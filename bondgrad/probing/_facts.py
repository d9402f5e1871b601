"""What has been found out about a box, beginning with the first calls, and what measurements conclude from it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from bondgrad.measuring._sampler import BudgetExceeded, MeasurementSkipped, Sampler

if TYPE_CHECKING:
    from bondgrad.probing._report import Findings

T = TypeVar("T")
SEVERAL_ROWS = 8  # rows of a call with several, where their number does not matter
MOST_FAILING = 64  # rows that are tried before a box is believed not to work
TYPICAL_SHARE = 10  # typical rows may take one in so many of the evaluations
NOISY_REPEATS = 4  # of every comparison, where answers are noisy: what is rare then shows in the deviations


@dataclass(frozen=True)
class Facts:
    """What is known of a box so far: its answers about typical rows, and what was found out. Measurements read it."""

    y: Tensor  # [n, d_out] outputs at the typical rows that were asked about; NaN where there are none
    unit: float  # the rounding unit of the type of the outputs, relative
    found: "Findings"

    def with_finding(self, name: str, finding: Any) -> "Facts":  # noqa: ANN401
        """These facts, with what a measurement has found added; None: it was left out."""
        return replace(self, found=replace(self.found, **{name: finding}))

    def asked_again(self, sampler: Sampler) -> "Facts":
        """These facts, after typical rows without an answer were asked again, where failures come by chance."""
        if sampler.caller.random_failures == 0 or len(self.usable) == len(self.y):
            return self
        return replace(self, y=self.y.where(torch.isfinite(self.y), sampler.ask_rows(torch.arange(len(self.y)))))

    @cached_property
    def noise(self) -> Tensor:
        """[d_out], or [1] until it is known: standard deviation of the noise."""
        return self.y.new_tensor([0.0] if self.found.randomness is None else self.found.randomness.std)

    @property
    def noisy(self) -> bool:
        """Whether any output has noise."""
        return self.found.randomness is not None and not self.found.randomness.deterministic

    @property
    def floor(self) -> float:
        """The rounding inside the box, relative to its outputs; zero: none is known."""
        return 0.0 if self.found.rounding is None else self.found.rounding.floor

    @property
    def remembers(self) -> bool:
        """Whether outputs depend on the call before."""
        return self.found.history is not None and bool(self.found.history.remembers)

    @cached_property
    def usable(self) -> Tensor:
        """[m] the typical rows at which the box gave finite answers."""
        return torch.isfinite(self.y).all(1).nonzero().squeeze(1)

    @cached_property
    def scale(self) -> Tensor:
        """[d_out] how large the outputs are: root mean square."""
        return self.y[self.usable].square().mean(0).sqrt()

    @property
    def positive_scale(self) -> Tensor:
        """[d_out] the same, and one for outputs that are zero everywhere."""
        return torch.where(self.scale > 0, self.scale, 1.0)

    @cached_property
    def output_spread(self) -> Tensor:
        """[d_out] standard deviation over the rows; of outputs that do not change, their size, or one."""
        spread = self.y[self.usable].std(0, correction=int(len(self.usable) > 1))
        flat = spread <= self.unit / 4 * self.scale
        return torch.where(flat, self.positive_scale, spread)

    @property
    def repeat_tolerance(self) -> Tensor:
        """[d_out] by how much outputs of the same call may differ without noise."""
        return 2 * self.unit * self.scale

    @cached_property
    def tolerance(self) -> Tensor:
        """[d_out] a change of this size may come from rounding, such as when rows are grouped into other calls.

        Once the floor is known, that is what it goes by: outputs with an offset are larger than what they say.
        """
        if self.floor > 0:
            return max(2 * self.unit, 16 * self.floor) * self.scale
        most = 64 * self.unit * self.scale
        noisy = torch.minimum(most, torch.maximum(4 * self.noise, self.repeat_tolerance))
        return torch.where(self.noise > 0, noisy, most)

    def certain(self, n: int) -> Tensor:
        """[d_out] a difference between two means of n answers that is more than noise and rounding make.

        Nor does a single answer that lies far out make one.
        """
        largest = self.noise.new_tensor([0.0] if self.found.randomness is None else self.found.randomness.largest)
        chance = torch.maximum(6 * self.noise * math.sqrt(2 / n), 2.5 * largest / n)
        return torch.maximum(chance, self.tolerance)

    def relative(self, change: Tensor) -> float:
        """Changes [..., d_out] over the spread of the outputs: root mean square over those that are known."""
        return float((change / self.output_spread).square().nanmean().sqrt().nan_to_num(0))

    def choose(self, count: int, generator: torch.Generator) -> Tensor:
        """[count] typical rows at which the box works: different ones, as far as there are."""
        order = self.usable[torch.randperm(len(self.usable), generator=generator)]
        return order[torch.arange(count) % len(order)]

    def settle(self, sampler: Sampler) -> None:
        """Ask a box that remembers about the same few rows, so that calls to be compared have the same past."""
        if self.remembers:
            sampler.ask_rows(self.usable[: max(SEVERAL_ROWS, sampler.caller.smallest)])

    def compare(self, sampler: Sampler, ask: Callable[[T], Tensor], ways: list[T], rows: int) -> tuple[bool, Tensor]:
        """Whether answers about the same rows, asked in several ways, differ by more than noise and rounding make.

        Args:
            sampler: The box.
            ask: Asks once, in the way given, and returns the answers [r, d_out].
            ways: k ways of asking.
            rows: Most rows that are asked about in any of them.

        Returns:
            Whether they differ, and [k - 1, r, d_out] by how much from those in the first way, on average.
        """
        k, repeats = len(ways), NOISY_REPEATS if self.noisy else 1
        sampler.require(4 * repeats * k * rows, calls=2 * repeats * k)

        def compared() -> tuple[bool, Tensor]:
            answers: list[list[Tensor]] = [[] for _ in ways]
            # There and back again: what drifts steadily has drifted equally for each of them.
            for i in [*range(k), *reversed(range(k))] * repeats:
                self.settle(sampler)
                answers[i].append(ask(ways[i]))
            y = torch.stack([torch.stack(found) for found in answers])  # [k, n, r, d_out]
            n, mean = y.shape[1], y.nanmean(1)
            off = (y - mean[:, None]).abs().nan_to_num(0)
            # Some rows may be noisier than others, and some answers lie far out.
            own = torch.maximum(6 * off.square().mean((0, 1)).mul(2 / n).sqrt(), 2.5 * off.amax((0, 1)) / n)
            change = (mean[1:] - mean[0]).nan_to_num(0)
            return bool((change.abs() > torch.maximum(self.certain(n), own)).any()), change

        differ, change = compared()
        # A few bad ones among noisy answers may make a difference: is it there again?
        return compared() if differ and self.noisy else (differ, change)


def find_first_facts(sampler: Sampler, found: "Findings") -> Facts:
    """Find out how many rows the box takes in a call, and how long that takes; then ask about the typical rows.

    Raises:
        BoxError: If the box answers about no row.
    """
    caller = sampler.caller
    together = torch.full((min(SEVERAL_ROWS, caller.largest),), _answered_row(sampler))
    if not sampler.time_rows(together) and caller.smallest == 1 and not sampler.time_rows(together[:2]):
        caller.refused, caller.largest = 2, 1
    sampler.time_rows(together[: caller.smallest])  # not the first call, which may have had to load something
    y = sampler.ask_rows(torch.arange(min(len(sampler.x), max(2, sampler.affordable // TYPICAL_SHARE))))
    facts = Facts(y, sampler.function.rounding or torch.finfo(sampler.dtype).eps, found)
    if len(facts.usable) == 0:
        raise MeasurementSkipped(f"no finite answer at {len(y)} rows asked about")
    return facts


def _answered_row(sampler: Sampler) -> int:
    """A row that the box answers about: alone, or, where it takes no single rows, among others."""
    n, error = len(sampler.x), None
    try:
        for i in range(min(max(2, n), MOST_FAILING)):
            row = torch.tensor([i % n])
            answer = sampler.caller.call(sampler.x[row], row, once=True)
            error = error or (answer if isinstance(answer, Exception) else None)
            if not isinstance(answer, Exception) or (i == 0 and _answers_together(sampler)):
                return int(row)
    except BudgetExceeded as shortage:
        error = error or shortage
    assert error is not None
    raise error


def _answers_together(sampler: Sampler) -> bool:
    """Whether the box answers about several rows; if so, learns how few it takes, the first of them being all right."""
    caller = sampler.caller
    several = torch.arange(min(SEVERAL_ROWS, caller.largest)) % len(sampler.x)
    if isinstance(caller.call(sampler.x[several], several, once=True), Exception):
        return False
    fewer = (n for n in (1, 2, 4) if n < len(several) and sampler.time_rows(several[:1].repeat(n)))
    caller.smallest = next(fewer, len(several))
    caller.count_random_failures(int(caller.smallest == 1))  # it had failed before
    return True
