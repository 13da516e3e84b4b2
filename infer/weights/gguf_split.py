"""Split GGUF files: `<name>-00001-of-00003.gguf` and so on, one model in several files.

The first file has the model's metadata; each has `split.no` (from 0), `split.count`, and
`split.tensors.count`, the number of tensors in all files together.

Source: gguf-split and llama-model-loader of llama.cpp (ggml-org/llama.cpp).
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.errors import WeightFormatError
from infer.weights.gguf_metadata import shown

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_PARTS = (1 << 16) - 1  # split.count is a uint16

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
# Of a long list of missing files, how many a message names.
_SHOWN = 8


def part_name(prefix: str, number: int, count: int) -> str:
    """Return the file name of part `number`, counted from 0, of `count`."""
    return f"{prefix}-{number + 1:05d}-of-{count:05d}.gguf"


def part_paths(path: str, label: str, metadata: Mapping[str, Any]) -> list[str]:
    """Return the paths of all parts of the model of which `path` is one; one path if it is whole.

    Args:
        path: The file whose `metadata` this is.
        label: The path as messages call it.
        metadata: Its metadata.

    Raises:
        WeightFormatError: The file's name and metadata disagree, or parts are missing.
    """
    count = _integer(label, metadata, COUNT, 1)
    if count in (0, 1):  # gguf-split leaves 0 in a file that it has merged
        return [path]
    if not 0 < count <= MAX_PARTS:
        raise WeightFormatError(
            f"{label}: {COUNT} is {count}, must be 0 to {MAX_PARTS}; split the model again"
        )
    number = _integer(label, metadata, NUMBER)
    if not 0 <= number < count:
        raise WeightFormatError(
            f"{label}: {NUMBER} is {number}, must be 0 to {count - 1}; split the model again"
        )
    folder, name = os.path.split(path)
    match = _NAME.fullmatch(name)
    if match is None or (int(match[2]), int(match[3])) != (number + 1, count):
        stem = match[1] if match else name.removesuffix(".gguf")
        raise WeightFormatError(
            f"{label}: is part {number + 1} of {count} by its metadata, and its name is"
            f" {shown(name)}; name it {shown(part_name(stem, number, count))}, so that the other"
            " parts are found"
        )
    names = [part_name(match[1], i, count) for i in range(count)]
    there = set(os.listdir(folder or "."))  # one look at the folder, not one a part
    missing = [n for n in names if n not in there]
    if missing:
        listed = ", ".join(shown(n) for n in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise WeightFormatError(
            f"{label}: is part {number + 1} of {count}, and missing beside it are {listed}{more};"
            " download them into the same folder"
        )
    return [os.path.join(folder, n) for n in names]


def check_parts(parts: Sequence[Any]) -> None:
    """Check that open files, in order, are the parts of one model.

    Args:
        parts: Objects with `path`, `metadata` and `tensors`.

    Raises:
        WeightFormatError: All that does not fit, in one line.
    """
    first, problems = parts[0], []
    seen: dict[str, str] = {}
    for i, part in enumerate(parts):
        name = shown(Path(part.path).name)
        for key, want in ((NUMBER, i), (COUNT, len(parts))):
            have = part.metadata.get(key)
            if not _same(have, want):
                problems.append(f"{name} has {key} {_said(have)}, must be {want}")
        for key in (TENSORS, "general.architecture"):
            have, want = part.metadata.get(key), first.metadata.get(key)
            if have is not None and not _same(have, want):
                problems.append(f"{name} has {key} {_said(have)}, and the first part {_said(want)}")
        for tensor in part.tensors:
            if tensor in seen:
                problems.append(f"tensor {shown(tensor)} is in {seen[tensor]} and in {name}")
            seen[tensor] = name
    total = first.metadata.get(TENSORS)
    num_tensors = sum(len(part.tensors) for part in parts)
    if total is not None and not _same(total, num_tensors):
        problems.append(f"{TENSORS} is {_said(total)}, and the parts hold {num_tensors}")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightFormatError(
            f"{first.path}: the {len(parts)} parts are not of one model: "
            + "; ".join(problems[:_SHOWN])
            + f"{more}; download all parts again from one source"
        )


def _integer(label: str, metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int:
        raise WeightFormatError(
            f"{label}: {key} is {_said(value)}, must be an integer; split the model again"
        )
    return value


def _same(have: Any, want: Any) -> bool:
    return type(have) is type(want) and isinstance(have, int | str) and have == want


def _said(value: Any) -> str:
    """Return a value for a message: short, printable, on one line."""
    return (
        "absent" if value is None else shown(value) if isinstance(value, str) else repr(value)[:40]
    )
