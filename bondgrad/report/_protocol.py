"""What was run of the paper's protocol, in words."""

from collections.abc import Callable
from dataclasses import dataclass

from bondgrad.report._experiment import Experiment, Run


@dataclass(frozen=True)
class Label:
    """What a reader has to know before the numbers."""

    kind: str  # full, shortened, none, or broken
    words: str


def label(experiment: Experiment) -> Label:
    """Whether all that is planned was run, and if not, what is less."""
    runs, missing = experiment.runs, not_made(experiment)
    if not experiment.planned_epochs:
        return Label("none", "no training")
    less = []
    if short := [run for run in runs if run.epochs < experiment.planned_epochs.get(run.run, 0)]:
        planned = [experiment.planned_epochs[run.run] for run in short]
        which = "" if len(short) == len(runs) else f" in {len(short)} of {_runs(len(runs))}"
        less.append(f"{_range([run.epochs for run in short])} of {_range(planned)} epochs{which}")
    if long := [run for run in runs if run.epochs > experiment.planned_epochs.get(run.run, run.epochs)]:
        planned = [experiment.planned_epochs[run.run] for run in long]
        less.append(f"{_range([run.epochs for run in long])} epochs instead of {_range(planned)}")
    if runs and (few := min(_seeds(experiment))) < len(experiment.planned_seeds):
        less.append(f"{few} of {_counted(len(experiment.planned_seeds), 'seed')}")
    elif {run.seed for run in runs} - set(experiment.planned_seeds):
        less.append("other seeds")
    steps = {(run.steps_of_epoch, experiment.planned_steps.get(run.run, run.steps_of_epoch)) for run in runs}
    for made, meant in sorted(steps, key=str):
        if made != meant:
            less.append(
                f"epochs cut to {made} steps" if meant is None else f"{made or 'all'} steps an epoch, not {meant}"
            )
    others = {run.precision for run in runs if run.precision != experiment.planned_precision.get(run.run, "float32")}
    if others:
        less.append(f"networks in {', '.join(sorted(others))}")
    if failed := sum(bool(run.failed) for run in runs):
        less.append(f"{_runs(failed)} failed")
    if unfinished := sum(run.epochs_run < run.epochs and not run.failed for run in runs):
        less.append(f"{_runs(unfinished)} unfinished")
    if missing:
        less.append(f"{_runs(len(missing))} not made")
    if less:
        return Label("shortened", "shortened: " + ", ".join(less))
    return Label("none", "our own protocol") if experiment.paper.ours else Label("full", "full protocol")


def not_made(experiment: Experiment) -> list[str]:
    """Runs that the experiment has and that are not there."""
    return [name for name in experiment.planned_epochs if not experiment.of(name)]


def protocol(experiment: Experiment) -> list[tuple[str, str]]:
    """What was run, as pairs of a heading and words. Commands are apart, see `commands`."""
    runs, paper = experiment.runs, experiment.paper
    if not runs:
        return []
    pairs = [("Epochs", _epochs(experiment)), ("Seeds", _seeds_in_words(experiment))]
    if any(run.steps_of_epoch is not None for run in runs):
        pairs.append(("Length of an epoch", _by(runs, lambda run: _cut(run.steps_of_epoch))))
    if unfinished := [run for run in runs if run.epochs_run < run.epochs]:
        words = [
            f"{run.run}, seed {run.seed}: {run.failed or f'{run.epochs_run} of {run.epochs} epochs'}"
            for run in unfinished
        ]
        pairs.append(("Unfinished", _few(words, "; ")))
    if missing := not_made(experiment):
        pairs.append(("Not run", _few(missing)))
    if taken := dict.fromkeys(f"{run.run} from {run.same_as}" for run in runs if run.same_as):
        pairs.append(("Taken over", _few(list(taken), "; ")))
    if any(run.batch is not None for run in runs):
        pairs.append(("Batch", _by(runs, lambda run: str(run.batch))))
    pairs.append(("Precision", _by(runs, lambda run: run.precision)))
    pairs.append(("Steps", _by(runs, _steps)))
    elsewhere = f" (the paper: {paper.gpu})" if paper.gpu else ""
    pairs.append(("Hardware", _by(runs, lambda run: run.hardware) + elsewhere))
    pairs.append(("Versions", _by(runs, lambda run: f"bondgrad {run.bondgrad}, torch {run.torch}")))
    return pairs


def commands(experiment: Experiment) -> list[str]:
    """What to type to get the same."""
    return list(dict.fromkeys(run.command for run in experiment.runs))


def hardware(experiment: Experiment) -> str:
    """Every machine, once."""
    return "; ".join(dict.fromkeys(run.hardware for run in experiment.runs)) or "-"


def _epochs(experiment: Experiment) -> str:
    runs, planned = experiment.runs, experiment.planned_epochs
    words = _by(runs, lambda run: _counted(run.epochs, "epoch"))
    if experiment.paper.ours:
        return words
    if all(run.epochs == planned.get(run.run) for run in runs):
        return f"{words}, as in the paper"
    return f"{words}; in the paper {_range([planned[run.run] for run in runs if run.run in planned])}"


def _seeds(experiment: Experiment) -> list[int]:
    """How many, for each name."""
    names = dict.fromkeys(run.run for run in experiment.runs)
    return [len({run.seed for run in experiment.of(name)}) for name in names]


def _seeds_in_words(experiment: Experiment) -> str:
    counts, planned = _seeds(experiment), experiment.planned_seeds
    which = ", ".join(map(str, sorted({run.seed for run in experiment.runs})))
    if min(counts) < len(planned):
        return f"{_range(counts)} of {_counted(len(planned), 'seed')} ({which})"
    return f"{_range(counts)} seed{'s' * (max(counts) > 1)} ({which})"


def _by(runs: list[Run], words: Callable[[Run], str]) -> str:
    """What is the same for all, or else what goes for whom."""
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(words(run), []).append(run.run)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{value} ({_few(list(dict.fromkeys(same)))})" for value, same in names.items())


def _steps(run: Run) -> str:
    """How its steps were run."""
    return ("captured as a CUDA graph" if run.graph else "eager") + ", networks compiled" * run.compiled


def _cut(steps: int | None) -> str:
    return "whole" if steps is None else f"cut to {_counted(steps, 'step')}"


def _few(words: list[str], between: str = ", ") -> str:
    """The first of them, if there are many."""
    return between.join(words if len(words) <= 4 else [*words[:3], f"and {len(words) - 3} more"])


def _range(numbers: list[int]) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _runs(number: int) -> str:
    return _counted(number, "run")
