"""Findings about a box so far, beginning with the first calls, and quantities that measurements derive from them."""

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
SEVERAL_ROWS = 8  # rows of a call with several rows, where their number does not matter
MOST_FAILING = 64  # failing rows after which no further row is tried
TYPICAL_SHARE = 10  # one in so many of the evaluations may be spent on the typical rows
NEGLIGIBLE = 1e-6  # changes below this part of the spread of the outputs do no harm, as those of a solver's tolerance
HARMLESS = 1e-4  # changes by other rows or calls below this part of the spread are no more than rounding to a policy
NOISY_REPEATS = 4  # repeats of every comparison of noisy outputs, so that rare outliers show in the deviations


@dataclass(frozen=True)
class Facts:
    """What is known of a box so far, for measurements to read: its outputs at typical rows, and earlier findings."""

    y: Tensor  # [n, d_out] outputs at the typical rows that were evaluated; NaN where the box failed
    unit: float  # relative rounding unit of the type of the outputs
    found: "Findings"  # results of the measurements so far

    def with_finding(self, name: str, finding: Any) -> "Facts":  # noqa: ANN401
        """A copy of these facts with the finding of a measurement; None: the measurement was left out."""
        return replace(self, found=replace(self.found, **{name: finding}))

    def asked_again(self, sampler: Sampler) -> "Facts":
        """These facts, with typical rows that failed evaluated again if the box is known to fail at random."""
        if sampler.caller.random_failures == 0 or len(self.usable) == len(self.y):
            return self
        return replace(self, y=self.y.where(torch.isfinite(self.y), sampler.ask_rows(torch.arange(len(self.y)))))

    @cached_property
    def noise(self) -> Tensor:
        """[d_out] standard deviation of the noise; [1] zero until it is measured."""
        return self.y.new_tensor([0.0] if self.found.randomness is None else self.found.randomness.std)

    @property
    def noisy(self) -> bool:
        """Whether any output has noise."""
        return self.found.randomness is not None and not self.found.randomness.deterministic

    def under_one_seed(self, divided: bool = False) -> "Facts":
        """These facts as they hold for outputs with the same seed: without noise, if the box takes one.

        Args:
            divided: Whether calls were divided, since they failed. What a box draws for a row may depend on its place.
        """
        random = self.found.randomness
        if random is None or not random.takes_seed or (divided and random.within_a_call):
            return self
        none = [0.0] * len(random.std)
        return self.with_finding("randomness", replace(random, deterministic=True, std=none, largest=none))

    @property
    def floor(self) -> float:
        """Standard deviation of the rounding inside the box, relative to its outputs; zero: none is known."""
        return 0.0 if self.found.rounding is None else self.found.rounding.floor

    @property
    def remembers(self) -> bool:
        """Whether outputs are known to depend on the previous call."""
        return self.found.history is not None and bool(self.found.history.remembers)

    @cached_property
    def usable(self) -> Tensor:
        """[m] the typical rows at which all outputs are finite."""
        return torch.isfinite(self.y).all(1).nonzero().squeeze(1)

    @cached_property
    def scale(self) -> Tensor:
        """[d_out] root mean square of the outputs."""
        return self.y[self.usable].square().mean(0).sqrt()

    @property
    def positive_scale(self) -> Tensor:
        """[d_out] root mean square of the outputs; one for outputs that are zero everywhere."""
        return torch.where(self.scale > 0, self.scale, 1.0)

    @cached_property
    def output_spread(self) -> Tensor:
        """[d_out] standard deviation of the outputs over rows; `positive_scale` for outputs that do not change."""
        spread = self.y[self.usable].std(0, correction=int(len(self.usable) > 1))
        flat = spread <= self.unit / 4 * self.scale
        return torch.where(flat, self.positive_scale, spread)

    @property
    def repeat_tolerance(self) -> Tensor:
        """[d_out] by how much the outputs of two equal calls may differ without noise."""
        return 2 * self.unit * self.scale

    @cached_property
    def tolerance(self) -> Tensor:
        """[d_out] the largest change that may come from rounding, such as when rows are grouped into other calls.

        Once the floor is known, it is a multiple of the floor, instead of the rounding unit of the outputs' type. What
        the call before changes counts as rounding, too, where it is as small.
        """
        history = self.found.history
        remembered = (0.0 if history is None else 4 * history.rounding) * self.output_spread
        most = 64 * self.unit * self.scale
        noisy = torch.minimum(most, torch.maximum(4 * self.noise, self.repeat_tolerance))
        known = max(2 * self.unit, 16 * self.floor) * self.scale if self.floor > 0 else most
        return torch.maximum(torch.where((self.noise > 0) & (self.floor == 0), noisy, known), remembered)

    def certain(self, n: int) -> Tensor:
        """[d_out] the largest difference between two means of n outputs that noise and rounding may cause.

        A single outlier of the size seen so far does not cause a larger one.
        """
        largest = self.noise.new_tensor([0.0] if self.found.randomness is None else self.found.randomness.largest)
        chance = torch.maximum(6 * self.noise * math.sqrt(2 / n), 2.5 * largest / n)
        return torch.maximum(chance, self.tolerance)

    def relative(self, change: Tensor) -> float:
        """Root mean square of changes [..., d_out] in units of the spread of the outputs; NaN are left out."""
        return float((change / self.output_spread).square().nanmean().sqrt().nan_to_num(0))

    def choose(self, count: int, generator: torch.Generator) -> Tensor:
        """[count] random usable rows, repeated only if there are fewer than that."""
        order = self.usable[torch.randperm(len(self.usable), generator=generator)]
        return order[torch.arange(count) % len(order)]

    def settle(self, sampler: Sampler) -> None:
        """Evaluate the same few rows if the box has memory, so that calls to be compared have the same call before."""
        if self.remembers:
            sampler.ask_rows(self.usable[: max(SEVERAL_ROWS, sampler.caller.smallest)])

    def compare(self, sampler: Sampler, ask: Callable[[T], Tensor], ways: list[T], rows: int) -> tuple[bool, Tensor]:
        """Compare the outputs at the same rows under several conditions.

        Args:
            sampler: Evaluates the box.
            ask: Evaluates the rows once under the condition given, and returns the outputs [r, d_out].
            ways: The k conditions.
            rows: Most rows that are evaluated under any of them.

        Returns:
            Whether outputs differ by more than noise and rounding may cause, and [k - 1, r, d_out] the mean difference
            from those under the first condition.
        """
        k, repeats = len(ways), NOISY_REPEATS if self.noisy else 1
        sampler.require(4 * repeats * k * rows, calls=2 * repeats * k)

        def compared() -> tuple[bool, Tensor]:
            answers: list[list[Tensor]] = [[] for _ in ways]
            # In this order and then in reverse, so that a steady drift is the same on average in all conditions.
            for i in [*range(k), *reversed(range(k))] * repeats:
                self.settle(sampler)
                answers[i].append(ask(ways[i]))
            y = torch.stack([torch.stack(found) for found in answers])  # [k, n, r, d_out]
            n, mean = y.shape[1], y.nanmean(1)
            off = (y - mean[:, None]).abs().nan_to_num(0)
            # Some rows may be noisier than others, and some outputs may be outliers.
            own = torch.maximum(6 * off.square().mean((0, 1)).mul(2 / n).sqrt(), 2.5 * off.amax((0, 1)) / n)
            change = (mean[1:] - mean[0]).nan_to_num(0)
            return bool((change.abs() > torch.maximum(self.certain(n), own)).any()), change

        differ, change = compared()
        # Outliers of noisy outputs may make a difference, which must then show again.
        return compared() if differ and self.noisy else (differ, change)


def find_first_facts(sampler: Sampler, found: "Findings") -> Facts:
    """Find out how many rows the box takes in a call, and how long that takes; then evaluate the typical rows.

    Raises:
        BoxError: If every row that is tried fails.
    """
    caller = sampler.caller
    together = torch.full((min(SEVERAL_ROWS, caller.largest),), _answered_row(sampler))
    if not sampler.time_rows(together) and caller.smallest == 1 and not sampler.time_rows(together[:2]):
        caller.refused, caller.largest = 2, 1
    sampler.time_rows(together[: caller.smallest])  # only now: the first call may have had to load something
    y = sampler.ask_rows(torch.arange(min(len(sampler.x), max(2, sampler.affordable // TYPICAL_SHARE))))
    facts = Facts(y, sampler.function.rounding or torch.finfo(sampler.dtype).eps, found)
    if len(facts.usable) == 0:
        raise MeasurementSkipped(f"no finite answer at {len(y)} rows asked about")
    return facts


def _answered_row(sampler: Sampler) -> int:
    """The number of a row that the box can evaluate: alone, or, if it takes no single rows, among others."""
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
    """Whether a call with several rows succeeds. If it does, copies of the first row show how few rows a call takes."""
    caller = sampler.caller
    several = torch.arange(min(SEVERAL_ROWS, caller.largest)) % len(sampler.x)
    if isinstance(caller.call(sampler.x[several], several, once=True), Exception):
        return False
    fewer = (n for n in (1, 2, 4) if n < len(several) and sampler.time_rows(several[:1].repeat(n)))
    caller.smallest = next(fewer, len(several))
    caller.count_random_failures(int(caller.smallest == 1))  # one row alone had failed before
    return True
