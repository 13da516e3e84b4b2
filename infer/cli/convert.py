"""`infer convert`: weights from one form into another."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from infer.cli.progress import progress_bars
from infer.weights import hub
from infer.weights.regroup import DTYPES
from infer.weights.convert import convert as convert_weights
from infer.weights.safetensors_writer import MAX_SHARD_BYTES


def convert(
    source: Annotated[
        str, typer.Argument(help="A folder in transformers' layout, a .safetensors file, a hub id.")
    ],
    target: Annotated[str, typer.Argument(help="The new folder.")],
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)} [default: as they are].")
    ] = None,
    max_shard_bytes: Annotated[
        int, typer.Option(min=1, help="Tensor bytes of one file.")
    ] = MAX_SHARD_BYTES,
) -> None:
    """Write a model's weights and the files beside them into a new folder; print its files."""
    with progress_bars() as update:
        if not Path(source).exists() and hub.parse(source) is not None:
            source = str(hub.pull(source, progress=update))
        step = None if update is None else lambda done, total: update("write", done, total)
        paths = convert_weights(
            source, target, dtype=dtype, max_shard_bytes=max_shard_bytes, progress=step
        )
    print(f"{len(paths)} files in {target}", file=sys.stderr)
    for path in paths:
        print(path)
