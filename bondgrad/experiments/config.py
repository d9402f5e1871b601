"""Experiments as files: what is trained, in which ways, and what the paper says of it."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from bondgrad.experiments.settings import (
    Gradient,
    Optimizer,
    Part,
    Reading,
    Schedule,
    Settings,
    is_finite,
    one_of,
    whole_number,
)

PAPER = Path(__file__).parent / "paper"
SHOWN = ("title", "says", "notes", "paper", "tables", "figures")  # for the report, which checks them


@dataclass(frozen=True)
class Experiment:
    """A set of runs, and what is to be shown of them."""

    name: str
    runs: tuple[Settings, ...]
    seeds: tuple[int, ...]
    shown: dict[str, Any]
    planned: dict[str, Any]  # as the file has it: seeds; epochs, steps and precision by run
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
    document = _document(path)
    if "same_runs_as" in document:  # a figure and a table may come from the same runs
        path = path.with_name(f"{document['same_runs_as']}.yaml")
        document = _document(path)
    try:
        return _experiment(document, path.stem)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:  # whatever shape it should not have
        raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error


def _document(path: Path) -> dict[str, Any]:
    try:
        document = yaml.load(path.read_text(), Loader=_Loader)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} could not be read: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} must have names and values, such as the file in docs/experiments.md")
    return document


def _experiment(document: dict[str, Any], name: str) -> Experiment:
    shown = {key: value for key in SHOWN if (value := document.pop(key, None)) is not None}
    planned = document.pop("planned", None)  # as in the config.yaml of results, which may be run again
    name, seeds = document.pop("name", name), document.pop("seeds", [42])
    if not isinstance(seeds, list) or not seeds or len(set(map(str, seeds))) < len(seeds):
        raise ValueError(f"seeds must be a list of different whole numbers, got {seeds!r}")
    for seed in seeds:
        whole_number("seeds", seed, 0)
    sweep, listed, grid = document.pop("sweep", None), document.pop("runs", {}) or {}, document.pop("grid", [])
    _mapping("runs", listed)
    named = [(run, override or {}) for run, override in listed.items()]
    named += [pair for block in grid for pair in _grid(block)]
    if not named and not sweep:
        raise ValueError("there are no runs: list some under runs, or give a sweep")
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
        place = {name: value if is_finite(value) else str(value) for name, value in at.items()}
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
    if values.get("gradient", {}).get("evaluator") is not None:
        _mapping(f"{run}, evaluator", values["gradient"]["evaluator"])
    if "reading" in values.get("gradient", {}):
        reading = _mapping(f"{run}, reading", values["gradient"]["reading"])
        values["gradient"] = values["gradient"] | {"reading": Reading(**_known(Reading, reading, f"{run}, reading"))}
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


def _mapping(what: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must have names and values, as in {{kind: ...}}, got {value!r}")
    return value


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
