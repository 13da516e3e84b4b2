"""From a GGUF file to `Params`: read, rename, reorder, dequantise or keep packed, place."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from infer import native
from infer.backend import check_memory, default_platform
from infer.models.gguf_layout import CONFIG_TENSORS
from infer.models.params import Params
from infer.models.registry import family_of
from infer.native.repack import FORMATS as native_formats
from infer.native.repack import Packed, repack
from infer.quant.blocks import FORMATS
from infer.quant.qarray import QArray
from infer.weights.gguf import GGUFFile
from infer.weights.slots import Progress, Slot, check_tensors, plan, read_plan, slots_of

# Types that are plain numbers: they become float arrays even where quantised matrices stay packed.
PLAIN = ("F32", "F16", "BF16")
_PLAIN_DTYPES: dict[str, jnp.dtype] = dict(
    zip(PLAIN, map(jnp.dtype, ("float32", "float16", "bfloat16")), strict=True)
)
# Room beside the weights for a small cache and the temporaries of a step, as a share of the
# weights.
HEADROOM = 0.15


def load_gguf(
    path: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    packed: bool | str = False,
    progress: Progress | None = None,
) -> Params:
    """Return the weights of a GGUF file.

    Args:
        path: of the file.
        dtype: of activations, norms and (unless packed) matrices.
        packed: keep quantised matrices packed: on a CPU with native operations in the order in
            which those read them, elsewhere, and with "blocks", as in the file.
        progress: called with (bytes done, bytes in all).

    Raises:
        WeightFormatError: the file is broken, or tensors are missing, stray or misshapen (all
        listed in one error). ConfigError: the architecture, or something it asks for, is not
        supported. CapacityError: the weights do not fit in memory; said before anything is loaded.
    """
    dtype = jnp.dtype(dtype)
    with GGUFFile.open(path) as file:
        slots = planned(file)
        _check_memory(file, slots, dtype, packed)
        return _read(file, slots, dtype, packed, progress)


def planned(file: GGUFFile) -> Params:
    """Return where each weight of a file lies.

    Raises:
        WeightFormatError, ConfigError: as `load_gguf`.
    """
    family = family_of(file.meta_str("general.architecture"))
    assert family.config is not None
    slots = plan(family.config(file), family.layer_names, family.global_names)
    check_tensors(
        file,
        slots,
        lambda kind: kind in FORMATS or kind in PLAIN,
        ignored=CONFIG_TENSORS.__contains__,
    )
    return slots


def _stays_packed(type_name: str, packed: bool | str) -> bool:
    return bool(packed) and type_name not in PLAIN


def uses_panels(packed: bool | str) -> bool:
    """Return whether `packed` asks for weights in the order of the CPU's native operations."""
    return packed is True and default_platform() == "cpu" and native.by_default()


def floats_in_panels(slot: Slot, itemsize: int, dtype: jnp.dtype) -> bool:
    """Return whether native operations multiply a weight of plain numbers of so many bytes as it
    is in the file: a matrix, of no more bytes than `dtype` would take.
    """
    matrix = len(slot.shape) == 2 and slot.field != "positions" and slot.shape[1] % 32 == 0
    return matrix and itemsize <= min(dtype.itemsize, 4)


def _check_memory(file: GGUFFile, slots: Params, dtype: jnp.dtype, packed: bool | str) -> None:
    weights = 0
    for slot in slots_of(slots):
        info = file.tensors[slot.tensor]
        numbers = int(np.prod(slot.shape))
        plain = _PLAIN_DTYPES.get(info.type_name)
        if _stays_packed(info.type_name, packed):
            weights += info.nbytes
        elif plain and uses_panels(packed) and floats_in_panels(slot, plain.itemsize, dtype):
            weights += numbers * plain.itemsize
        else:
            weights += numbers * dtype.itemsize
    way_out = (
        "free memory or take a smaller model" if packed else "packed=True keeps the file's own size"
    )
    form = "packed weights" if packed else jnp.dtype(dtype).name
    check_memory(f"{file.path} as {form}", int(weights * (1 + HEADROOM)), way_out)


def _read(
    file: GGUFFile, slots: Params, dtype: jnp.dtype, packed: bool | str, progress: Progress | None
) -> Params:
    # A tensor that several weights share is decoded once: they come one after the other.
    decoded = functools.lru_cache(maxsize=1)(lambda name: file.array(name, np.dtype(dtype)))

    panels = uses_panels(packed)

    def read(slot: Slot) -> jnp.ndarray | QArray | Packed:
        info = file.tensors[slot.tensor]
        plain = _PLAIN_DTYPES.get(info.type_name)
        if _stays_packed(info.type_name, packed):
            raw, format = slot.taken(file.raw(slot.tensor)), FORMATS[info.type_name]
            if panels and info.type_name in native_formats and slot.shape[1] % 32 == 0:
                leaf = repack(
                    QArray.create(raw, format, slot.shape),
                    functools.partial(file.release_view, slot.tensor),
                )
                data = leaf.data
            else:
                # A copy: a view of the file would change, or end the process, when the file does.
                data = jnp.array(raw, copy=True)
                leaf = QArray.create(data, format, slot.shape)
        elif panels and plain and floats_in_panels(slot, plain.itemsize, dtype):
            leaf = repack(slot.taken(file.array(slot.tensor, plain)))
            data = leaf.data
        else:
            data = leaf = jnp.asarray(slot.taken(decoded(slot.tensor)))
        data.block_until_ready()  # so that one tensor is on its way at a time
        file.release(slot.tensor)
        return leaf

    return read_plan(file, slots, read, progress)
