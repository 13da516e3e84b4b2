"""Block sizes that were measured: <chip>/<kernel>.json, written by scripts/gpu_check.py.

{"<key of the shape>": {"<field of the sizes>": value, ...}, ...}
"""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any, TypeVar

Sizes = TypeVar("Sizes")


def tuned(sizes: Sizes, kernel: str, chip: str | None, key: str) -> Sizes:
    """Return `sizes` with what was measured best for this chip and shape, if anything was.

    Args:
        sizes: a frozen dataclass of block sizes, the kernel's own choice.
        kernel: the kernel's file.
        chip: a name of infer.hardware, or None.
        key: of the shape; see the kernel's cases in tests/cases/kernels.

    Raises:
        ValueError: the file does not fit the kernel.
    """
    fields = _table(kernel, chip).get(key, {}) if chip else {}
    try:
        return dataclasses.replace(sizes, **fields)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"infer/pallas/tuned/{chip}/{kernel}.json has sizes for {key!r} that {kernel} does not "
            f"take ({error}); run scripts/gpu_check.py --parts tuning, or remove them"
        ) from error


@functools.cache
def _table(kernel: str, chip: str) -> dict[str, Any]:
    file = resources.files(__name__) / chip / f"{kernel}.json"
    return json.loads(file.read_text()) if file.is_file() else {}
