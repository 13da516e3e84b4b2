"""A GGUF file as a folder in transformers' layout: weights dequantised, renamed and put in order,
config.json, and the tokenizer.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from infer.models.checkpoint import Layout
from infer.tokenizer import Tokenizer
from infer.tokenizer.vocabulary import Vocabulary
from infer.weights import folder_files
from infer.weights.gguf import GGUFFile
from infer.weights.load import planned
from infer.weights.regroup import DTYPES, Held, Regrouped, cast, common_dtype, regroup
from infer.weights.safetensors_writer import Entry, Progress, dtype_name, write_folder
from infer.weights.slots import Slot, plan

# Of quantised tensors, unless the caller says otherwise: what most checkpoints are published in.
DEQUANTISED = DTYPES["bfloat16"]


def write_as_folder(
    source: Path,
    folder: Path,
    *,
    dtype: np.dtype | None,
    max_shard_bytes: int,
    progress: Progress | None,
) -> list[Path]:
    """Write a GGUF file into an empty folder and return its weight files.

    Args:
        source: of the file.
        folder: is there and empty.
        dtype: of all tensors.  None: floats as they are, quantised ones as bfloat16.
        max_shard_bytes: tensor bytes of one file.
        progress: called with (bytes done, bytes in all).

    Raises:
        WeightFormatError: the file is broken, or holds a tokenizer that cannot be written.
        ConfigError: the architecture is not run, or config.json cannot say what the file says.
    """
    with GGUFFile.open(source) as file:
        old = planned(file)
        vocabulary = vocabulary_of(file)
        layout, values = folder_files.described(old.config, str(file.path), "keep the GGUF file")
        new = plan(old.config, layout.layer_names, layout.global_names)
        entries = dict(_entries(file, regroup(old, new), layout, dtype))
        embed = next(e for name, e in entries.items() if name == layout.global_names["embed"])
        kind = next(name for name, d in DTYPES.items() if dtype_name(d) == embed.dtype)
        tokenizer = None if vocabulary is None else Tokenizer(vocabulary)
        folder_files.write(folder, values | {"torch_dtype": kind}, tokenizer, old.config)
        return write_folder(
            folder,
            entries,
            {"format": "pt"},
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )


def vocabulary_of(file: GGUFFile) -> Vocabulary | None:
    """Return a file's vocabulary; None where it says that it has none."""
    if file.meta_str("tokenizer.ggml.model", "none") == "none":
        return None
    return Vocabulary.from_gguf(file.metadata)


def _entries(
    file: GGUFFile, tensors: list[Regrouped], layout: Layout, dtype: np.dtype | None
) -> Iterator[tuple[str, Entry]]:
    held = Held(file.release)
    # A tensor that several weights share is decoded once: they come one after the other.
    decoded = functools.lru_cache(maxsize=1)(lambda name, to: file.array(name, to))

    def read(tensor: Regrouped, to: np.dtype) -> np.ndarray:
        adds_one = layout.norm_plus_one and tensor.field.endswith("norm")
        held.swap(tensor.sources)
        # bfloat16 holds any float32; what is narrower is checked.
        first = DTYPES["float32"] if adds_one or to.name == "float16" else to

        def weight(slot: Slot) -> np.ndarray:
            values = slot.taken(decoded(slot.tensor, first))
            return values - np.float32(1) if adds_one else values

        values = cast(tensor.build(weight), to, tensor.name, file.path)
        decoded.cache_clear()
        return values

    for tensor in tensors:
        kinds = {file.tensors[name].type_name for name in tensor.sources}
        to = common_dtype(kinds, DEQUANTISED) if dtype is None else dtype
        yield (
            tensor.name,
            Entry(
                dtype=dtype_name(to),
                shape=tensor.shape,
                read=lambda tensor=tensor, to=to: read(tensor, to),
            ),
        )
