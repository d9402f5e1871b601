"""How often a box fails at random, and how often it still would when it is asked again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.measuring._sampler import BudgetExceeded, Sampler
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import percent


@dataclass(frozen=True)
class FailureSettings:
    """How many calls are made to count failures, and how few may remain."""

    calls: int = 200  # with one row each
    share: float = 0.1  # part of the evaluations and of the time left that they may take
    remaining: float = 1e-3  # share of rows that may still fail after all retries
    retries: int = 2  # those that evaluators make unless told otherwise
    most_retries: int = 10  # recommended at most


SETTINGS = FailureSettings()


@dataclass(frozen=True)
class RandomFailures:
    """The share of calls that fail at random, when each has as few rows as the box takes."""

    rows: int  # of a call
    calls: int  # that were made
    failed: int  # of them

    @property
    def share(self) -> float:
        """The share of rows that fail; of none that was seen, what one would be."""
        return max(self.failed, 1) / self.calls

    @property
    def retries(self) -> int:
        """How often a row must be asked again so that hardly any is left without an output."""
        enough = (n for n in range(SETTINGS.retries, SETTINGS.most_retries) if self.left(n) <= SETTINGS.remaining)
        return next(enough, SETTINGS.most_retries)

    def left(self, retries: int) -> float:
        """The share of rows that still fail after so many retries."""
        return float(self.share ** (retries + 1))

    @property
    def phrase(self) -> str:
        """The rate, and what remains after retries, in short."""
        seen = percent(self.share) if self.failed else f"less than {percent(self.share)}"
        after = f"after {self.retries} retries {percent(self.left(self.retries))} still would"
        return f"{seen} of rows fail at random; {after}"

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        each = "a row" if self.rows == 1 else f"{self.rows} rows"
        return f"Of {self.calls:,} calls with {each} that works, {self.failed:,} failed. {self.phrase.capitalize()}."


def measure_failures(sampler: Sampler, facts: Facts, generator: torch.Generator) -> RandomFailures | None:
    """Count failures of calls with few rows, all of which are known to work; None: nothing has failed at random."""
    caller = sampler.caller
    if caller.random_failures == 0:
        return None
    n = caller.smallest
    calls = min(SETTINGS.calls, int(SETTINGS.share * min(sampler.affordable // n, sampler.affordable_calls)))
    if calls < 1:
        raise BudgetExceeded("the evaluations left do not reach")
    failed = 0
    for _ in range(calls):
        rows = facts.choose(n, generator)
        y = caller.call(sampler.x[rows], rows, once=True)
        failed += not isinstance(y, Tensor) or not bool(torch.isfinite(y).all())
    return RandomFailures(n, calls, failed)
