"""`splitserve`: the command group."""

from __future__ import annotations

import typer

from splitserve import __version__
from splitserve.cli.demo import demo
from splitserve.cli.model import app as model_app
from splitserve.cli.serve import serve

app = typer.Typer(
    name="splitserve",
    help="LLM serving with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(demo)
app.add_typer(model_app, name="model")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def run() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    run()
