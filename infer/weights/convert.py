"""Converting weights: a folder in transformers' layout, or one safetensors file, into a folder.

A tensor at a time; the new folder is there whole or not at all.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from infer.errors import ConfigError, WeightFormatError
from infer.model_files import ModelFolder, label
from infer.weights.folder_config import read_config, refuse_quantised
from infer.weights.hub import SMALL_FILES, TEMPLATES
from infer.weights.safetensors import FLOATS, SafetensorsFile, TensorInfo
from infer.weights.safetensors_writer import (
    MAX_SHARD_BYTES,
    Entry,
    Progress,
    dtype_name,
    write_folder,
)
from infer.weights.shards import SafetensorsFolder

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the weights of `source`, and the files beside them, into the new folder `target`.

    Args:
        source: a folder in transformers' layout, or a .safetensors file.
        target: does not exist, or is an empty folder.
        dtype: of floating-point tensors; None leaves them as they are.  Others are never changed.
        max_shard_bytes: tensor bytes of one file.
        progress: called with (bytes done, bytes in all).

    Returns:
        The weight files, their index included.

    Raises:
        ConfigError: `dtype` is not known, or `target` is not empty.
        WeightFormatError: `source` is broken, or a value does not fit in `dtype`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype}; weights can be {', '.join(DTYPES)}")
    to = Path(target).absolute()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is not empty; name a new folder")
    to.parent.mkdir(parents=True, exist_ok=True)
    folder = ModelFolder(source) if Path(source).is_dir() else None
    if folder is not None and dtype is not None:
        refuse_quantised(folder, read_config(folder))
    scratch = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
    try:
        opened = SafetensorsFile.open(source) if folder is None else SafetensorsFolder.open(folder)
        with opened as files:
            entries = dict(_entries(files, None if dtype is None else DTYPES[dtype]))
            metadata = {"format": "pt"} | files.metadata
            paths = write_folder(
                scratch, entries, metadata, max_shard_bytes=max_shard_bytes, progress=progress
            )
        if folder is not None:
            _copy_beside(folder, scratch, dtype)
        os.chmod(scratch, 0o755)
        if to.exists():
            to.rmdir()
        os.replace(scratch, to)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return [to / path.name for path in paths]


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
    if dtype is not None and values.dtype != dtype:
        with np.errstate(over="ignore", invalid="ignore"):
            cast = values.astype(dtype)
        if not np.array_equal(np.isfinite(cast), np.isfinite(values)):
            raise WeightFormatError(
                f"{label(files.path)}: tensor {info.name!r} has values that {dtype} cannot hold;"
                " use bfloat16 or float32"
            )
        values = cast
    else:
        values = np.array(values)
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
