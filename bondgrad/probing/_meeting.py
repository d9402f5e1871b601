"""The first questions: does a box answer at all, about one row and about several, and how long does that take?"""

import time

import torch
from torch import Tensor

from bondgrad.errors import BoxError
from bondgrad.evaluators._driver import is_out_of_memory
from bondgrad.probing._asker import AGAIN, COMPANY, Asker, LeftOut

ALONE = 64  # rows that are tried before a box is believed not to work


def meet(asker: Asker) -> None:
    """Learn how many rows the box takes in a call, the width of its answers and its speed.

    Raises:
        BoxError: If it does not answer.
    """
    row = _first_answer(asker)
    together = torch.full((COMPANY,), row)
    if not timed(asker, together) and asker.least == 1 and not timed(asker, together[:2]):
        asker.refused, asker.most = 2, 1
    timed(asker, together[: asker.least])  # not the first call, which may have had to load something


def timed(asker: Asker, rows: Tensor) -> bool:
    """Learn how long a call with these rows [n] of x takes; False: it failed, and failed again."""
    for attempt in range(1 + AGAIN if asker.flaky else 2):
        asker.synchronise()
        start, before = time.perf_counter(), asker.function.seconds
        try:
            asker.call(asker.x[rows], rows)
        except Exception as error:
            if isinstance(error, BoxError) or is_out_of_memory(error):
                continue
            raise
        asker.synchronise()
        asker.doubt(attempt)
        # What is done around the box takes longer than many a box does for a row.
        inside = asker.function.seconds - before
        asker.learn_speed(len(rows), inside if asker.device.type == "cpu" else time.perf_counter() - start)
        return True
    return False


def _first_answer(asker: Asker) -> int:
    """A row that the box answers about: alone, or, where it takes no single rows, in company."""
    first: BoxError | None = None
    for i in range(min(max(2, asker.rows), ALONE)):
        row = torch.tensor([i % asker.rows])
        try:
            asker.learn(asker.call(asker.x[row], row))
        except BoxError as error:
            first = first or error
        except LeftOut:
            raise (first or LeftOut()) from None
        else:
            return int(row)
        if i == 0 and _answers_in_company(asker):
            return 0
    assert first is not None
    raise first from first.__cause__


def _answers_in_company(asker: Asker) -> bool:
    """Whether it answers about several rows; if so, learns how few it takes, the first of them being all right."""
    several = torch.arange(COMPANY) % asker.rows
    try:
        asker.learn(asker.call(asker.x[several], several))
        for n in (1, 2, 4):
            if timed(asker, several[:1].repeat(n)):
                break
        else:
            n = COMPANY
    except (BoxError, LeftOut):
        return False
    asker.least = n
    asker.doubt(int(n == 1))  # it had failed before
    return True
