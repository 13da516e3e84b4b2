"""From a checkpoint to `Params`: read, rename, reorder, dequantise or keep packed, place."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from infer.backend import check_memory
from infer.config import ModelConfig
from infer.errors import WeightFormatError
from infer.models.gguf_layout import CONFIG_TENSORS
from infer.models.params import Params
from infer.models.registry import family_of
from infer.quant.blocks import FORMATS
from infer.quant.qarray import QArray
from infer.weights.assemble import Slot, assemble, each_slot, placed, slots, stored_shapes
from infer.weights.gguf import GGUFFile

# Called with (bytes done, bytes in all) as tensors are read.
Progress = Callable[[int, int], None]

# Types that are plain numbers: they become float arrays even where quantised matrices stay packed.
_PLAIN = ("F32", "F16", "BF16")
# Room beside the weights for a small cache and the temporaries of a step, as a share of the
# weights.
_HEADROOM = 0.15


def load_gguf(
    path: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    packed: bool = False,
    progress: Progress | None = None,
) -> Params:
    """Return the weights of a GGUF file.

    Args:
        path: of the file.
        dtype: of activations, norms and (unless packed) matrices.
        packed: keep quantised matrices in the file's own blocks; they are decoded inside the
            program.
        progress: called with (bytes done, bytes in all).

    Raises:
        WeightFormatError: the file is broken, or tensors are missing, stray or misshapen (all
        listed in one error). ConfigError: the architecture, or something it asks for, is not
        supported. CapacityError: the weights do not fit in memory; said before anything is loaded.
    """
    dtype = jnp.dtype(dtype)
    with GGUFFile.open(path) as file:
        family = family_of(file.meta_str("general.architecture"))
        assert family.config is not None and family.gguf is not None
        config = family.config(file)
        wanted = slots(family.gguf, config)
        _check_tensors(file, wanted, config)
        _check_memory(file, wanted, dtype, packed)
        return _read(file, wanted, dtype, packed, progress)


def _check_tensors(file: GGUFFile, leaves: Params, config: ModelConfig) -> None:
    wanted = stored_shapes(leaves)
    problems = []
    for name, shape in wanted.items():
        info = file.tensors.get(name)
        if info is None:
            problems.append(f"{name} is missing")
        elif tuple(info.shape) != shape:
            problems.append(f"{name} is {list(info.shape)}, must be {list(shape)}")
        elif info.type_name not in FORMATS and info.type_name not in _PLAIN:
            problems.append(f"{name} is {info.type_name}, which this version does not read")
    problems += [
        f"{name} has no place in a {config.family} model"
        for name in file.tensors
        if name not in wanted and name not in CONFIG_TENSORS
    ]
    if problems:
        shown = "; ".join(problems[:20]) + (
            f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        )
        raise WeightFormatError(f"{file.path}: {shown}")


def _stays_packed(type_name: str, packed: bool) -> bool:
    return packed and type_name not in _PLAIN


def _check_memory(file: GGUFFile, wanted: Params, dtype: jnp.dtype, packed: bool) -> None:
    weights = 0
    for name, shape in stored_shapes(wanted).items():
        info = file.tensors[name]
        keep = _stays_packed(info.type_name, packed)
        weights += info.nbytes if keep else int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    way_out = (
        "free memory or take a smaller model" if packed else "packed=True keeps the file's own size"
    )
    form = "packed weights" if packed else jnp.dtype(dtype).name
    check_memory(f"{file.path} as {form}", int(weights * (1 + _HEADROOM)), way_out)


def _read(
    file: GGUFFile,
    wanted: Params,
    dtype: jnp.dtype,
    packed: bool,
    progress: Progress | None,
) -> Params:
    total = sum(file.tensors[name].nbytes for name in stored_shapes(wanted))
    done = 0
    # A tensor that several leaves share is decoded once: they come one after the other.
    last: tuple[str, np.ndarray] | None = None
    uses = Counter(slot.name for slot in each_slot(wanted))

    def values(name: str) -> np.ndarray:
        nonlocal last
        if last is None or last[0] != name:
            last = (name, file.array(name, np.float32))
        return last[1]

    def read(slot: Slot) -> jnp.ndarray | QArray:
        nonlocal done
        info = file.tensors[slot.name]
        if _stays_packed(info.type_name, packed):
            raw = file.raw(slot.name)
            data = jnp.asarray(raw if slot.rows is None else raw[slot.rows])
            leaf = QArray.create(data, FORMATS[info.type_name], slot.shape)
        else:
            leaf = jnp.asarray(placed(slot, values(slot.name))).astype(dtype)
        uses[slot.name] -= 1
        if not uses[slot.name]:
            done += info.nbytes
        if progress is not None:
            progress(done, total)
        return leaf

    return assemble(wanted, read)
