"""Block sizes that were measured: <chip>/<kernel>.json, written by scripts/tune_blocks.py.

    {"chip": ..., "kernel": ..., "shapes": {"<key of the shape>": {
        "fields": {"<field of the sizes>": value, ...},
        "time_s": ..., "default_s": ..., "tried": [...], "case": ..., "jax": ..., "date": ...}}}

Only `fields` is read here; no fields mean that the kernel's own choice was the fastest.  The rest
is what chose them: seconds of one call with them and with the kernel's own choice, and of each
candidate.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

Sizes = TypeVar("Sizes")

FOLDER = Path(__file__).parent


def tuned(
    sizes: Sizes, kernel: str, chip: str | None, key: str, may: Sequence[str] | None = None
) -> Sizes:
    """Return `sizes` with what was measured best for this chip and shape, if anything was.

    Args:
        sizes: a frozen dataclass of block sizes, the kernel's own choice.
        kernel: the kernel's file.
        chip: a name of infer.hardware, or None.
        key: of the shape; see the kernel's op.
        may: the fields that a table may set; None is all.

    Raises:
        ValueError: the file is broken, or does not fit the kernel.
    """
    fields = _fields(FOLDER, kernel, chip).get(key, {}) if chip else {}
    try:
        other = [name for name in fields if may is not None and name not in may]
        if other:
            raise ValueError(f"{', '.join(other)} is not tuned there, only {', '.join(may or ())}")
        return dataclasses.replace(sizes, **fields)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"infer/pallas/tuned/{chip}/{kernel}.json has sizes for {key!r} that {kernel} does not "
            f"take ({error}); run scripts/tune_blocks.py, or remove them"
        ) from error


@functools.cache
def _fields(folder: Path, kernel: str, chip: str) -> dict[str, dict[str, Any]]:
    """Return the fields of each shape in the file; none without a file."""
    path = folder / chip / f"{kernel}.json"
    try:
        shapes = json.loads(path.read_text())["shapes"]
        return {key: dict(entry["fields"]) for key, entry in shapes.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"infer/pallas/tuned/{chip}/{kernel}.json is broken ({error!r:.80}); run"
            " scripts/tune_blocks.py, or remove it"
        ) from error
