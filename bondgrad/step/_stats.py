"""Statistics of a layer: what its box has cost, how often it failed, and the last perturbations."""

import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bondgrad.calling._function import RowFunction
from bondgrad.calling._inputs import NOT_FINITE_REMEDY
from bondgrad.errors import BoxError, counted
from bondgrad.evaluators import WorkerStats
from bondgrad.evaluators._record import CallRecord
from bondgrad.policies import Steps
from bondgrad.step._health import HealthReport
from bondgrad.torch_support import _device as device

NOT_SENT = (
    "x is not finite (NaN or infinite) in {rows}, which {were} not sent to the box, since it has limits or a resolution"
)


@dataclass(frozen=True)
class FailureSettings:
    """When it is worth a warning that most rows fail."""

    passes: int = 20  # forward passes in training that are looked at
    share: float = 0.5  # part of their rows that got no finite output


SETTINGS = FailureSettings()


class Stats(NamedTuple):
    """Costs, failures and last steps of a layer. Reading them waits for the device.

    Evaluations are those of forward passes, gradients, trials, structure search, and of rows that were asked again.
    `lower` and `upper` are the bounds between which the policy draws lengths: of `Bond` those of the paper's formulas,
    where lower may exceed upper; of `Calibrated`, `Fixed` and `Optimal` both are the one length of each input; of
    `Gaussian` zero and infinity. `step` is what was drawn, after the policy's own caps and before `limits`. What
    `health` says is described in `HealthReport`, and in docs/training.md with what to do.
    """

    calls: int  # invocations of the function
    evaluations: int  # rows sent to it
    failures: int  # rows without a finite output, after all retries
    seconds: float  # spent in the function; of one that works on an accelerator, until its work was queued
    lower: Tensor | None  # [d] the last step's bounds as the policy's formulas gave them, before any cap
    upper: Tensor | None  # [d]
    step: Tensor | None  # [d] mean size of the last step's perturbations, before limits
    health: HealthReport | None = None  # what the last trial said of the box, where there are trials
    retried: int = 0  # evaluations of rows that were asked again
    wasted: int = 0  # evaluations ahead of a backward pass that never came, or of rows that failed, in all attempts
    recorded: int = 0  # rows that were not evaluated, since a journal had the answer
    errors: Mapping[str, int] = MappingProxyType({})  # rows on which the box raised an error, by its type
    tracebacks: Mapping[str, str] = MappingProxyType({})  # the first error of each type in full
    workers: tuple[WorkerStats, ...] = ()  # what each worker has done

    @property
    def vitals(self) -> HealthReport | None:
        """The former name of `health`."""
        warnings.warn("stats.vitals is called stats.health now: use that", DeprecationWarning, stacklevel=2)
        return self.health


class Trace:
    """The last perturbations of a layer and its failures so far, from which `Stats` are made.

    Args:
        warns: Whether failures are worth a warning.
    """

    def __init__(self, warns: bool = True) -> None:
        self.last: Steps | None = None
        self.answered: tuple[int, Tensor | None] | None = None  # rows of the last forward pass, and which [B] are ok
        self._failures: dict[torch.device, Tensor] = {}  # by device: counting there waits for nothing
        self._not_sent = 0  # rows of x that were not finite
        self._warned = self._warned_of_x = self._warned_of_share = not warns
        self._lately: deque[tuple[int, int]] = deque(maxlen=SETTINGS.passes)  # rows that failed, and all, of each pass

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the last perturbations, which a copy of the layer does not need."""
        return self.__dict__ | {"last": None, "answered": None}

    @property
    def last_ok(self) -> Tensor | None:
        """Which rows [B] of the last forward pass were answered; None: there was none."""
        if self.answered is None:
            return None
        rows, ok = self.answered
        return torch.ones(rows, dtype=torch.bool) if ok is None else ok

    def add_answer(self, limited: bool, training: bool, raises: bool, x: Tensor, ok: Tensor | None) -> None:
        """Take in which rows of a forward pass got outputs, count the others, and raise an error or warn of them.

        Args:
            limited: Whether rows that are not finite were not sent to the box.
            training: Whether the pass is one of training.
            raises: Whether a row without an output is an error.
            x: [B, d] the rows.
            ok: [B] which of them got finite outputs; None: all.
        """
        self.answered, not_sent = (x.shape[0], ok), 0
        if ok is not None:
            not_sent = int((~torch.isfinite(x)).any(1).sum()) if limited else 0
            self.add_failures((~ok).sum(), raises, not_sent)
        if training:
            self.watch_share(0 if ok is None else int((~ok).sum()) - not_sent, x.shape[0])

    def add_failures(self, count: Tensor, raises: bool, not_sent: int = 0) -> None:
        """Count failed rows, and raise an error or warn once. On an accelerator the warning waits for `stats`.

        Args:
            count: How many rows have no finite output.
            raises: Whether that is an error.
            not_sent: How many of them were not sent to the box, since x is not finite there.
        """
        if raises and not_sent > 0:
            raise BoxError(f"{_not_sent(not_sent)}. {NOT_FINITE_REMEDY}")
        if raises and count > 0:
            raise BoxError(
                f"{counted(int(count))} got no finite output. Give limits= within which the box answers, the evaluator "
                "more retries=, or on_failure='degrade' to go on without them."
            )
        if count.device not in self._failures:
            self._failures[count.device] = torch.zeros_like(count)
        self._failures[count.device] += count  # in place, so that a captured graph counts too
        self._not_sent += not_sent
        self._warn_of_x(not_sent)
        if device.reading_is_free(count.device):
            self._warn(int(count) - not_sent)

    def watch_share(self, failed: int, rows: int) -> None:
        """Take in how many rows of a forward pass in training failed, and warn once if most of them do of late."""
        self._lately.append((failed, rows))
        lost, asked = (sum(counts) for counts in zip(*self._lately, strict=True))
        if len(self._lately) < SETTINGS.passes or lost < SETTINGS.share * asked or self._warned_of_share:
            return
        self._warned_of_share = True
        warnings.warn(
            f"{lost / asked:.0%} of the rows of the last {SETTINGS.passes} forward passes got no finite output. The "
            "network before the box learns from the others alone, and nothing leads it back to where the box answers. "
            "Give limits= within which it does.",
            stacklevel=4,
        )

    def stats(self, function: RowFunction, record: CallRecord, health: HealthReport | None) -> Stats:
        """The statistics up to now. Failures that no warning has told of yet are warned of here."""
        last, failures = self.last, sum(int(count) for count in self._failures.values())
        self._warn(failures - self._not_sent)
        lower = upper = step = None
        if last is not None:
            lower, upper, step = last.lower.expand(last.size.shape[2]), last.upper, last.size.mean((0, 1))
            lower, upper, step = lower.cpu(), upper.cpu(), step.cpu()
        return Stats(
            calls=function.calls,
            evaluations=function.evaluations,
            failures=failures,
            seconds=function.seconds,
            lower=lower,
            upper=upper,
            step=step,
            health=health,
            retried=record.retried,
            wasted=record.wasted,
            recorded=record.recorded,
            errors=dict(record.errors),
            tracebacks=dict(record.tracebacks),
            workers=record.workers(),
        )

    def _warn_of_x(self, rows: int) -> None:
        if rows > 0 and not self._warned_of_x:
            self._warned_of_x = True
            warnings.warn(
                f"{_not_sent(rows)}: in training such a row has the mean of the outputs and no gradient, in "
                f"evaluation NaN. box.stats.failures counts them. {NOT_FINITE_REMEDY}",
                stacklevel=4,
            )

    def _warn(self, failures: int) -> None:
        if failures > 0 and not self._warned:
            self._warned = True
            warnings.warn(
                f"{counted(failures)} got no finite output: the gradient does without, and a row of the forward pass "
                "has the mean of the outputs in training, and NaN in evaluation. box.stats.failures counts them. Give "
                "limits= within which the box answers, or the evaluator more retries=.",
                stacklevel=4,
            )


def _not_sent(rows: int) -> str:
    return NOT_SENT.format(rows=counted(rows), were="was" if rows == 1 else "were")
