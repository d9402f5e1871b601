"""Experiments as files: what is trained, in which ways, and what the paper says of it."""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

PAPER = Path(__file__).parent / "paper"
METHODS = ("AD", "BOND", "BONDS", "forward", "SPSA")
LOSSES = {
    "california_housing": "huber",
    "fashion_mnist": "cross_entropy",
    "cifar10": "cross_entropy",
    "cifar100": "cross_entropy",
}
ROWS = {"california_housing": 16_512, "fashion_mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}  # to train on
PRECISIONS = ("float32", "bfloat16")
SHOWN = ("title", "says", "notes", "paper", "tables", "figures")  # for the report, which checks them
Part = dict[str, Any]  # {kind: ..., and its arguments}


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
    """

    method: str = "BOND"
    policy: Part = field(default_factory=lambda: {"kind": "bond"})
    noise: float | str | None = None
    normalize_rows: bool = False
    n: int = 1
    mu: float = 1e-3
    graphs: int = 1


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
    at: dict[str, float] = field(default_factory=dict)  # place in a grid

    def __post_init__(self) -> None:
        """Refuse what would only show after hours."""
        how, optimizer, schedule = self.gradient, self.optimizer, self.schedule
        one_of("method", how.method, METHODS)
        one_of("data", self.data, LOSSES)
        one_of(f"loss of {self.data}", self.loss, (LOSSES[self.data],))
        one_of("precision", self.precision, PRECISIONS)
        one_of("optimizer", optimizer.kind, ("adam", "sgd"))
        _whole("batch", self.batch, 1)
        _whole("epochs", self.epochs, 1)
        _whole("measure_every", self.measure_every, 0)
        _whole("n", how.n, 1)
        if self.steps is not None:
            _whole("steps", self.steps, 1)
        one_of("graphs", how.graphs, (1, 2))
        for name, flag in (("graph", self.graph), ("normalize_rows", how.normalize_rows)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be true or false, got {flag!r}")
        if not _is_finite(how.mu) or how.mu <= 0:
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
        if not self.box and self.gradient.method != "AD":
            raise ValueError(
                f"{self.run}: without a box there is nothing for {self.gradient.method} to do, only for AD"
            )

    @property
    def cut(self) -> bool:
        """Whether an epoch is to have fewer steps than the data have batches."""
        return self.steps is not None and self.steps < ROWS[self.data] // self.batch

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


@dataclass(frozen=True)
class Experiment:
    """A set of runs, and what is to be shown of them."""

    name: str
    runs: tuple[Settings, ...]
    seeds: tuple[int, ...]
    shown: dict[str, Any]
    planned: dict[str, Any]  # seeds, and epochs by run, as the file has them
    sweep: Part | None = None  # of a device: no training at all

    def only(self, names: Iterable[str]) -> "Experiment":
        """Those runs; a name may have * for anything."""
        kept = set()
        for name in names:
            found = {run.run for run in self.runs if name == run.run or fnmatchcase(run.run, name)}
            if not found:
                raise ValueError(f"no run is called {name!r}; there are {', '.join(r.run for r in self.runs)}")
            kept |= found
        return replace(self, runs=tuple(run for run in self.runs if run.run in kept))

    def changed(self, seeds: Iterable[int] = (), **settings: Any) -> "Experiment":  # noqa: ANN401
        """With other seeds or settings, where they are given."""
        given = {name: value for name, value in settings.items() if value is not None}
        runs = tuple(replace(run, **given) for run in self.runs)
        return replace(self, runs=runs, seeds=tuple(dict.fromkeys(seeds)) or self.seeds)

    def as_dict(self) -> dict[str, Any]:
        """For a file: everything resolved."""
        runs = {run.run: {k: v for k, v in run.as_dict().items() if k != "run"} for run in self.runs}
        rest = {"sweep": self.sweep} if self.sweep else {}
        seeds = {"seeds": list(self.seeds), "planned": self.planned}
        return {"name": self.name, **self.shown, **seeds, **rest, "runs": runs}


def names() -> list[str]:
    """Of the paper's results."""
    return sorted(path.stem for path in PAPER.glob("*.yaml"))


def load(path: Path) -> Experiment:
    """An experiment from its file."""
    try:
        document = yaml.load(path.read_text(), Loader=_Loader)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} could not be read: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} must have names and values, such as the file in docs/experiments.md")
    try:
        if "same_runs_as" in document:  # a figure and a table may come from the same runs
            other = path.with_name(f"{document['same_runs_as']}.yaml")
            document = yaml.load(other.read_text(), Loader=_Loader)
            return _experiment(document, other.stem)
        return _experiment(document, path.stem)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:  # whatever shape it should not have
        raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error


def _experiment(document: dict[str, Any], name: str) -> Experiment:
    shown = {key: value for key in SHOWN if (value := document.pop(key, None)) is not None}
    planned = document.pop("planned", None)  # as in the config.yaml of results, which may be run again
    name, seeds = document.pop("name", name), document.pop("seeds", [42])
    if not isinstance(seeds, list) or not seeds or len(set(map(str, seeds))) < len(seeds):
        raise ValueError(f"seeds must be a list of different whole numbers, got {seeds!r}")
    for seed in seeds:
        _whole("seeds", seed, 0)
    sweep, listed, grid = document.pop("sweep", None), document.pop("runs", {}) or {}, document.pop("grid", [])
    _mapping("runs", listed)
    named = [(run, override or {}) for run, override in listed.items()]
    named += [pair for block in grid for pair in _grid(block)]
    if not named and not sweep:
        raise ValueError("there are no runs")
    if wrong := [run for run, _ in named if not isinstance(run, str)]:
        raise ValueError(f"the name of a run must be text, got {wrong[0]!r}: put it into quotes")
    runs = tuple(_settings(run, _merged(document, _mapping(run, override))) for run, override in named)
    shown = {"title": name, **shown}
    if "tables" not in shown and "figures" not in shown:
        shown |= _plain_view(runs)
    planned = planned or {
        "seeds": seeds,
        "epochs": {run.run: run.epochs for run in runs},
        "steps": {run.run: run.steps if run.cut else None for run in runs},
        "precision": {run.run: run.precision for run in runs},
    }
    return Experiment(name, runs, tuple(seeds), shown, planned, sweep)


def _plain_view(runs: tuple[Settings, ...]) -> dict[str, Any]:
    """A table and curves, where a file does not say what is to be shown."""
    y = "accuracy" if any(run.loss == "cross_entropy" for run in runs) else "test_loss"
    columns = [y, "sign_accuracy", "loop_ms", "evaluations_per_step"]
    return {
        "tables": [{"columns": columns, "rows": [{"run": run.run} for run in runs]}],
        "figures": [{"kind": "curves", "title": "On the test set", "y": y, "runs": [run.run for run in runs]}],
    }


def _grid(block: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """One run for each combination of the values of `axes`; $NAME stands for a value, $NAME/2 for half of it."""
    axes = block["axes"]
    for values in itertools.product(*axes.values()):
        at = dict(zip(axes, values, strict=True))
        # As a report can show it: a list, or nothing at all, is a word there.
        place = {name: value if _is_finite(value) else str(value) for name, value in at.items()}
        yield block["name"].format(**at), _filled(block["run"], at) | {"at": place}


def _filled(value: Any, at: dict[str, Any]) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {key: _filled(item, at) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, at) for item in value]
    found = re.fullmatch(r"\$(\w+)(/2)?", value) if isinstance(value, str) else None
    if found is None:
        return value
    one_of("$NAME", found[1], at)
    return at[found[1]] / 2 if found[2] else at[found[1]]


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, part by part; a part of another kind takes the place of the old one."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        same = isinstance(old, dict) and isinstance(value, dict) and value.get("kind") in (None, old.get("kind"))
        result[key] = _merged(old, value) if same and old is not None else value
    return result


def _settings(run: str, values: dict[str, Any]) -> Settings:
    """Checked: a name that nothing knows is a mistake."""
    values = dict(values)
    if "policy" in _mapping(f"{run}, gradient", values.get("gradient", {})):
        policy = _mapping(f"{run}, policy", values["gradient"]["policy"])
        values["gradient"] = values["gradient"] | {"policy": {"kind": "bond", **policy}}
    for name in ("read_in", "read_out", *["box"] * (values.get("box") is not None)):
        _mapping(f"{run}, {name}", values.get(name))
    kinds: dict[str, Any] = {"gradient": Gradient, "optimizer": Optimizer, "schedule": Schedule}
    for name, kind in kinds.items():
        if name in values:
            given = _known(kind, _mapping(f"{run}, {name}", values[name]), f"{run}, {name}")
            values[name] = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    values = _known(Settings, values, run)
    if missing := {"data", "loss", "batch", "epochs"} - set(values):
        raise ValueError(f"{run}: {', '.join(sorted(missing))} must be given")
    return Settings(run=run, **values)


def _known(kind: type, values: dict[str, Any], where: str) -> dict[str, Any]:
    known = [f.name for f in fields(kind) if f.name != "run"]
    unknown = set(values) - set(known)
    if unknown:
        raise ValueError(f"{where}: nothing is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return values


def one_of(what: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse any other."""
    allowed = list(allowed)
    if value not in allowed or isinstance(value, bool):
        words = ", ".join(map(str, allowed))
        raise ValueError(f"{what} must be {'one of ' * (len(allowed) > 1)}{words}, got {value!r}")


def _whole(what: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ValueError(f"{what} must be a whole number, {least} or more, got {value!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _not_negative(what: str, value: Any) -> None:  # noqa: ANN401
    if not _is_finite(value) or value < 0:
        raise ValueError(f"{what} must be zero or a positive number, got {value!r}")


def _mapping(what: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must have names and values, as in {{kind: ...}}, got {value!r}")
    return value


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Lists instead of tuples, which YAML does not know."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, as everybody but YAML 1.1 does, and refuses a name that comes twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # noqa: ANN401
        """As it is, but no value takes the place of another."""
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"{name!r} is there twice, {str(node.start_mark).strip()}")
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf)$|^\.(nan|NaN)$"),
    list("-+0123456789."),
)
