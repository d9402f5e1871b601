"""What runs leave behind, and how they go on from it.

FOLDER/config.yaml        the experiment, everything resolved
FOLDER/results.json       what all runs have brought
FOLDER/runs/RUN-SEED.jsonl     one line for each epoch
FOLDER/runs/RUN-SEED.json      what the run has brought
FOLDER/runs/RUN-SEED.pt        where it is, until it is done
"""

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
import yaml

from bondgrad._version import __version__
from bondgrad.experiments.config import Experiment
from bondgrad.experiments.trainer import Run


class Store:
    """A folder for one experiment.

    Args:
        folder: Made if need be.
        experiment: Whose runs; all of them, also those of other commands.
        command: That a person would type for them.
        tensorboard: Whether to write event files as well.
    """

    def __init__(self, folder: Path, experiment: Experiment, command: str, tensorboard: bool = False) -> None:
        self.folder, self.experiment, self.command, self.tensorboard = folder, experiment, command, tensorboard
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        names = [slug(run.run) for run in experiment.runs]
        if len(set(names)) < len(names):
            raise ValueError("two runs have names that would be the same file: " + ", ".join(sorted(names)))
        self._writers: dict[tuple[str, int], Any] = {}

    def path(self, run: str, seed: int, ending: str) -> Path:
        """Of a file of one run."""
        return self.folder / "runs" / f"{slug(run)}-{seed}.{ending}"

    def finished(self, run: str, seed: int, settings: dict[str, Any]) -> bool:
        """Whether there is nothing left to do. Refuses what was made with other settings."""
        path = self.path(run, seed, "json")
        if not path.exists():
            return False
        record = _read(path)
        _same(record["settings"], settings, path)
        return bool(record["epochs_run"] >= record["epochs"] or record["failed"])

    def resume(self, run: Run) -> bool:
        """Go on where an earlier process was, if there was one."""
        path = self.path(run.settings.run, run.seed, "pt")
        found = path.exists()
        if found:
            try:
                state = torch.load(path, map_location=run.device, weights_only=True)
            except Exception as error:  # whatever it may be
                raise ValueError(f"{path} is not a checkpoint: move it away ({error})") from error
            _same(state["settings"], run.settings.as_dict(), path)
            run.load(state)
        lines = "".join(json.dumps(entry) + "\n" for entry in run.history)
        self.path(run.settings.run, run.seed, "jsonl").write_text(lines)  # of epochs after the checkpoint none is left
        return found

    def save(self, run: Run) -> None:
        """Leave a checkpoint; at no moment is there none."""
        path = self.path(run.settings.run, run.seed, "pt")
        half_written = path.with_suffix(".part")
        torch.save(run.state(), half_written)
        half_written.replace(path)

    def epoch(self, run: Run) -> None:
        """An epoch is over: write down what it brought."""
        record = run.record() | self._circumstances(run) | {"settings": run.settings.as_dict()}
        _write(self.path(run.settings.run, run.seed, "json"), json.dumps(record, indent=1) + "\n")
        if run.failed is None:
            with self.path(run.settings.run, run.seed, "jsonl").open("a") as lines:
                lines.write(json.dumps(run.history[-1]) + "\n")
        if run.failed is None and self.tensorboard:
            self._to_tensorboard(run)
        if run.done:
            self.path(run.settings.run, run.seed, "pt").unlink(missing_ok=True)

    def _to_tensorboard(self, run: Run) -> None:
        writer, entry = self._writer(run), run.history[-1]
        for name, value in entry.items():
            if value is not None and name not in ("epoch", "step"):
                writer.add_scalar(name, value, entry["epoch"])
        writer.flush()

    def _writer(self, run: Run) -> Any:  # noqa: ANN401
        key = (run.settings.run, run.seed)
        if key not in self._writers:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError("--tensorboard needs a package: pip install tensorboard") from error
            where = self.folder / "runs" / "tensorboard" / f"{slug(run.settings.run)}-{run.seed}"
            self._writers[key] = SummaryWriter(where, purge_step=run.epoch)
        return self._writers[key]

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

    def results(self, lines: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Put together what all runs have brought, those of earlier commands as well, and write it."""
        path = self.folder / "results.json"
        old = _read(path) if path.exists() else {"runs": [], "lines": None}
        records = {(record["run"], record["seed"]): record for record in old["runs"]}
        for file in sorted((self.folder / "runs").glob("*.json")):
            record = _read(file)
            record.pop("settings")
            records[record["run"], record["seed"]] = record
        order = {run.run: i for i, run in enumerate(self.experiment.runs)}
        listed = sorted(records.values(), key=lambda record: (order.get(record["run"], len(order)), record["run"]))
        results = {"name": self.experiment.name, "lines": lines or old["lines"], "runs": listed}
        _write(
            path, json.dumps(_rounded(results), indent=None, separators=(",", ":")).replace('{"run"', '\n{"run"') + "\n"
        )
        return results

    def config(self) -> None:
        """Write down the experiment."""
        text = yaml.safe_dump(self.experiment.as_dict(), sort_keys=False, allow_unicode=True, width=120)
        _write(self.folder / "config.yaml", text)


def slug(name: str) -> str:
    """A name for a file."""
    return re.sub(r"[^\w.+=-]+", "_", name)


def _same(there: dict[str, Any], here: dict[str, Any], path: Path) -> None:
    """Refuse to go on with something else."""
    names = sorted(name for name in here if there.get(name) != here[name])
    if names:
        differences = "; ".join(f"{name} was {there.get(name)!r}, is {here[name]!r}" for name in names)
        raise ValueError(f"{path} was made with other settings ({differences}). Give another --output, or remove it.")


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} could not be read: {error}. Remove it to begin anew.") from error
    return content


def _write(path: Path, text: str) -> None:
    half_written = path.with_name(f"{path.name}.{os.getpid()}.part")  # another command may be writing the same file
    half_written.write_text(text)
    half_written.replace(path)


def _rounded(value: Any) -> Any:  # noqa: ANN401
    """Six digits are enough to look at, and keep files small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
