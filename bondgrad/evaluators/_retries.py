"""Which rows of a request are asked again because no usable output came for them, and in calls of how many rows."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bondgrad.evaluators._evaluator import RECORDED, Answer, Request


@dataclass(frozen=True)
class RetrySettings:
    """How rows are asked again for which no output came."""

    division: int = 8  # a call that raised is divided into so many: halves would evaluate most rows many times over
    tried_rows: int = 8  # asked one by one, before all are, while a request has brought no output at all
    nonfinite: int = 2  # times that a row is asked again whose outputs are not finite, if `retries` has no limit
    first_pause: float = 0.05  # seconds before the second retry; the first comes at once, later ones wait twice as long
    longest_pause: float = 30.0


SETTINGS = RetrySettings()


class RetrySearch:
    """The search for the outputs of rows for which none came, or none that are finite.

    A call that raised an error is divided first, since single rows may be at fault. What fails alone is asked again
    `retries` times, both ends of a pair together. While nothing was answered at all, only a few rows are asked, since a
    box that is away answers none. When that has come to nothing, every row is asked alone once before it is given up.

    Args:
        request: The rows, as they were sent first.
        answer: To that request.
        retries: How often a row is asked again; None: no limit.
    """

    def __init__(self, request: Request, answer: Answer, retries: int | None) -> None:
        self.request, self.retries = request, retries
        self.attempts = 1
        self.pause = 0.0  # seconds to wait before the next attempt
        self.first_error: Exception | None = None
        self.answered = False  # whether any row got an output, finite or not
        n = request.points.shape[0]
        self.y = answer.y.new_full(answer.y.shape, math.nan)  # [N, d_out]
        self.ok = torch.zeros(n, dtype=torch.bool)  # [N]
        self._unit = 2 if request.pairs else 1  # rows that are asked together
        self._size = n if request.max_rows is None else min(n, request.max_rows)  # rows in a call
        self._alone = torch.full((n,), self._size == 1)  # [N] which rows were asked in calls of their own
        self._retry = 0
        self._first_failure = 0  # rows of the call that raised the first error
        self._partial = False  # whether the last attempt had only a few of the rows without an output
        self._last_chance = False  # whether it has all rows that were not asked alone, since nothing was answered
        self.rows = torch.arange(n)  # of the last attempt, by their numbers in the request
        self.add(answer)

    def add(self, answer: Answer) -> None:
        """Take in the answer to the last attempt."""
        errors = [call for call in answer.calls if call.error is not None]
        self._largest_failure = max((call.rows for call in errors), default=1)
        self._raised = bool(errors)
        if self._largest_failure == 1:
            self._alone[self.rows] = True
        self._recorded = any(call.worker == RECORDED for call in answer.calls)
        if errors and self.first_error is None:
            self.first_error, self._first_failure = errors[0].error, errors[0].rows
        came = torch.ones(len(self.rows), dtype=torch.bool) if answer.ok is None else answer.ok.cpu()
        if answer.y.shape[1] == 0 or not bool(came.any()):  # its width may not be known
            return
        if answer.y.shape[1] != self.y.shape[1]:  # nothing came before
            self.y = answer.y.new_full((self.y.shape[0], answer.y.shape[1]), math.nan)
        elif answer.y.dtype != self.y.dtype:
            self.y = self.y.to(torch.promote_types(self.y.dtype, answer.y.dtype))
        self.answered = True
        ok = torch.isfinite(answer.y).all(1).cpu() & came
        before, now = (self._by_unit(t).sum(1) for t in (self.ok[self.rows], ok))
        better = (now >= before) & self._by_unit(came).any(1)  # nothing takes no place
        better = better.repeat_interleave(self._unit)[: len(ok)]  # both ends of a pair are of the same attempt
        if self.request.whole:
            better[:] = True  # the state of the box is that after the last attempt
        rows = self.rows[better]
        self.y[rows] = answer.y[better].masked_fill(~came[better, None].to(answer.y.device), math.nan).to(self.y.dtype)
        self.ok[rows] = ok[better]

    @property
    def single_rows_work(self) -> bool:
        """Whether a call with several rows raised an error, and every row alone got an output."""
        return self._first_failure > 1 and self._size == 1 and bool(self.ok.all())

    def next_attempt(self) -> Request | None:
        """The next request; None: all rows have outputs, or were asked often enough."""
        failed = (~self._by_unit(self.ok, alone=True).all(1)).nonzero().squeeze(1)  # numbers of units
        if len(failed) == 0 or not self._continues():
            return None
        size, request = self._size, self.request._replace(begun=None)
        self.attempts += 1
        if request.whole:
            return request._replace(attempt=self.attempts - 1)
        if not self.answered:
            failed, size = self._sample(failed), 1
        rows = (failed[:, None] * self._unit + torch.arange(self._unit)).flatten()
        self.rows = rows[rows < len(self.ok)]
        if size == 1:
            self._alone[self.rows] = True
        points, *context = (t[self.rows.to(t.device)] for t in (request.points, *request.context))
        return request._replace(points=points, context=tuple(context), max_rows=size, attempt=self.attempts - 1)

    def _sample(self, failed: Tensor) -> Tensor:
        """The units that are asked while nothing was answered: others each time, at last all that are left."""
        if self._last_chance:
            return failed[~self._by_unit(self._alone, alone=True).all(1)]
        few = min(len(failed), SETTINGS.tried_rows // self._unit)
        self._partial = few < len(failed)
        return failed[(torch.arange(few) * len(failed) // few + self._retry) % len(failed)].sort().values

    def _by_unit(self, rows: Tensor, alone: bool = False) -> Tensor:
        """Booleans of rows [n] as [units, rows in a unit]; `alone` is put beside a last row that has no other."""
        return nn.functional.pad(rows, (0, -len(rows) % self._unit), value=alone).view(-1, self._unit)

    def _continues(self) -> bool:
        """Whether there is a next attempt. Sets the pause before it, and the rows in its calls."""
        self.pause = 0.0
        partial, self._partial = self._partial, False
        if partial and self.answered:  # the others were not asked since
            return True
        if self._last_chance and self.answered:  # so that the rows are at fault, and not the box
            self._last_chance, self._size, self._retry = False, 1, 0
        if self._largest_failure > 1 and self._size > 1 and not self.request.whole:
            self._size = max(1, min(self._size, self._largest_failure) // SETTINGS.division)
            return True
        limit = SETTINGS.nonfinite if self.retries is None and not self._raised else self.retries
        if limit is not None and self._retry >= limit:
            self._last_chance = not (self.answered or self.request.whole or bool(self._alone.all()))
            return self._last_chance
        self._retry += 1
        if self._retry > 1 and self._raised and not self._recorded:  # what a journal tells need not be waited for
            self.pause = min(SETTINGS.first_pause * 2.0 ** min(self._retry - 2, 20), SETTINGS.longest_pause)
        return True
