"""Converting a model: folders in transformers' layout into another dtype, GGUF files into such
folders, and folders into GGUF files.

A tensor at a time; what is written is there whole or not at all.
"""

import glob
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from infer.errors import ConfigError
from infer.model_files import ModelFolder, label
from infer.weights.folder_config import read_config, refuse_quantised
from infer.weights.folder_to_gguf import write_as_gguf
from infer.weights.gguf_to_folder import write_as_folder
from infer.weights.hub import SMALL_FILES, TEMPLATES
from infer.weights.new_folder import new_folder, parent_of
from infer.weights.regroup import DTYPES, cast
from infer.weights.safetensors import FLOATS, SafetensorsFile, TensorInfo
from infer.weights.safetensors_writer import (
    MAX_SHARD_BYTES,
    Entry,
    Progress,
    dtype_name,
    write_folder,
)
from infer.weights.shards import SafetensorsFolder


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write a model in another form: a folder in another dtype, GGUF as a folder, or the reverse.

    Args:
        source: a folder in transformers' layout, a .safetensors file, or a GGUF file.
        target: a name that ends in .gguf, of a file that does not exist; otherwise a folder that
            does not exist or is empty.
        dtype: of floating-point tensors; None leaves them as they are, and makes bfloat16 of
            quantised ones.  Others are never changed.  In a GGUF file vectors stay float32.
        max_shard_bytes: tensor bytes of one file; None: 5 GB in a folder, one GGUF file.
        progress: called with (bytes done, bytes in all).

    Returns:
        The weight files, their index included.

    Raises:
        ConfigError: `dtype` is not known, `target` is there, or the other form cannot say what
            the model's configuration says.
        WeightFormatError: `source` is broken, a value does not fit in `dtype`, or the other form
            cannot say what the tokenizer does.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype}; weights can be {', '.join(DTYPES)}")
    path, to = Path(source).expanduser(), Path(target).absolute()
    cast_to = None if dtype is None else DTYPES[dtype]
    folder = ModelFolder(path) if path.is_dir() else None
    if to.suffix == ".gguf":
        if folder is None:
            raise ConfigError(
                f"{path} is no folder; a GGUF file is made from a folder with config.json"
            )
        _check_no_file(to)
        with parent_of(to):
            return write_as_gguf(
                folder, to, dtype=cast_to, max_part_bytes=max_shard_bytes, progress=progress
            )
    limit = MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
    with new_folder(to) as scratch:
        if folder is None and path.suffix != ".safetensors":
            paths = write_as_folder(
                path, scratch, dtype=cast_to, max_shard_bytes=limit, progress=progress
            )
        else:
            paths = _recast(path, folder, scratch, dtype, limit, progress)
    return [to / path.name for path in paths]


def _check_no_file(to: Path) -> None:
    there = [to] if to.exists() else sorted(to.parent.glob(f"{glob.escape(to.stem)}-*-of-*.gguf"))
    if there:
        raise ConfigError(f"{there[0]} is there already; name a new file")


def _recast(
    path: Path,
    folder: ModelFolder | None,
    scratch: Path,
    dtype: str | None,
    max_shard_bytes: int,
    progress: Progress | None,
) -> list[Path]:
    """Write a folder, or a lone file, as a folder: the same tensors, in another dtype."""
    if folder is not None and dtype is not None:
        refuse_quantised(folder, read_config(folder))
    opened = SafetensorsFile.open(path) if folder is None else SafetensorsFolder.open(folder)
    with opened as files:
        entries = dict(_entries(files, None if dtype is None else DTYPES[dtype]))
        paths = write_folder(
            scratch,
            entries,
            {"format": "pt"} | files.metadata,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )
    if folder is not None:
        _copy_beside(folder, scratch, dtype)
    return paths


def _entries(files: Any, dtype: np.dtype | None) -> Iterator[tuple[str, Entry]]:
    for name, info in files.tensors.items():
        cast = dtype if info.dtype in FLOATS else None
        yield (
            name,
            Entry(
                dtype=info.dtype if cast is None else dtype_name(cast),
                shape=info.shape,
                read=lambda info=info, cast=cast: _cast(files, info, cast),
            ),
        )


def _cast(files: Any, info: TensorInfo, dtype: np.dtype | None) -> np.ndarray:
    values = files.array(info.name)
    if dtype is not None:
        values = cast(values, dtype, info.name, label(files.path))
    values = np.array(values)  # a copy: a view would be gone with the pages
    files.release(info.name)
    return values


def _copy_beside(folder: ModelFolder, to: Path, dtype: str | None) -> None:
    """Copy the files that are read beside the weights; config.json says the new dtype."""
    names = list(SMALL_FILES)
    if (folder.path / TEMPLATES).is_dir():
        (to / TEMPLATES).mkdir()
        names += [f"{TEMPLATES}{p.name}" for p in sorted((folder.path / TEMPLATES).glob("*.jinja"))]
    for name in names:
        path = folder.member(name)
        if path is not None:
            shutil.copyfile(path, to / name)
    config = folder.json("config.json")
    if config is not None and dtype is not None:
        key = "dtype" if "dtype" in config else "torch_dtype"
        text = json.dumps(config | {key: dtype}, indent=2, ensure_ascii=False)
        (to / "config.json").write_text(text + "\n", encoding="utf-8")
