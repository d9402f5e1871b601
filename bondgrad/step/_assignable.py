"""The parts of a layer that can be exchanged while it is in use: structure, policy, estimator, evaluator."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from bondgrad.calling._inputs import Limits
from bondgrad.errors import chosen, positive_int
from bondgrad.estimators import Central, Estimator, Forward, Simultaneous
from bondgrad.evaluators import Driver, Evaluator, Local
from bondgrad.policies import Bond, Calibrated, MeasuringPolicy, Policy
from bondgrad.step._ahead import check_eager, check_seed
from bondgrad.step._capturable import CapturableLayer
from bondgrad.step._health import HealthMonitor
from bondgrad.structure import Structure
from bondgrad.structure.discovery._tracker import AutoStructure, StructureTracker, resolve

ESTIMATORS: dict[str, Callable[[], Estimator]] = {"central": Central, "forward": Forward, "simultaneous": Simultaneous}
POLICIES: dict[str, Callable[[], Policy]] = {"bond": Bond, "calibrated": Calibrated}


def chooses_readings(policy: Policy, in_features: int) -> bool:
    """Whether the policy says how many readings are taken of every point."""
    return isinstance(policy, MeasuringPolicy) and policy.readings(policy.init(in_features)) is not None


class AssignableLayer(CapturableLayer):
    """The part of `BlackBox` in which its parts are properties: each is assigned as in the constructor.

    A value that is refused leaves the layer as it was.
    """

    fn: Callable[..., Any]
    _seed: int | None
    _structure: Structure  # as it was given
    _structure_given: bool  # and not by the box itself

    @property
    def structure(self) -> Structure:
        """Which outputs depend on which inputs: as it was given, or as it was found out so far."""
        return self._structure if self.tracker is None else self.tracker.structure

    @structure.setter
    def structure(self, structure: "str | Structure | Tensor | np.ndarray | None") -> None:
        self._adopt_structure(structure, self.fn, self.out_features)
        self.function = self.function.replaced(self.fn, self.in_features if self.structure.in_time else None)

    def _adopt_structure(self, structure: Any, fn: Callable[..., Any], width: int | None) -> None:  # noqa: ANN401
        found = resolve(structure, fn)
        known = found.structure({}) if isinstance(found, AutoStructure) else found
        known.check(self.in_features, width)
        self._structure = known
        self._structure_given = structure is not None  # and not by the box itself
        self.tracker = (
            StructureTracker(found, self.in_features, self._seed) if isinstance(found, AutoStructure) else None
        )

    @property
    def policy(self) -> Policy:
        """The policy, which decides how far inputs are moved. One that is assigned begins with its initial state."""
        return self._policy

    @policy.setter
    def policy(self, policy: str | Policy) -> None:
        another: Policy = chosen("policy", policy, POLICIES, Policy)
        before = chooses_readings(self._policy, self.in_features)
        self._check_readings(another, 1 if before else self.repeats)
        self.policy_state.adopt(another)  # which may refuse it
        if before and another is not self._policy:
            self.driver.repeats = 1
        self._policy = another
        self.health, self.eval_start = HealthMonitor(), None

    @property
    def estimator(self) -> Estimator:
        """The estimator, which turns evaluations into the gradient. Steps measured for another are measured again."""
        return self._estimator

    @estimator.setter
    def estimator(self, estimator: str | Estimator) -> None:
        another: Estimator = chosen("estimator", estimator, ESTIMATORS, Estimator)
        check_eager(self.eager, self.memory, another, self.function)
        check_seed(self.function, another, stacklevel=4)
        self._estimator = another
        if isinstance(self.policy, MeasuringPolicy):
            self._forget()

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator, which evaluates rows. One that is assigned goes on with the numbers of requests and counts."""
        return self.driver.evaluator

    @evaluator.setter
    def evaluator(self, evaluator: Evaluator | None) -> None:
        evaluator = Local() if evaluator is None else evaluator
        record = self.driver.record
        self.driver = Driver(evaluator, self.progress, limits=self._limits, repeats=self.repeats, record=record)
        record.forget_workers()

    @property
    def limits(self) -> tuple[Any, Any] | None:
        """The limits of the inputs, as they were given. Steps measured within others are measured again."""
        return None if self._limits is None else self._limits.given

    @limits.setter
    def limits(self, limits: tuple[Any, Any] | None) -> None:
        self._adopt_limits(limits, self.resolution)

    @property
    def resolution(self) -> Any:  # noqa: ANN401
        """The step in which inputs can be set, as it was given. Steps measured with another are measured again."""
        return None if self._limits is None else self._limits.resolution

    @resolution.setter
    def resolution(self, resolution: Any) -> None:  # noqa: ANN401
        self._adopt_limits(self.limits, resolution)

    def _adopt_limits(self, limits: tuple[Any, Any] | None, resolution: Any) -> None:  # noqa: ANN401
        before, after = self._limits, Limits.of(limits, self.in_features, resolution)
        if before is not None and after is not None and before.values() == after.values():
            before.given, before.resolution = limits, resolution
            return  # gradients of earlier forward passes, measured steps and captured steps know limits by identity
        self._limits = self.driver.limits = after
        if isinstance(self.policy, MeasuringPolicy) and after is not before:
            self._forget()

    @property
    def repeats(self) -> int:
        """How many readings are taken at every point. Their mean counts as the answer of the box."""
        return self.driver.repeats

    @repeats.setter
    def repeats(self, repeats: int) -> None:
        self._check_readings(self._policy, positive_int("repeats", repeats))
        self.driver.repeats = int(repeats)

    def _check_readings(self, policy: Policy, repeats: int) -> None:
        if repeats > 1 and chooses_readings(policy, self.in_features):
            raise ValueError(f"{policy} chooses the number of readings: give it, or repeats={repeats}, not both")

    def _forget(self) -> None:
        """Return the policy to its initial state: it has learnt about another box, or for another estimator."""
        self.policy = self.policy
