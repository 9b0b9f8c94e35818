"""`splitserve model`: fetch models, list them."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from splitserve.errors import SplitserveError
from splitserve.model.aliases import ALIASES
from splitserve.model.fetch import ResolvedModel, cache_dir, cached_models, resolve_model
from splitserve.model.meter import directory_bytes, megabytes

app = typer.Typer(help="Fetch models and list them.", no_args_is_help=True)


@app.command()
def pull(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|PATH|HUB-ID]",
            help="An alias, a model directory, a GGUF file, or a hub id such as org/name. "
            "Without it: the default model.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fetch a model unless it is here, compile the kernels, print its directory and size."""
    try:
        model = resolve_model(name, lambda line: typer.echo(line, err=True))
    except SplitserveError as error:
        typer.echo(f"error: {error.message} {error.advice}".strip(), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("error: interrupted; nothing half-fetched was kept.", err=True)
        raise typer.Exit(1) from None
    _compile_kernels()
    typer.echo(_line(model))


@app.command("list")
def list_models() -> None:
    """List the aliases and the models that were fetched."""
    cached = {model.name: model for model in cached_models()}
    for name, alias in ALIASES.items():
        if name not in cached:
            typer.echo(f"{name}  (not fetched: {alias.about})")
    for model in cached.values():
        typer.echo(_line(model))
    if not cached:
        typer.echo(f"Nothing is fetched yet; models are kept in {cache_dir()}.")


def _compile_kernels() -> None:
    """Fill the cache of compiled kernels, which the first start would do otherwise. In a process of
    its own: this one stays free of numba."""
    code = "import splitserve.model.gemm, splitserve.model.kernels"
    subprocess.run([sys.executable, "-c", code], check=True)


def _line(model: ResolvedModel) -> str:
    size = megabytes(directory_bytes(model.path))
    return f"{model.name}  {model.path}  {size}  ({model.source})"
