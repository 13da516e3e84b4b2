"""From a folder in transformers' layout to `Params`: read, rename, split, cast, place.

One tensor at a time: its pages are dropped from memory once it is placed, so that the peak is the
model and one tensor.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from infer.backend import check_memory
from infer.config import ModelConfig
from infer.model_files import ModelFolder
from infer.models.checkpoint import Layout
from infer.models.params import Params
from infer.native.repack import Packed, repack
from infer.weights.folder_config import FolderConfig, describe
from infer.weights.load import HEADROOM, floats_in_panels, uses_panels
from infer.weights.packed_folder import read_params, with_one
from infer.weights.safetensors import FLOATS, TensorInfo
from infer.weights.shards import SafetensorsFolder
from infer.weights.slots import Progress, Slot, check_tensors, plan, read_plan, slots_of

_COMPARED_ROWS = 1024
_BYTES: dict[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def load_folder(
    path: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    num_tokens: int | None = None,
    packed: bool = False,
    progress: Progress | None = None,
) -> Params:
    """Return the weights of a folder with config.json and safetensors files; packed ones of
    `infer.save` bit for bit.

    Args:
        path: of the folder.
        dtype: of activations and weights.
        num_tokens: ids that the tokenizer knows; rows of the embedding beyond them are padding,
            whose logits are masked.  None: all rows are tokens.
        packed: on a CPU with native operations matrices stay as they are in the file, in the order
            in which those read them; elsewhere this changes nothing.
        progress: called with (bytes done, bytes in all).

    Raises:
        WeightFormatError: a file is broken, the weights are quantised in a form that is not
            read, or tensors are missing, stray, duplicate or misshapen (all listed in one error).
        ConfigError: the architecture, or something it asks for, is not supported.
        CapacityError: the weights do not fit in memory; said before anything is loaded.
    """
    dtype = jnp.dtype(dtype)
    folder = ModelFolder(path)
    described = describe(folder)
    config, layout = described.model, described.layout
    if num_tokens is not None:
        # A tokenizer may have more: an id that only the vision half of a model knows.
        config = dataclasses.replace(config, num_tokens=min(num_tokens, config.vocab_size))
    with SafetensorsFolder.open(folder) as files:
        if described.packed is not None:
            return read_params(
                files,
                layout,
                config,
                described.packed,
                dtype=dtype,
                packed=packed,
                progress=progress,
            )
        if described.quantised is not None:
            return _load_quantised(files, described, config, dtype, packed, progress)
        source = CanonicalTensors(files, layout)
        slots = planned(config, source)
        panels = uses_panels(packed)
        itemsize = lambda slot: _BYTES[source.tensors[slot.tensor].dtype]
        kept = lambda slot: panels and floats_in_panels(slot, itemsize(slot), dtype)
        weights = sum(
            math.prod(slot.shape) * (itemsize(slot) if kept(slot) else dtype.itemsize)
            for slot in slots_of(slots)
        )
        check_memory(
            f"{folder.label} as {dtype.name}",
            int(weights * (1 + HEADROOM)),
            "free memory or load a smaller model",
        )
        read = lambda slot: _read(source, slot, dtype, kept(slot))
        return read_plan(source, slots, read, progress)


def _load_quantised(
    files: SafetensorsFolder,
    described: FolderConfig,
    config: ModelConfig,
    dtype: jnp.dtype,
    packed: bool,
    progress: Progress | None,
) -> Params:
    """Return the weights of a folder that another tool has quantised, packed as they are there."""
    from infer.weights.quantised.translate import TranslatedFolder

    assert described.quantised is not None
    source = TranslatedFolder(files, described.layout, config, described.quantised)
    config, spare = _tie(config, source)
    source.tensors.pop(spare, None)
    options: Any = dict(dtype=dtype, packed=packed, progress=progress)
    return read_params(source, described.layout, config, source.form, **options)


def planned(config: ModelConfig, source: "CanonicalTensors") -> Params:
    """Return where each weight of a folder lies.

    Raises:
        WeightFormatError: tensors are missing, stray, duplicate or misshapen.
    """
    config, spare = _tie(config, source)
    layout = source.layout
    slots = plan(config.validate(), layout.layer_names, layout.global_names)
    check_tensors(
        source, slots, FLOATS.__contains__, ignored=spare.__eq__, problems=source.problems
    )
    return slots


class CanonicalTensors:
    """The tensors of a folder under the names that the family knows them by."""

    def __init__(self, files: SafetensorsFolder, layout: Layout):
        self.path = files.path
        self.layout = layout
        self._files = files
        self._names: dict[str, str] = {}
        problems = []
        for name in files.tensors:
            canonical = layout.canonical(name)
            if canonical is None:
                continue
            if canonical in self._names:
                problems.append(f"{self._names[canonical]} and {name} are the same weight")
            self._names[canonical] = name
        self.problems = tuple(problems)
        self.tensors: Mapping[str, TensorInfo] = {
            canonical: files.tensors[name] for canonical, name in self._names.items()
        }

    def array(self, name: str) -> np.ndarray:
        """Return a view of a tensor."""
        return self._files.array(self._names[name])

    def release(self, name: str) -> None:
        """Drop a tensor's pages."""
        self._files.release(self._names[name])


def _tie(config: ModelConfig, source: Any) -> tuple[ModelConfig, str]:
    """Return the configuration by what the file holds, and the name of a head that is not read.

    A file whose configuration ties the head to the embedding may still hold a head: an equal one is
    left out, another one is used, as transformers 5 does.
    """
    embed, head = (source.layout.global_names[field] for field in ("embed", "lm_head"))
    assert isinstance(embed, str) and isinstance(head, str), (embed, head)
    if not config.tied_embeddings or head not in source.tensors or embed not in source.tensors:
        return config, ""
    if _equal(source, embed, head):
        return config, head
    return dataclasses.replace(config, tied_embeddings=False), ""


def _equal(source: Any, a: str, b: str) -> bool:
    one, other = source.tensors[a], source.tensors[b]
    if one.shape != other.shape or one.dtype != other.dtype or one.dtype not in FLOATS:
        return False
    x, y = source.array(a), source.array(b)
    steps = range(0, len(x), _COMPARED_ROWS)
    same = all(np.array_equal(x[i : i + _COMPARED_ROWS], y[i : i + _COMPARED_ROWS]) for i in steps)
    source.release(a)
    source.release(b)
    return same


def _read(source: CanonicalTensors, slot: Slot, dtype: Any, panels: bool) -> jax.Array | Packed:
    values = slot.taken(source.array(slot.tensor))
    if panels:
        leaf = repack(values)
        source.release(slot.tensor)
        return leaf
    if source.layout.norm_plus_one and slot.field.endswith("norm"):
        values = with_one(values)
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    # A copy: a view of the file would change, or end the process, when the file does.
    leaf = jnp.array(values, copy=True).astype(dtype)
    leaf.block_until_ready()  # so that one tensor is on its way at a time
    source.release(slot.tensor)
    return leaf
