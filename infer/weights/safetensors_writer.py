"""Writing safetensors files: a tensor at a time, into a temporary file that is moved into place.

The bytes depend on nothing but the tensors and the metadata: tensors lie in the order of their
element size, largest first, then of their names, so that each is aligned to its elements; the data
begin at a multiple of 64.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infer.weights.safetensors import DTYPES
from infer.weights.shards import INDEX, SINGLE

MAX_SHARD_BYTES = 5_000_000_000  # the size at which transformers starts another file
_ALIGNMENT = 64
_NAMES = {dtype: name for name, (bits, dtype) in DTYPES.items() if bits >= 8}

# Called with (bytes done, bytes in all) as tensors are written.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor to be written; `read` gives its values when they are needed, and is called once."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Any]

    @classmethod
    def of(cls, array: Any) -> "Entry":
        """Return the entry of an array that is there already."""
        return cls(dtype=dtype_name(array.dtype), shape=tuple(array.shape), read=lambda: array)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype][0] // 8


def dtype_name(dtype: Any) -> str:
    """Return what safetensors calls a dtype.

    Raises:
        ValueError: It has no name there.
    """
    dtype = np.dtype(dtype)
    if dtype not in _NAMES:
        raise ValueError(
            f"safetensors cannot hold {dtype}; store packed bytes as uint8 and say the format in"
            " the metadata"
        )
    return _NAMES[dtype]


def write_file(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Entry | Any],
    metadata: Mapping[str, str] | None = None,
    *,
    progress: Progress | None = None,
) -> None:
    """Write one safetensors file; it is there whole or not at all.

    Args:
        path: Of the file, which may exist.
        tensors: Arrays, or entries that are read one at a time.
        metadata: Strings for `__metadata__`.
        progress: Called with (bytes done, bytes in all).

    Raises:
        ValueError: A name cannot stand in a header, or an entry reads as another
            dtype or shape than it says.
    """
    entries = _sorted(tensors)
    head = _header(entries, metadata)
    done = 0
    total = sum(entry.nbytes for entry in entries.values())
    target = Path(path)
    handle, temp = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with open(handle, "wb") as out:
            out.write(head)
            for name, entry in entries.items():
                out.write(_bytes(name, entry))
                done += entry.nbytes
                if progress is not None:
                    progress(done, total)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temp, 0o666 & ~_umask())
        os.replace(temp, target)
    except BaseException:
        os.unlink(temp)
        raise


def write_folder(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Entry | Any],
    metadata: Mapping[str, str] | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> list[Path]:
    """Write tensors into a folder: one file, or several and an index, which comes last.

    Args:
        folder: Exists and holds no safetensors files, which would be taken for a part of these.
        tensors: Arrays, or entries that are read one at a time.
        metadata: Strings for each file's `__metadata__`.
        max_shard_bytes: Tensor bytes of a file; a tensor larger than that is alone in its own.
        progress: Called with (bytes done, bytes in all).

    Returns:
        The files, the index included.

    Raises:
        ValueError: The folder holds safetensors files, or as `write_file`.
    """
    base = Path(folder)
    if there := sorted(base.glob("*.safetensors*")):
        raise ValueError(f"{base} already holds {there[0].name}; write into an empty folder")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}, must be at least 1")
    shards = _shards({name: _entry(tensors[name]) for name in sorted(tensors)}, max_shard_bytes)
    total = sum(entry.nbytes for shard in shards for entry in shard.values())
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else [SINGLE]
    before = 0
    for name, shard in zip(names, shards, strict=True):
        step = None if progress is None else lambda done, _, b=before: progress(b + done, total)
        write_file(base / name, shard, metadata, progress=step)
        before += sum(entry.nbytes for entry in shard.values())
    paths = [base / name for name in names]
    if len(shards) > 1:
        weight_map = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        _write_text(base / INDEX, json.dumps(index, indent=2) + "\n")
        paths.append(base / INDEX)
    return paths


def _entry(value: Entry | Any) -> Entry:
    return value if isinstance(value, Entry) else Entry.of(value)


def _sorted(tensors: Mapping[str, Entry | Any]) -> dict[str, Entry]:
    entries = {name: _entry(value) for name, value in tensors.items()}
    order = sorted(entries, key=lambda name: (-DTYPES[entries[name].dtype][0], name))
    return {name: entries[name] for name in order}


def _shards(entries: Mapping[str, Entry], limit: int) -> list[dict[str, Entry]]:
    """Fill files in the order of names."""
    shards: list[dict[str, Entry]] = [{}]
    size = 0
    for name, entry in entries.items():
        if shards[-1] and size + entry.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += entry.nbytes
    return shards


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str] | None) -> bytes:
    """Return the length and the header, padded with spaces up to the first tensor."""
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    offset = 0
    for name, entry in entries.items():
        if name == "__metadata__":
            raise ValueError(f"a tensor cannot be called {name!r}; use another string")
        end = offset + entry.nbytes
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(name: str, entry: Entry) -> Any:
    array = np.asarray(entry.read())
    bits, dtype = DTYPES[entry.dtype]
    packed = bits < 8 and array.dtype == np.uint8 and array.nbytes == entry.nbytes
    if not packed and (array.dtype != dtype or array.shape != entry.shape):
        raise ValueError(
            f"tensor {name!r} reads as {array.dtype} {list(array.shape)}, and its entry says"
            f" {entry.dtype} {list(entry.shape)}"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # a buffer: nothing is copied


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_text(path: Path, text: str) -> None:
    temp = path.with_name(f".{path.name}.part")
    temp.write_text(text, encoding="utf-8")
    os.replace(temp, path)
