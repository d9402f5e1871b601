"""The first calls: how many rows does a box take in a call, and how long does that take?"""

import torch

from bondgrad.measuring._sampler import BudgetExceeded, Sampler
from bondgrad.probing._facts import SEVERAL_ROWS

MOST_FAILING = 64  # rows that are tried before a box is believed not to work


def find_call_limits(sampler: Sampler) -> None:
    """Let the sampler's caller learn how many rows the box takes in a call, and its speed.

    Raises:
        BoxError: If the box answers about no row.
    """
    caller = sampler.caller
    together = torch.full((min(SEVERAL_ROWS, caller.largest),), _answered_row(sampler))
    if not sampler.time_rows(together) and caller.smallest == 1 and not sampler.time_rows(together[:2]):
        caller.refused, caller.largest = 2, 1
    sampler.time_rows(together[: caller.smallest])  # not the first call, which may have had to load something


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
    except BudgetExceeded:
        if error is None:
            raise
    assert error is not None
    raise error from error.__cause__


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
