"""Where the box of a run is evaluated, as an experiment's file says it."""

import functools
import importlib
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from bondgrad import evaluators
from bondgrad.evaluators import Evaluator
from bondgrad.experiments.settings import Part, Settings

CLASSES = {  # by kind, their names in `evaluators`
    "local": "Local",
    "threads": "Threads",
    "processes": "Processes",
    "ray": "Ray",
    "dask": "Executor",
    "umbridge": "UMBridge",
}


def made_evaluator(part: Part | None, file: str) -> Evaluator | None:
    """The evaluator that {kind: ..., and arguments} stands for.

    Args:
        part: As the experiment's file has it, with a known kind. None: there is none.
        file: The name of the journal in the folder that `journal` names.
    """
    if part is None:
        return None
    arguments = dict(part)
    kind, folder = arguments.pop("kind"), arguments.pop("journal", None)
    make: Any = getattr(evaluators, CLASSES[kind])
    # The box is named elsewhere in the file, and an executor by the address of its scheduler.
    known = ["address" if name == "executor" else name for name in inspect.signature(make).parameters]
    known = [*[name for name in known if name != "factory"], "journal"]
    if unknown := ", ".join(sorted(str(name) for name in arguments if name not in known)):
        raise ValueError(f"evaluator, {kind}: nothing is called {unknown}; there are {', '.join(known)}")
    try:
        if kind == "dask":
            arguments["executor"] = dask_client(arguments.pop("address", None))
        evaluator: Evaluator = make(**arguments)
    except (TypeError, ValueError, ImportError, OSError) as error:
        raise ValueError(f"evaluator, {kind}: {error}") from error
    return evaluator if folder is None else evaluators.Journal(evaluator, Path(folder) / file)


@functools.cache
def dask_client(address: object) -> Any:  # noqa: ANN401
    """The connection to a scheduler of Dask. All runs share it, and it ends with this process."""
    if not isinstance(address, str):
        raise ValueError(f"address must be that of a scheduler, such as tcp://localhost:8786, got {address!r}")
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise ImportError("distributed is not installed: pip install distributed") from error
    return distributed.Client(address)


def without_journal(settings: Settings) -> Settings:
    """The same settings for a model that is only tried out: nothing is written."""
    part = settings.gradient.evaluator
    if part is None:
        return settings
    bare = {name: value for name, value in part.items() if name != "journal"}
    return replace(settings, gradient=replace(settings.gradient, evaluator=bare))
