"""The command line. Heavy imports wait for the command that needs them: `--help` loads no torch."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trimtab.errors import TrimtabError

app = typer.Typer(
    help="Stable LLM reinforcement learning on TRL and veRL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(markup=False, emoji=False, highlight=False)  # [brackets] in a path or a value are just that

Name = Annotated[str, typer.Argument(help="A bundled recipe, or the path of a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Values to replace: a.b.c=value", metavar="[KEY=VALUE]...")]
Tiny = Annotated[bool, typer.Option("--tiny", help="On the embedded model and task, on a CPU.")]


@app.command()
def recipes() -> None:
    """List the bundled recipes."""
    from trimtab.cli.show import print_recipes

    print_recipes(console)


@app.command()
def show(name: Name, overrides: Overrides = None, tiny: Tiny = False) -> None:
    """Print a recipe: each value, its source, and what the frameworks do on their own."""
    from trimtab.cli.show import print_recipe

    print_recipe(name, overrides or [], console, tiny=tiny)


@app.command()
def run(
    name: Name,
    overrides: Overrides = None,
    backend: Annotated[str, typer.Option(help="The framework that trains.")] = "trl",
    tiny: Tiny = False,
    output: Annotated[Path | None, typer.Option(help="The run's folder; default: runs/NAME.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace an earlier run in the folder.")] = False,
) -> None:
    """Train a recipe. The same command again continues a run that was interrupted."""
    from trimtab.cli.run import run as run_recipe

    try:
        run_recipe(name, overrides or [], backend=backend, tiny=tiny, output=output, fresh=fresh, console=console)
    except KeyboardInterrupt:
        print(
            "trimtab: interrupted; the same command continues after the last checkpoint (training.checkpoint_every), "
            "or starts again where there is none",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def main() -> None:
    """The `trimtab` command: bad input is one message and exit code 2, never a traceback."""
    try:
        app()
    except TrimtabError as error:
        print(f"trimtab: {error}", file=sys.stderr)
        sys.exit(2)
