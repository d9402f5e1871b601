"""All that decides how a run goes, checked."""

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

ESTIMATED = ("BOND", "BONDS", "forward")  # methods that estimate the gradient at the box's inputs
METHODS = ("AD", *ESTIMATED, "SPSA")
EVALUATORS = ("local", "threads", "processes", "ray", "dask", "umbridge")
LOSSES = {
    "california_housing": "huber",
    "fashion_mnist": "cross_entropy",
    "cifar10": "cross_entropy",
    "cifar100": "cross_entropy",
}
ROWS = {"california_housing": 16_512, "fashion_mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}  # to train on
PRECISIONS = ("float32", "bfloat16")
Part = dict[str, Any]  # {kind: ..., and its arguments}


@dataclass(frozen=True)
class Reading:
    """How the paper is read where it can be read in more than one way. The defaults are what the library does.

    Attributes:
        perturbations: "per-row": each row of a batch has perturbations of its own. "shared": all rows have the same.
        bonds: "contracted": BONDS estimates gy·(Y⁺ - Y⁻) / (x⁺ - x⁻), a gradient for any box. "elementwise": the
            quotient (Y⁺ - Y⁻) / (x⁺ - x⁻) is multiplied by gy element by element, as the paper's Algorithm is written,
            which needs as many outputs as inputs.
        normalize: Where rows are normalised: "after" or "before" the contraction with gy. Before it, a row is the
            estimated Jacobian of one sample; the policy then learns from what is normalised.
        mean: Of several perturbations (n > 1): "weighted" by the square of the step, or "plain", as in the paper.
        eta: The learning rate in Adam's bound: "constant", or "scheduled" as the optimizer's.
        error_terms: The upper bound with all error terms: "plain" as in its equation, or "scaled" by α_t = max |m̂|.
        least_step: Whether a few units of the rounding of its input are added to every step.
    """

    perturbations: str = "per-row"
    bonds: str = "contracted"
    normalize: str = "after"
    mean: str = "weighted"
    eta: str = "constant"
    error_terms: str = "plain"
    least_step: bool = True

    def __post_init__(self) -> None:
        """Refuse what is not one of the readings."""
        one_of("perturbations", self.perturbations, ("per-row", "shared"))
        one_of("bonds", self.bonds, ("contracted", "elementwise"))
        one_of("normalize", self.normalize, ("after", "before"))
        one_of("mean", self.mean, ("weighted", "plain"))
        one_of("eta", self.eta, ("constant", "scheduled"))
        one_of("error_terms", self.error_terms, ("plain", "scaled"))
        if not isinstance(self.least_step, bool):
            raise ValueError(f"least_step must be true or false, got {self.least_step!r}")

    def changes(self) -> dict[str, Any]:
        """What is not as the library does it."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True)
class Gradient:
    """How the read-in gets its gradient.

    Attributes:
        method: One of `METHODS`. "forward" is BOND with forward differences.
        policy: {kind: bond | calibrated | gaussian | fixed | optimal, and its arguments}.
        noise: Half-width of the box's noise, as BOND is told; None: rounding only; "auto": measured.
        normalize_rows: Scale each row of the estimate to norm 1.
        n: Perturbations, for BONDS and SPSA.
        mu: Size of SPSA's perturbations.
        graphs: 1: one computational graph from data to loss; 2: one for the read-in, and one from the box on.
        structure: None: what the box declares about itself. "dense": every output may depend on every input.
        evaluator: {kind: one of `EVALUATORS`, and its arguments}. None: in this process. With `journal`, the name of a
            folder, every evaluation is written into a file there, one for each run and seed.
        reading: How the paper is read.
    """

    method: str = "BOND"
    policy: Part = field(default_factory=lambda: {"kind": "bond"})
    noise: float | str | None = None
    normalize_rows: bool = False
    n: int = 1
    mu: float = 1e-3
    graphs: int = 1
    structure: str | None = None
    evaluator: Part | None = None
    reading: Reading = field(default_factory=Reading)

    @property
    def without_effect(self) -> str | None:
        """The option of the reading, if there is one, that changes nothing here, with what it would need."""
        reading = self.reading
        if self.method != "BONDS" and (reading.bonds, reading.mean) != ("contracted", "weighted"):
            return f"bonds and mean are readings of BONDS, not of {self.method}: leave them out"
        if reading.normalize == "before" and not (self.normalize_rows and self.method in ("BOND", "BONDS")):
            return "normalize: before needs normalize_rows: true, and BOND or BONDS"
        if reading.eta == "scheduled" and (self.policy.get("bounds") != "adam" or "eta" in self.policy):
            return "eta: scheduled needs a policy with bounds: adam and no eta of its own"
        return None


@dataclass(frozen=True)
class Schedule:
    """Factors of the learning rate: each holds up to a part of the epochs, the last one from there on.

    As the paper writes them, the first ends before its part of the epochs and the others end with it.
    """

    until: tuple[float, ...] = ()
    factors: tuple[float, ...] = (1.0,)

    def __call__(self, epoch: int, epochs: int) -> float:
        """The factor for an epoch, the first being 0."""
        for i, (until, factor) in enumerate(zip(self.until, self.factors, strict=False)):
            end = round(until * epochs, 9)  # 0.58 of 100 is 58
            if epoch < end or (i > 0 and epoch == end):
                return factor
        return self.factors[-1]


@dataclass(frozen=True)
class Optimizer:
    """Adam or SGD, with rates for the networks before and behind the box."""

    kind: str = "adam"
    rate: float = 1e-3
    read_out_rate: float | None = None  # None: the same


@dataclass(frozen=True)
class Settings:
    """All that decides how one run goes, but for the seed."""

    run: str  # its name
    data: str
    loss: str
    batch: int
    epochs: int
    read_in: Part
    read_out: Part
    box: Part | None = None
    gradient: Gradient = field(default_factory=Gradient)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    steps: int | None = None  # of an epoch; None: until the data are used up
    measure_every: int = 1  # steps between looks at the exact gradient; 0: never
    precision: str = "float32"  # of the networks; the box always has float32
    graph: bool = True  # capture steps where there is a GPU
    compile: bool = False  # the networks, by torch.compile; the box stays as it is
    at: dict[str, float] = field(default_factory=dict)  # place in a grid

    def __post_init__(self) -> None:
        """Refuse what would only show after hours."""
        how, optimizer, schedule = self.gradient, self.optimizer, self.schedule
        one_of("method", how.method, METHODS)
        one_of("data", self.data, LOSSES)
        one_of(f"loss of {self.data}", self.loss, (LOSSES[self.data],))
        one_of("precision", self.precision, PRECISIONS)
        one_of("optimizer", optimizer.kind, ("adam", "sgd"))
        whole_number("batch", self.batch, 1)
        whole_number("epochs", self.epochs, 1)
        whole_number("measure_every", self.measure_every, 0)
        whole_number("n", how.n, 1)
        if self.steps is not None:
            whole_number("steps", self.steps, 1)
        one_of("graphs", how.graphs, (1, 2))
        one_of("structure", how.structure, (None, "dense"))
        for name, flag in (
            ("graph", self.graph),
            ("compile", self.compile),
            ("normalize_rows", how.normalize_rows),
        ):
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be true or false, got {flag!r}")
        if not is_finite(how.mu) or how.mu <= 0:
            raise ValueError(f"mu must be a positive number, got {how.mu!r}")
        _not_negative("rate", optimizer.rate)
        if optimizer.read_out_rate is not None:
            _not_negative("read_out_rate", optimizer.read_out_rate)
        for name, numbers in (("until", schedule.until), ("factors", schedule.factors)):
            if not isinstance(numbers, tuple):
                raise ValueError(f"{name} of a schedule must be a list, got {numbers!r}")
            for number in numbers:
                _not_negative(name, number)
        if list(schedule.until) != sorted(schedule.until) or max(schedule.until, default=0) > 1:
            raise ValueError(f"until must be parts of the epochs, from 0 to 1, in order, got {list(schedule.until)}")
        if len(schedule.factors) != len(schedule.until) + 1:
            raise ValueError(
                f"a schedule has one factor more than parts, got {len(schedule.factors)} for {len(schedule.until)}"
            )
        _check_evaluator(self)
        if problem := how.without_effect:
            raise ValueError(f"{self.run}: {problem}")
        if how.reading.eta == "scheduled" and not all(schedule.factors):
            raise ValueError(f"{self.run}: eta: scheduled needs factors above zero, got {list(schedule.factors)}")
        if not self.box and self.gradient.method != "AD":
            raise ValueError(
                f"{self.run}: without a box there is nothing for {self.gradient.method} to do, only for AD"
            )

    @property
    def cut(self) -> bool:
        """Whether an epoch is to have fewer steps than the data have batches."""
        return self.steps is not None and self.steps < ROWS[self.data] // self.batch

    def as_dict(self) -> dict[str, Any]:
        """For a file.

        Options that came with a later version are left out at their defaults, so that earlier results stay valid.
        """
        plain: dict[str, Any] = _plain(asdict(self))
        gradient = plain["gradient"]
        gradient["reading"] = self.gradient.reading.changes()
        for holder, name in (
            (gradient, "reading"),
            (gradient, "structure"),
            (gradient, "evaluator"),
            (plain, "compile"),
        ):
            if not holder[name]:
                del holder[name]
        return plain


def _check_evaluator(settings: Settings) -> None:
    """Refuse an evaluator that would do something else than what is meant."""
    how, box = settings.gradient, settings.box or {}
    if how.evaluator is None:
        return
    one_of("kind of an evaluator", how.evaluator.get("kind"), EVALUATORS)
    if not isinstance(how.evaluator.get("journal", ""), str):
        raise ValueError(f"journal must be the name of a folder, got {how.evaluator['journal']!r}")
    if how.method not in ESTIMATED:
        raise ValueError(
            f"{settings.run}: an evaluator is for {', '.join(ESTIMATED)}, not for {how.method}: say evaluator: null"
        )
    if how.evaluator["kind"] != "local" and (box.get("noise") or box.get("bench") is not None):
        raise ValueError(
            f"{settings.run}: a box with noise or a bench answers one row after the other, so that a run can be "
            "repeated: say evaluator: {kind: local}"
        )


def slug(name: str) -> str:
    """A name for a file."""
    return re.sub(r"[^\w.+=-]+", "_", name)


def one_of(what: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse any other."""
    allowed = list(allowed)
    if value not in allowed or isinstance(value, bool):
        words = ", ".join(map(str, allowed))
        raise ValueError(f"{what} must be {'one of ' * (len(allowed) > 1)}{words}, got {value!r}")


def whole_number(what: str, value: object, least: int) -> None:
    """Refuse anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ValueError(f"{what} must be a whole number, {least} or more, got {value!r}")


def is_finite(value: object) -> bool:
    """Whether it is a number, and not an infinite one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _not_negative(what: str, value: Any) -> None:  # noqa: ANN401
    if not is_finite(value) or value < 0:
        raise ValueError(f"{what} must be zero or a positive number, got {value!r}")


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Lists instead of tuples, which YAML does not know."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
