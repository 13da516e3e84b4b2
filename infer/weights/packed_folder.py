"""Params with packed weights in a folder of our own form (`packed_form`): written, and read back
bit for bit.

A weight has the name of the checkpoint's tensor that it is.  Where a tensor holds several weights,
or one in another order, and one of them is packed, each of them has that name and its field:
`model.layers.0.self_attn.qkv_proj.weight.q`, in the order in which the model is run.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from infer import fingerprint
from infer.backend import check_memory
from infer.config import ModelConfig
from infer.errors import ConfigError, WeightFormatError
from infer.model_files import ModelFolder
from infer.models.checkpoint import Layout
from infer.models.params import Params, validate
from infer.native.repack import Packed, repack
from infer.quant.format_json import fits
from infer.quant.formats import Format, PlanarFormat
from infer.quant.qarray import NestedScale, QArray, dequantize
from infer.tokenizer import Tokenizer
from infer.weights import folder_files
from infer.weights.folder_config import read_config
from infer.weights.load import HEADROOM, floats_in_panels, uses_panels
from infer.weights.new_folder import new_folder
from infer.weights.packed_form import PARTS, Calibration, PackedForm, of_config
from infer.weights.safetensors import DTYPES, FLOATS, TensorInfo
from infer.weights.safetensors_writer import (
    MAX_SHARD_BYTES,
    Entry,
    Progress,
    dtype_name,
    write_folder,
)
from infer.weights.shards import SafetensorsFolder, listed
from infer.weights.slots import Slot, plan, slots_of, stored

logger = logging.getLogger(__name__)

# Forms of packed weights in a folder.
FORMS = ("infer", "compressed-tensors")
# Which weights may be packed: those that only products and the embedding read.
MATRICES = ("q", "k", "v", "o", "gate", "up", "down", "embed", "lm_head")


def place_names(slots: list[Slot]) -> list[str]:
    """Return the name of each weight of a plan where it stands for itself."""
    parts: dict[str, int] = {}
    for slot in slots:
        parts[slot.tensor] = parts.get(slot.tensor, 0) + 1
    plain = lambda s: parts[s.tensor] == 1 and s.rows is None and not s.transposed
    return [s.tensor if plain(s) else f"{s.tensor}.{s.field}" for s in slots]


# ---- Writing ------------------------------------------------------------------------------------


def write_params(
    params: Params,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    form: str = "infer",
    calibration: Calibration | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> list[Path]:
    """Write weights and tokenizer into a new folder, whole or not at all; return the weight files.

    float32 matrices whose every number is a bfloat16 or a float16 are written as such.

    Args:
        params: float arrays and QArrays.
        tokenizer: of the model.
        folder: does not exist or is empty.
        form: of packed weights: "infer", ours, or "compressed-tensors".
        calibration: what the model was calibrated with, if it was.
        max_shard_bytes: tensor bytes of one file.
        progress: called with (bytes done, bytes in all).

    Raises:
        ConfigError: the folder is not empty, weights are in the order of the CPU's native
            operations, no config.json says what the model is, or the form has no place for a
            packed weight.
        WeightFormatError: the tokenizer has no form in a folder.
    """
    _check_kinds(params)
    where = f"{params.config.family} weights"
    layout, values = folder_files.described(params.config, where, "keep the file they come from")
    if form not in FORMS:
        raise ConfigError(f"form is {form!r:.60}; use {', '.join(map(repr, FORMS))}")
    metadata = {"format": "pt"}
    if form == "compressed-tensors":
        entries, said = _compressed_entries(validate(params), layout)
        values |= said
    else:
        entries, own = _entries(validate(params), layout)
        if calibration is not None:
            own = dataclasses.replace(own, calibration=calibration)
        if own.weights:
            values |= {"quantization_config": own.config()}
            metadata |= own.metadata()
    if calibration is not None:
        metadata |= calibration.metadata()
    values |= {"torch_dtype": params.dtype.name}
    to = folder.expanduser().absolute()
    with new_folder(to) as scratch:
        folder_files.write(scratch, values, tokenizer, params.config)
        paths = write_folder(
            scratch, entries, metadata, max_shard_bytes=max_shard_bytes, progress=progress
        )
    return [to / path.name for path in paths]


def _check_kinds(params: Params) -> None:
    if any(isinstance(leaf, Packed) for leaf in _leaves(params)):
        raise ConfigError(
            "the weights are packed in the order of this CPU's native operations, which is no form"
            " for a file; load the model with packed='blocks' (GGUF) or packed=False, quantise that"
            " and save it"
        )


def _leaves(params: Params) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, (QArray, Packed)))


def _entries(params: Params, layout: Layout) -> tuple[dict[str, Entry], PackedForm]:
    slots = slots_of(plan(params.config, layout.layer_names, layout.global_names))
    names, leaves = place_names(slots), _leaves(params)
    groups: dict[str, list[int]] = {}
    for i, slot in enumerate(slots):
        groups.setdefault(slot.tensor, []).append(i)
    entries: dict[str, Entry] = {}
    formats: dict[str, Format] = {}
    for tensor, group in groups.items():
        if not any(isinstance(leaves[i], QArray) for i in group):
            entries[tensor] = _float_entry([(slots[i], leaves[i]) for i in group], layout)
            continue
        for i in group:
            if isinstance(leaves[i], QArray):
                formats[names[i]] = leaves[i].format
                entries |= _packed_entries(names[i], slots[i], leaves[i])
            else:
                whole = Slot(field=slots[i].field, tensor=names[i], shape=slots[i].shape)
                entries[names[i]] = _float_entry([(whole, leaves[i])], layout)
    return entries, PackedForm(formats)


def _is_blocks(leaf: Any) -> bool:
    return isinstance(leaf, QArray) and not isinstance(leaf.format, PlanarFormat)


@dataclasses.dataclass(frozen=True)
class _Decoded:
    """The floats that blocks stand for, made when they are written."""

    weight: QArray

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(dequantize(self.weight), dtype)


def _compressed_entries(params: Params, layout: Layout) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Return the tensors of a folder in the form of compressed-tensors, and what config.json says
    of packed ones.
    """
    from infer.weights.quantised.compressed_writer import checked, config_of, matrix_entries

    slots = slots_of(plan(params.config, layout.layer_names, layout.global_names))
    leaves: list[Any] = _leaves(params)
    groups: dict[str, list[int]] = {}
    for i, slot in enumerate(slots):
        groups.setdefault(slot.tensor, []).append(i)
    entries: dict[str, Entry] = {}
    formats: dict[str, PlanarFormat] = {}
    stayed = []
    blocks = [i for i, leaf in enumerate(leaves) if _is_blocks(leaf)]
    if blocks:
        logger.warning(
            "%s and %d others are blocks of GGUF, which have no place in compressed-tensors: they"
            " are written as the floats that they stand for",
            slots[blocks[0]].tensor,
            len(blocks) - 1,
        )
        leaves = [_Decoded(leaf) if _is_blocks(leaf) else leaf for leaf in leaves]
    for tensor, group in groups.items():
        module = tensor.removesuffix(".weight")
        if not any(isinstance(leaves[i], QArray) for i in group):
            entries[tensor] = _float_entry([(slots[i], leaves[i]) for i in group], layout)
            if slots[group[0]].field in MATRICES and slots[group[0]].field != "embed":
                stayed.append(module)
            continue
        slot = slots[group[0]]
        if len(group) > 1 or slot.rows is not None or slot.transposed or slot.field == "embed":
            raise ConfigError(
                f"{tensor} is packed, and in compressed-tensors only linear layers of their own"
                " are; save in our own form (form='infer')"
            )
        formats[module] = checked(module, leaves[group[0]])
        entries |= matrix_entries(module, leaves[group[0]])
    if not formats:
        return entries, {}
    if params.lm_head is None:
        stayed.append("lm_head")
    return entries, {"quantization_config": config_of(formats, stayed)}


def _packed_entries(name: str, slot: Slot, weight: QArray) -> dict[str, Entry]:
    if slot.field not in MATRICES:
        raise ConfigError(f"{name} is packed; only {', '.join(MATRICES)} can be")
    parts = {part: value for part in PARTS if (value := _part(weight, part)) is not None}
    try:
        assembled(parts, weight.format, weight.shape)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    return {
        f"{name}.{part}": Entry(
            dtype=dtype_name(value.dtype),
            shape=tuple(value.shape),
            read=lambda value=value: np.asarray(value),
        )
        for part, value in parts.items()
    }


def _part(weight: QArray, part: str) -> Any:
    """Return a part of a packed weight by its name, None if it has none."""
    outer, _, inner = part.partition(".")
    value = getattr(weight, outer)
    if isinstance(value, NestedScale):
        return getattr(value, inner) if inner else None
    return None if inner else value


def _float_entry(parts: list[tuple[Slot, Any]], layout: Layout) -> Entry:
    """Return the entry of a tensor of float weights, in the dtype that holds all of them."""

    def values() -> np.ndarray:
        arrays = [(slot, np.asarray(leaf)) for slot, leaf in parts]
        if len({array.dtype for _, array in arrays}) > 1:
            arrays = [(slot, array.astype(np.float32)) for slot, array in arrays]
        whole = stored(arrays)
        if layout.norm_plus_one and parts[0][0].field.endswith("norm"):
            return _without_one(whole)
        return _narrowed(whole)

    first = values()
    dtype, shape = first.dtype, first.shape
    del first
    return Entry(dtype=dtype_name(dtype), shape=shape, read=values)


def _narrowed(values: np.ndarray) -> np.ndarray:
    """Return a float32 matrix as bfloat16 or float16 if each of its numbers is one."""
    if values.dtype != np.float32 or values.ndim != 2:
        return values
    bits = lambda x: np.ascontiguousarray(x).view(np.uint32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for dtype in (ml_dtypes.bfloat16, np.float16):
            same = lambda x, to=dtype: np.array_equal(bits(x.astype(to).astype(x.dtype)), bits(x))
            if same(values[:1]) and same(values):
                return values.astype(dtype)
    return values


def _without_one(values: np.ndarray) -> np.ndarray:
    """Return w - 1 in the first dtype from which w comes back exactly when one is added."""
    wide = values.astype(np.float64)
    for dtype in (values.dtype, np.dtype(np.float32)):
        less = (wide - 1).astype(dtype)
        if np.array_equal(with_one(less).astype(values.dtype), values):
            return less
    return wide - 1


def with_one(values: np.ndarray) -> np.ndarray:
    """Return 1 + w as loaders do: in float32, or in float64 where the file has that."""
    wide = np.float64 if values.dtype == np.float64 else np.float32
    return values.astype(wide) + wide(1)


# ---- Reading ------------------------------------------------------------------------------------


def calibration_of(path: Path) -> Calibration | None:
    """Return the record of a folder's calibration, with its fingerprint; None where there is none.

    Raises:
        WeightFormatError: it is broken.
    """
    folder = ModelFolder(path)
    hf = read_config(folder)
    form = of_config(hf.values, hf.where)
    if form is None or form.calibration is None:
        return None
    with SafetensorsFolder.open(folder) as files:
        texts = [f.metadata.get(fingerprint.METADATA_KEY) for f in files.files.values()]
    text = next((text for text in texts if text is not None), None)
    if text is None:
        return form.calibration
    try:
        mark = fingerprint.Fingerprint.from_json(text)
    except ValueError as error:
        raise WeightFormatError(f"{folder.label}: {error}") from None
    return dataclasses.replace(form.calibration, fingerprint=mark)


def check(
    files: SafetensorsFolder, layout: Layout, config: ModelConfig, form: PackedForm
) -> tuple[Params, list["Place"]]:
    """Return the plan of a folder of this form, and where each of its weights lies, after holding
    all headers against it.

    Raises:
        WeightFormatError: weights are missing, stray, misshapen or not in the format that is said;
            all are listed in one error.
    """
    for file in files.files.values():
        form.check_metadata(file.metadata, file.path)
    slots = plan(config.validate(), layout.layer_names, layout.global_names)
    places, problems = _places(slots_of(slots), form)
    problems += _problems(places, files)
    if problems:
        raise listed(files.path, problems)
    return slots, places


def read_params(
    files: SafetensorsFolder,
    layout: Layout,
    config: ModelConfig,
    form: PackedForm,
    *,
    dtype: jnp.dtype,
    packed: bool,
    progress: Progress | None,
) -> Params:
    """Return the weights of a folder of this form; packed ones bit for bit, or repacked.

    Args:
        files: its open files.
        layout: of the family.
        config: what the model is.
        form: what config.json says of packed weights.
        dtype: of float weights.
        packed: on a CPU with native operations weights go into the order in which those read them,
            packed ones as far as there are kernels for their format; else packed ones stay as they
            are.
        progress: called with (bytes done, bytes in all).

    Raises:
        WeightFormatError: weights are missing, stray, misshapen or not in the format that is said;
            all are listed in one error.
        CapacityError: they do not fit in memory.
    """
    slots, places = check(files, layout, config, form)
    panels = uses_panels(packed)
    itemsize = lambda place: np.dtype(DTYPES[files.tensors[place.slot.tensor].dtype][1]).itemsize
    kept = lambda place: panels and floats_in_panels(place.slot, itemsize(place), dtype)
    weights = sum(
        _packed_bytes(place, files)
        if place.format is not None
        else math.prod(place.slot.shape) * (itemsize(place) if kept(place) else dtype.itemsize)
        for place in places
    )
    check_memory(f"{files.path}, packed", int(weights * (1 + HEADROOM)), "free memory or load less")
    total = sum(info.nbytes for info in files.tensors.values())
    done, leaves = 0.0, []
    for place in places:
        if place.format is None:
            leaves.append(_read_float(place.slot, files, layout, dtype, kept(place)))
            share = math.prod(place.slot.shape) / math.prod(files.tensors[place.slot.tensor].shape)
            done += files.tensors[place.slot.tensor].nbytes * share
        else:
            leaves.append(_read_packed(place, files, panels))
            done += _packed_bytes(place, files)
        if progress is not None:
            progress(round(done), total)
    return jax.tree.unflatten(jax.tree.structure(slots), leaves)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a weight of a folder lies; packed ones have a format, and a name in `slot.tensor`."""

    slot: Slot
    format: Format | None = None


def _places(slots: list[Slot], form: PackedForm) -> tuple[list[Place], list[str]]:
    names = place_names(slots)
    split = {slot.tensor for slot, name in zip(slots, names, strict=True) if name in form.weights}
    places, problems = [], []
    for slot, name in zip(slots, names, strict=True):
        own = Slot(field=slot.field, tensor=name, shape=slot.shape)
        if name in form.weights and slot.field not in MATRICES:
            problems.append(f"{name} is said to be packed; only {', '.join(MATRICES)} can be")
        elif name in form.weights:
            places.append(Place(own, form.weights[name]))
        else:
            places.append(Place(own if slot.tensor in split else slot))
    known = set(names)
    problems += [
        f"{name!r:.100} is said to be packed, and this model has no such weight"
        for name in form.weights
        if name not in known
    ]
    return places, problems


def _problems(places: list[Place], files: SafetensorsFolder) -> list[str]:
    """Hold the tensors of a folder against its weights; only headers are read."""
    found: list[str] = []
    known: set[str] = set()
    heights: dict[str, int] = {}
    for place in places:
        slot = place.slot
        if place.format is not None:
            names = _part_names(slot.tensor, files)
            known |= set(names.values())
            found += _packed_problems(place, {p: files.tensors[n] for p, n in names.items()})
            continue
        known.add(slot.tensor)
        heights[slot.tensor] = heights.get(slot.tensor, 0) + slot.shape[0]
    for place in places:
        slot = place.slot
        if place.format is not None or slot.tensor not in heights:
            continue
        shape = (heights.pop(slot.tensor), *slot.shape[1:])
        shape = shape[::-1] if slot.transposed else shape
        info = files.tensors.get(slot.tensor)
        if info is None:
            found.append(f"{slot.tensor} is missing")
        elif info.shape != shape:
            found.append(f"{slot.tensor} is {list(info.shape)}, must be {list(shape)}")
        elif info.dtype not in FLOATS:
            found.append(f"{slot.tensor} is {info.dtype}, must be one of {', '.join(FLOATS)}")
    return found + [
        f"{name!r:.200} belongs to no weight" for name in files.tensors if name not in known
    ]


def _part_names(name: str, files: SafetensorsFolder) -> dict[str, str]:
    """Return the tensors of the parts of a packed weight that are there."""
    names = {part: f"{name}.{part}" for part in PARTS}
    return {part: tensor for part, tensor in names.items() if tensor in files.tensors}


def _packed_problems(place: Place, parts: Mapping[str, TensorInfo]) -> list[str]:
    assert place.format is not None
    name, shape = place.slot.tensor, place.slot.shape
    assert len(shape) == 2, shape
    found = [f"{name}: {problem}" for problem in fits(place.format, (shape[0], shape[1]))]
    try:
        stand_ins = {
            part: jax.ShapeDtypeStruct(info.shape, DTYPES[info.dtype][1])
            for part, info in parts.items()
        }
        assembled(stand_ins, place.format, shape)
    except (ValueError, TypeError) as error:  # TypeError: a dtype that JAX does not have
        found.append(f"{name}: {error}")
    return found


def assembled(parts: Mapping[str, Any], format: Format, shape: tuple[int, ...]) -> QArray:
    """Return the packed weight of these parts, after checking that they belong together."""
    if "data" not in parts:
        raise ValueError("data is missing")
    if not isinstance(format, PlanarFormat):
        if len(parts) > 1:
            extra = ", ".join(sorted(set(parts) - {"data"}))
            raise ValueError(f"{extra} has no place in {format.name}")
        return QArray.create(parts["data"], format, shape)
    scale = parts.get("scale")
    inner = {p.partition(".")[2]: x for p, x in parts.items() if p.startswith("scale.")}
    if inner and (scale is not None or len(inner) < 3):
        raise ValueError("scale is either one tensor, or codes, absmax and offset")
    if inner:
        scale = NestedScale(**inner)
    rest = {p: parts.get(p) for p in ("zero", "global_scale", "perm", "act_scale")}
    return QArray.planar(parts["data"], scale, format, shape, **rest)


def _packed_bytes(place: Place, files: SafetensorsFolder) -> int:
    return sum(files.tensors[n].nbytes for n in _part_names(place.slot.tensor, files).values())


def _read_packed(place: Place, files: SafetensorsFolder, panels: bool) -> QArray | Packed:
    assert place.format is not None
    parts = {}
    for part, name in _part_names(place.slot.tensor, files).items():
        values = files.array(name)
        _check_part(files, place.format, part, name, values)
        # A copy: a view of the file would change, or end the process, when the file does.
        parts[part] = jnp.array(values, copy=True)
        parts[part].block_until_ready()  # so that one tensor is on its way at a time
        files.release(name)
    weight = assembled(parts, place.format, place.slot.shape)
    if panels:
        with contextlib.suppress(NotImplementedError):
            return repack(weight)
    return weight


def check_values(files: SafetensorsFolder, places: list[Place]) -> None:
    """Refuse scales and orders that loading refuses; codes are not read.

    Raises:
        WeightFormatError: the first that is wrong.
    """
    for place in places:
        if place.format is None:
            continue
        for part, name in _part_names(place.slot.tensor, files).items():
            if part != "data":
                _check_part(files, place.format, part, name, files.array(name))
                files.release(name)


def _check_part(
    files: SafetensorsFolder, format: Format, part: str, name: str, values: np.ndarray
) -> None:
    """Refuse an order that is none, and scales that are NaN or infinite: every product would be."""
    if part == "perm" and not np.array_equal(np.sort(values), np.arange(len(values))):
        raise WeightFormatError(
            f"{files.path}: {name} is no order of the {len(values)} inputs: each must come once"
        )
    if part in ("data", "zero", "perm", "scale.codes"):
        return
    if values.dtype == np.uint8:  # the codes of NaN
        e4m3 = isinstance(format, PlanarFormat) and format.scale_dtype == "e4m3"
        finite = (values & 0x7F) != 0x7F if e4m3 else values != 0xFF
    else:
        finite = np.isfinite(values.astype(np.float32))
    if not finite.all():
        raise WeightFormatError(
            f"{files.path}: {name} has scales that are NaN or infinite; the file is damaged, get it"
            " again"
        )


def _read_float(
    slot: Slot, files: SafetensorsFolder, layout: Layout, dtype: jnp.dtype, panels: bool
) -> Any:
    values = slot.taken(files.array(slot.tensor))
    if panels:
        leaf = repack(values)
        files.release(slot.tensor)
        return leaf
    if layout.norm_plus_one and slot.field.endswith("norm"):
        values = with_one(values)
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    leaf = jnp.array(values, copy=True).astype(dtype)
    leaf.block_until_ready()
    files.release(slot.tensor)
    return leaf
