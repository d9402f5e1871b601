"""What runs leave behind, and how they go on from it.

FOLDER/config.yaml             the experiment, everything resolved
FOLDER/results.json            what all runs have brought
FOLDER/runs/RUN-SEED.jsonl     one line for each epoch
FOLDER/runs/RUN-SEED.json      what the run has brought
FOLDER/runs/RUN-SEED.pt        where it is, until it is done
FOLDER/runs/RUN-SEED.lock      held by the process that is at work on it
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from bondgrad._version import __version__
from bondgrad.experiments.comparison import LOOK
from bondgrad.experiments.config import Experiment, load
from bondgrad.experiments.settings import Settings, slug
from bondgrad.experiments.trainer import Run

try:
    import fcntl
except ImportError:  # Windows: two commands at work on the same run are not noticed there
    fcntl = None  # type: ignore[assignment]


class Store:
    """A folder for one experiment.

    Args:
        folder: Made if need be.
        experiment: Whose runs; all of them, also those of other commands.
        command: That a person would type for them.
        tensorboard: Whether to write event files as well.
        chosen: The runs that this command makes, with its options. None: all, as they are.
    """

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        command: str,
        tensorboard: bool = False,
        chosen: Experiment | None = None,
    ) -> None:
        self.folder, self.experiment, self.command = folder, experiment, command
        self.chosen = experiment if chosen is None else chosen
        self.tensorboard = _summary_writer() if tensorboard else None
        names = [slug(run.run) for run in experiment.runs]
        if len(set(names)) < len(names):
            raise ValueError("two runs have names that would be the same file: " + ", ".join(sorted(names)))
        self._refuse_other_settings()
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        self._writers: dict[tuple[str, int], Any] = {}
        self._open = contextlib.ExitStack()  # what is to be closed in the end: locks and writers

    def _refuse_other_settings(self) -> None:
        """Before anything is changed: what was made with other settings must not be mixed with what is to come."""
        for run in self.chosen.runs:
            for path in (self.folder / "runs").glob(f"{slug(run.run)}-*.json"):
                record = _read(path, "run", "settings")
                if record["run"] == run.run:
                    _same(record["settings"], run.as_dict(), path)
        there = self.folder / "results.json"
        known = {run.run: fingerprint(run.as_dict()) for run in self.chosen.runs}
        for record in _read(there, "runs")["runs"] if there.exists() else []:
            if record["run"] in known and record["fingerprint"] != known[record["run"]]:
                words = f"{record['run']}, seed {record['seed']}, {record['epochs']} epochs"
                raise ValueError(f"{there} has results of other settings ({words}). Give another --output.")

    def close(self) -> None:
        """Let others work on the runs."""
        self._open.close()

    def path(self, run: str, seed: int, ending: str) -> Path:
        """Of a file of one run."""
        return self.folder / "runs" / f"{slug(run)}-{seed}.{ending}"

    def finished(self, run: str, seed: int) -> dict[str, Any] | None:
        """What a run has brought, if there is nothing left to do."""
        path = self.path(run, seed, "json")
        record = _read(path, "epochs", "epochs_run", "failed") if path.exists() else None
        if record is None or (record["epochs_run"] < record["epochs"] and record["failed"] is None):
            return None
        self.path(run, seed, "pt").unlink(missing_ok=True)  # a process may have been killed just before it did so
        return record

    def borrow(self, settings: Settings, seed: int) -> str | None:
        """Take over a finished run with another name but the same settings, from another experiment's results nearby.

        A table and a figure of the paper may rest on the same training.

        Returns:
            Where it came from, in words; None if there is none.
        """
        how = settings.as_dict()
        for folder, record in self._of_others:
            # Only what is alike at a glance is worth a closer look: a sweep has hundreds of runs.
            alike = (record["seed"], record["method"], record["epochs"]) == (
                seed,
                settings.gradient.method,
                settings.epochs,
            )
            if not alike or record["fingerprint"] != fingerprint(how | {"run": record["run"], "at": record["at"]}):
                continue
            if record["trace"] or not self._traced(settings.run):
                source = f"{folder}, {record['run']}"
                own = {"run": settings.run, "at": settings.at, "settings": how, "same_as": source}
                _write(self.path(settings.run, seed, "json"), json.dumps(record | own, indent=1) + "\n")
                return source
        return None

    @functools.cached_property
    def _of_others(self) -> list[tuple[str, dict[str, Any]]]:
        """The finished runs of experiments of another name in the folders beside this one, each with its folder."""
        found = []
        for path in sorted(self.folder.resolve().parent.glob("*/results.json")):
            with contextlib.suppress(ValueError):  # whatever is wrong with a file is no concern of this experiment
                results = _read(path, "name", "runs")
                if results["name"] != self.experiment.name:
                    done = [r for r in results["runs"] if r["epochs_run"] == r["epochs"] and r["failed"] is None]
                    found += [(path.parent.name, record) for record in done]
        return found

    def lock(self, run: str, seed: int) -> bool:
        """Keep other commands away from a run, until `close` or for as long as this process lives; False: one has it.

        Whatever a command that was killed was in the middle of writing is removed.
        """
        if fcntl is not None:
            file = self.path(run, seed, "lock").open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return False
            self._open.enter_context(file)
        for ending in ("json", "jsonl", "pt"):
            path = self.path(run, seed, ending)
            for part in path.parent.glob(f"{path.name}.*.part"):
                part.unlink(missing_ok=True)
        return True

    def resume(self, run: Run) -> bool:
        """Go on where an earlier process was, if there was one."""
        path = self.path(run.settings.run, run.seed, "pt")
        found = path.exists()
        if found:
            try:
                state = torch.load(path, map_location=run.device, weights_only=True)
            except Exception as error:  # whatever it may be
                raise ValueError(f"{path} is not a checkpoint: move it away ({error})") from error
            if not isinstance(state, dict) or "settings" not in state:
                raise ValueError(f"{path} is not a checkpoint: move it away")
            _same(state["settings"], run.settings.as_dict(), path)
            if state.get("columns") != list(LOOK):
                raise ValueError(f"{path} was begun by another version of bondgrad: move it away")
            if state["device"] != run.device.type:
                raise ValueError(f"{path} was begun on {state['device']}: give --device {state['device']}")
            run.load(state)
        self._lines(run)  # of epochs after the checkpoint none is left
        return found

    def save(self, run: Run) -> None:
        """Leave a checkpoint; at no moment is there none."""
        with _replacing(self.path(run.settings.run, run.seed, "pt"), "wb") as file:
            torch.save(run.state(), file)
        self._record(run)

    def epoch(self, run: Run) -> None:
        """An epoch is over: write down what it brought. The record comes last, since it says that all is done."""
        self._lines(run)
        if run.failed is None and self.tensorboard is not None:
            self._to_tensorboard(run)
        self._record(run)
        if run.done:
            self.path(run.settings.run, run.seed, "pt").unlink(missing_ok=True)
            self.results()

    def _record(self, run: Run) -> None:
        record = run.record() | self._circumstances(run) | {"settings": run.settings.as_dict()}
        _write(self.path(run.settings.run, run.seed, "json"), json.dumps(record, indent=1) + "\n")

    def _lines(self, run: Run) -> None:
        lines = "".join(json.dumps(entry) + "\n" for entry in run.history)
        _write(self.path(run.settings.run, run.seed, "jsonl"), lines)

    def _to_tensorboard(self, run: Run) -> None:
        key, entry = (run.settings.run, run.seed), run.history[-1]
        if key not in self._writers:
            assert self.tensorboard is not None
            where = self.folder / "runs" / "tensorboard" / f"{slug(run.settings.run)}-{run.seed}"
            self._writers[key] = self._open.enter_context(self.tensorboard(where, purge_step=run.epoch))
        for name, value in entry.items():
            if value is not None and name not in ("epoch", "step"):
                self._writers[key].add_scalar(name, value, entry["epoch"])
        self._writers[key].flush()

    def _circumstances(self, run: Run) -> dict[str, Any]:
        gpu = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else None
        threads = torch.get_num_threads()
        return {
            "command": self.command,
            "bondgrad": __version__,
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)}",
            "gpu": gpu,
        }

    def results(self, lines: list[dict[str, Any]] | None = None) -> None:
        """Put together what all runs have brought, those of earlier commands as well, and write it."""
        with self._alone():
            self._put_together(lines)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other command changes what all runs of the folder share."""
        with (self.folder / "runs" / "results.lock").open("w") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _put_together(self, lines: list[dict[str, Any]] | None) -> None:
        path = self.folder / "results.json"
        old = _read(path, "runs", "lines") if path.exists() else {"runs": [], "lines": None}
        records = {(record["run"], record["seed"]): record for record in old["runs"]}
        for file in sorted((self.folder / "runs").glob("*.json")):
            record = _read(file, "run", "seed", "settings")
            record["fingerprint"] = fingerprint(record.pop("settings"))
            if not self._traced(record["run"]):
                record["trace"] = None  # most of what there is, and nobody would look at it
            records[record["run"], record["seed"]] = record
        order = {run.run: i for i, run in enumerate(self.experiment.runs)}
        listed = sorted(records.values(), key=lambda record: (order.get(record["run"], len(order)), record["run"]))
        results = {"name": self.experiment.name, "lines": lines or old["lines"], "runs": listed}
        text = json.dumps(_rounded(results), separators=(",", ":")).replace('{"run"', '\n{"run"')  # a line for each
        _write(path, text + "\n")

    def _traced(self, run: str) -> bool:
        """Whether a figure shows the steps of a run one by one."""
        figures = self.experiment.shown.get("figures") or []
        of = [figure.get("runs") for figure in figures if figure["kind"] in ("bounds", "magnitudes")]
        return any(not runs or run in runs for runs in of)

    def config(self) -> None:
        """Write down the experiment: the chosen runs, and others as earlier commands had them, or else their file."""
        path = self.folder / "config.yaml"
        with self._alone():
            runs = {run.run: run for run in self.experiment.runs}
            runs |= {run.run: run for run in (load(path).runs if path.exists() else ()) if run.run in runs}
            runs |= {run.run: run for run in self.chosen.runs}
            whole = replace(self.experiment, runs=tuple(runs.values()), seeds=self.chosen.seeds)
            text = yaml.safe_dump(whole.as_dict(), sort_keys=False, allow_unicode=True, width=120)
            _write(path, text)


def fingerprint(settings: dict[str, Any]) -> str:
    """Of a run's settings: the same for the same, in whichever order they come."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _same(there: dict[str, Any], here: dict[str, Any], path: Path) -> None:
    """Refuse to go on with something else."""
    names = sorted(name for name in here.keys() | there.keys() if there.get(name) != here.get(name))
    if names:
        differences = "; ".join(f"{name} was {there.get(name)!r}, is {here.get(name)!r}" for name in names)
        raise ValueError(f"{path} was made with other settings ({differences}). Give another --output.")


def _summary_writer() -> Any:  # noqa: ANN401
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--tensorboard needs a package: pip install tensorboard") from error
    return SummaryWriter


def _read(path: Path, *needed: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not set(needed) <= set(content):
            raise ValueError(f"it must have {', '.join(needed)}")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} could not be read: {error}. Remove it to begin anew.") from error
    return content


def _write(path: Path, text: str) -> None:
    with _replacing(path, "w") as file:
        file.write(text)


@contextlib.contextmanager
def _replacing(path: Path, mode: str) -> Any:  # noqa: ANN401
    """A file that takes the place of another one when it is all there, on the disk as well."""
    half_written = path.with_name(f"{path.name}.{os.getpid()}.part")  # another command may be writing the same file
    try:
        with half_written.open(mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        half_written.replace(path)
    finally:
        half_written.unlink(missing_ok=True)  # of a disk that is full, it would be the last straw


def _rounded(value: Any) -> Any:  # noqa: ANN401
    """Six digits are enough to look at, and keep files small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
