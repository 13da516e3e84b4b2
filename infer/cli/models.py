"""`infer pull` and `infer models`."""

import json
import sys
from typing import Annotated

import typer

from infer.cli.progress import progress_bars
from infer.weights import bundled, hub


def pull(
    name: Annotated[
        str,
        typer.Argument(help="A name that `infer models` lists, or a hub id: org/name@revision."),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash a file that is already there, too.")
    ] = False,
) -> None:
    """Fetch a model into the cache, check it, and print its path."""
    with progress_bars() as update:
        if name not in bundled.known_models() and hub.parse(name) is not None:
            path = hub.pull(name, progress=update)
        else:
            path = bundled.pull(name, progress=update, verify=verify)
    print(path)


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models that are known by name."""
    rows = []
    for model in bundled.known_models().values():
        path = bundled.cached(model.name)
        rows.append(
            {
                "name": model.name,
                "file": model.file,
                "bytes": model.num_bytes,
                "licence": model.licence,
                "source": model.source,
                "cached": None if path is None else str(path),
            }
        )
    if as_json:
        print(json.dumps({"models": rows}))
        return
    print(f"{'NAME':<14} {'SIZE':>9}  {'CACHED':<6}  LICENCE")
    for row in rows:
        cached = "no" if row["cached"] is None else "yes"
        print(f"{row['name']:<14} {row['bytes'] / 1e6:>6.1f} MB  {cached:<6}  {row['licence']}")
    print(f"\ncache: {bundled.cache_dir() / 'models'}; `infer pull NAME` fetches", file=sys.stderr)
