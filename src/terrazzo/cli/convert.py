"""`terrazzo convert`: from one format of checkpoints to another."""

from __future__ import annotations

from typing import Annotated

import typer

from terrazzo.checkpoint import Checkpoint
from terrazzo.checkpoint.formats.convert import convert as convert_checkpoint
from terrazzo.checkpoint.formats.registry import named, names
from terrazzo.cli.screen import CheckpointPath, Json, errors, print_json, progress, say
from terrazzo.errors import CheckpointExistsError


def convert(
    source: CheckpointPath,
    target: Annotated[str, typer.Argument(help="Where the new checkpoint goes: a path or a URL.", show_default=False)],
    to: Annotated[
        str, typer.Option("--to", "--format", help=f"The new checkpoint's format: {', '.join(names())}.")
    ] = "native",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint of the same format.")] = False,
    stage: Annotated[
        int | None, typer.Option(help="To deepspeed: the ZeRO stage that resumes; default as saved.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="To deepspeed: how many ranks resume; default as saved.")] = None,
    only: Annotated[
        str | None, typer.Option(help="To safetensors: where the weights are in the checkpoint, as `model`.")
    ] = None,
    json: Json = False,
) -> None:
    """Convert a checkpoint into another format, with little memory."""
    with errors():
        format = named(to)
        with progress("converting") as bar:
            total = Checkpoint(source).total_bytes()
            bar.of(total)
            try:
                convert_checkpoint(
                    source,
                    target,
                    to,
                    overwrite=overwrite,
                    progress=lambda name, nbytes: bar.advance(nbytes),
                    stage=stage,
                    ranks=ranks,
                    only=only,
                )
            except CheckpointExistsError as error:
                if overwrite or not format.replaces:
                    raise
                raise CheckpointExistsError(str(error).replace("with overwrite=True", "pass --overwrite")) from error
        if json:
            print_json({"source": source, "target": target, "format": to, "bytes": total})
        else:
            say(f"{source} -> {target} ({to})")
