"""The command line."""

import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError:  # an installation without the tools
    sys.exit("The command line needs a few more packages: pip install 'bondgrad[cli]'")

from bondgrad._version import __version__

main = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Train networks through functions without gradient."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


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
        tuple[float, float] | None, typer.Option(metavar="LOW HIGH", help="Nothing outside is ever evaluated.")
    ] = None,
    sample: Annotated[Path | None, typer.Option(help="Typical rows, a .npy file of rows x in-features.")] = None,
    budget: Annotated[int, typer.Option(min=16, help="Most evaluations.")] = 20_000,
    seconds: Annotated[float, typer.Option(min=0.001, help="Most time.")] = 60.0,
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
    import torch
    from rich.console import Console

    from bondgrad.experiments.pretrain import Settings, pretrain_command

    there = {"cpu": True, "cuda": torch.cuda.is_available()}
    device = device or ("cuda" if there["cuda"] else "cpu")
    if not there.get(device.partition(":")[0]):
        raise typer.BadParameter(f"there is no {device!r} here: take cpu or cuda", param_hint="--device")
    try:
        done = pretrain_command(Settings(pairs, epochs, seed=seed), output, torch.device(device), Console())
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    if not done:
        raise typer.Exit(130)
