"""`infer convert`: a model from one form into another."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from infer.cli.progress import progress_bars
from infer.weights import bundled, hub


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A known name, a GGUF file, a folder in transformers' layout, a .safetensors"
            " file, or a hub id."
        ),
    ],
    target: Annotated[
        str, typer.Argument(help="A new folder, or a new GGUF file if the name ends in .gguf.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16 [default: as they are; bfloat16 for quantised ones]."
        ),
    ] = None,
    max_shard_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tensor bytes of one file [default: 5 GB in a folder, one GGUF file]."
        ),
    ] = None,
) -> None:
    """Write a model in another dtype or form, whole or not at all; print its weight files."""
    from infer.weights.convert import convert as convert_weights  # imports JAX

    with progress_bars() as update:
        if source in bundled.known_models():
            source = str(bundled.pull(source))
        elif not Path(source).exists() and hub.parse(source) is not None:
            source = str(hub.pull(source, progress=update))
        step = None if update is None else lambda done, total: update("write", done, total)
        paths = convert_weights(
            source, target, dtype=dtype, max_shard_bytes=max_shard_bytes, progress=step
        )
    print(f"{len(paths)} files in {target}", file=sys.stderr)
    for path in paths:
        print(path)
