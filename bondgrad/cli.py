"""The command line."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
except ImportError:  # an installation without the tools
    sys.exit("The command line needs a few more packages: pip install 'bondgrad[cli]'")

from bondgrad._version import __version__

if TYPE_CHECKING:
    import torch

main = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Train networks through functions without gradient."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _device(name: str) -> "torch.device":
    """The one asked for; if none is, the fastest."""
    import torch

    there = {"cpu": True, "cuda": torch.cuda.is_available()}
    name = name or ("cuda" if there["cuda"] else "cpu")
    kind, colon, number = name.partition(":")
    if not there.get(kind) or (colon and not number.isdecimal()):
        raise typer.BadParameter(f"there is no {name!r} here: take cpu or cuda", param_hint="--device")
    return torch.device(name)


@main.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


@main.command()
def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training data.")] = 10,
    seed: Annotated[list[int] | None, typer.Option(help="Repeat the option for several runs. [default: 42]")] = None,
    output: Annotated[Path, typer.Option(help="Where the plot and the numbers go.")] = Path("demo"),
) -> None:
    """Train through a black box: exact gradient, BOND, BONDS and SPSA side by side."""
    from rich.console import Console

    from bondgrad.experiments.demo import run_demo

    run_demo(epochs, seed or [42], output, Console())


@main.command()
def probe(
    target: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="Maps rows to rows; looked for here, too.")],
    in_features: Annotated[int, typer.Option(min=1, help="Width of its rows.")],
    limits: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="LOW HIGH",
            help="Nothing outside is ever evaluated. Each a number, or one per input: -1,-1,0 1,1,5.",
        ),
    ] = None,
    sample: Annotated[Path | None, typer.Option(help="Typical rows, a .npy file of rows x in-features.")] = None,
    context: Annotated[
        list[Path] | None,
        typer.Option(help="A further input of the function: a .npy file, an entry for each row. May be repeated."),
    ] = None,
    budget: Annotated[int, typer.Option(min=16, help="Most evaluations.")] = 20_000,
    seconds: Annotated[float, typer.Option(min=0.001, help="Most time, also for a call that hangs.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of rows.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a training step, to predict its cost.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Training steps, to predict their cost.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw how well slopes agree, by step, into this PNG file.")] = None,
) -> None:
    """Find out what a box is like: speed, noise, smoothness, structure; and which BlackBox it needs."""
    from rich.console import Console

    from bondgrad.experiments.probe import UserError, probe_command

    try:
        probe_command(
            target,
            in_features,
            limits=limits,
            sample=sample,
            context=context or [],
            options={"budget": budget, "seconds": seconds, "seed": seed},
            batch=batch,
            steps=steps,
            as_json=as_json,
            plot_file=plot,
            console=Console(),
        )
    except UserError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


@main.command()
def journal(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What evaluators.Journal writes, or has written.")],
    plot: Annotated[
        Path | None, typer.Option(help="Draw evaluations over time, and latencies, into this file.")
    ] = None,
) -> None:
    """Show what a journal holds: evaluations by time, worker and purpose, latencies, failures."""
    from rich.console import Console

    from bondgrad.experiments.journal import journal_command

    try:
        journal_command(file, plot, Console())
    except (ValueError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


@main.command()
def pretrain(
    what: Annotated[str, typer.Argument(metavar="rockmelon", help="What is to learn.")],
    pairs: Annotated[int, typer.Option(min=1000, help="Readings to learn from.")] = 1_000_000,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over them.")] = 15,
    seed: Annotated[int, typer.Option(min=0, help="Of voltages, weights and order.")] = 0,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for weights and picture.")] = Path("rockmelon"),
    device: Annotated[str, typer.Option(help="cpu or cuda.", show_default="cuda, if there is one")] = "",
) -> None:
    """Learn a smooth copy of a quantum-dot device, as the paper's Rockmelon. Interrupted, it goes on where it was."""
    if what != "rockmelon":
        raise typer.BadParameter(f"there is only rockmelon to pretrain, not {what!r}")
    from rich.console import Console

    from bondgrad.experiments.pretrain import Settings, pretrain_command

    where = _device(device)
    try:
        done = pretrain_command(Settings(pairs, epochs, seed=seed), output, where, Console())
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    if not done:
        raise typer.Exit(130)


Data = Annotated[Path, typer.Option(envvar="BONDGRAD_DATA", help="Folder of Fashion-MNIST and CIFAR, if needed.")]
Output = Annotated[Path | None, typer.Option(file_okay=False, help="Folder for the results.")]
Only = Annotated[list[str] | None, typer.Option(help="Runs by name, * for anything; may be repeated.")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", min=0, help="Instead of the file's; may be repeated.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Instead of the file's.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Cut every epoch to so many steps.")]
Every = Annotated[int | None, typer.Option(min=0, help="Steps between looks at the exact gradient; 0: never.")]
Half = Annotated[bool, typer.Option("--bfloat16", help="Networks in bfloat16; boxes stay in float32.")]
Compiled = Annotated[bool, typer.Option("--compile", help="Compile the networks; the first run waits for it.")]
Eager = Annotated[bool, typer.Option("--eager", help="No CUDA graphs.")]
Where = Annotated[str, typer.Option(help="cpu or cuda.", show_default="cuda, if there is one")]
AtOnce = Annotated[int, typer.Option(min=1, help="Runs that go on at the same time.")]
Untimed = Annotated[bool, typer.Option("--untimed", help="Other work shares the machine: report no loop times.")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Write event files as well.")]


@main.command()
def run(
    file: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", exists=True, dir_okay=False, help="The experiment.")],
    output: Output = None,
    only: Only = None,
    seed: Seeds = None,
    epochs: Epochs = None,
    steps: Steps = None,
    measure_every: Every = None,
    bfloat16: Half = False,
    compiled: Compiled = False,
    eager: Eager = False,
    data: Data = Path("data"),
    device: Where = "",
    side_by_side: AtOnce = 8,
    untimed: Untimed = False,
    tensorboard: Board = False,
) -> None:
    """Train what a file says. Interrupted or killed, the same command goes on where it was."""
    settings = (epochs, steps, measure_every, bfloat16, compiled, eager, side_by_side, untimed, tensorboard)
    _experiment(file, output, only, seed, data, device, *settings)


@main.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="Of a result of the paper: see --list.")] = None,
    all_of_them: Annotated[bool, typer.Option("--list", help="Show all, with what they cost.")] = False,
    output: Output = None,
    only: Only = None,
    seed: Seeds = None,
    epochs: Epochs = None,
    steps: Steps = None,
    measure_every: Every = None,
    bfloat16: Half = False,
    compiled: Compiled = False,
    eager: Eager = False,
    data: Data = Path("data"),
    device: Where = "",
    side_by_side: AtOnce = 8,
    untimed: Untimed = False,
    tensorboard: Board = False,
) -> None:
    """Run one of the paper's results, and put ours beside the paper's."""
    from rich.console import Console

    from bondgrad.experiments import config
    from bondgrad.experiments.reproduce import overview

    if all_of_them or name is None:
        Console().print(overview())
        return
    if name not in config.names():
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(config.names())}", param_hint="NAME")
    settings = (epochs, steps, measure_every, bfloat16, compiled, eager, side_by_side, untimed, tensorboard)
    _experiment(config.PAPER / f"{name}.yaml", output, only, seed, data, device, *settings)


def _experiment(
    file: Path,
    output: Path | None,
    only: list[str] | None,
    seeds: list[int] | None,
    pictures: Path,
    device: str,
    epochs: int | None,
    steps: int | None,
    measure_every: int | None,
    bfloat16: bool,
    compiled: bool,
    eager: bool,
    at_once: int,
    untimed: bool,
    tensorboard: bool,
) -> None:
    """What `run` and `reproduce` have in common."""
    import shlex

    from rich.console import Console

    from bondgrad.experiments import config
    from bondgrad.experiments.reproduce import Options, run_experiment

    where = _device(device)
    try:
        experiment = config.load(file)
        options = Options(
            output or Path("results") / experiment.name,
            pictures,
            where,
            shlex.join(["bondgrad", *sys.argv[1:]]),
            tuple(only or ()),
            tuple(seeds or ()),
            epochs,
            steps,
            measure_every,
            "bfloat16" if bfloat16 else None,
            True if compiled else None,
            False if eager else None,
            at_once,
            not untimed,
            tensorboard,
        )
        done = run_experiment(experiment, options, Console())
    except (ValueError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    if not done:
        raise typer.Exit(130)


@main.command()
def report(
    results: Annotated[Path, typer.Argument(file_okay=False, help="Folder with a folder for each experiment.")] = Path(
        "results"
    ),
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for the page and its figures.")] = Path(
        "report"
    ),
) -> None:
    """Make a page of results: each beside the paper's value, with how it was run. Trains nothing."""
    from rich.console import Console

    from bondgrad.report import report_command

    try:
        report_command(results, output, Console())
    except (ValueError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
