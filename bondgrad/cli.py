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
