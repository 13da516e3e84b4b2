"""compressed-tensors (llm-compressor): groups of modules, each with a scheme and a form.

    pack-quantized      weight_packed int32 [N, K b / 32], value + 2^(b - 1), low bits first;
                        weight_shape, weight_scale [N, K / g], weight_zero_point int32 packed
                        along N, weight_g_idx
    int-quantized       weight int8 [N, K], weight_scale [N, 1] or [1], weight_zero_point int8,
                        input_scale
    float-quantized,    weight E4M3 [N, K], weight_scale [N, 1], [1] or [N / 128, K / 128],
    naive-quantized     input_scale
    nvfp4-pack-...      weight_packed uint8 [N, K / 2], low nibble first, weight_scale E4M3
                        [N, K / 16], weight_global_scale, which divides
    mxfp4-pack-...      the same with weight_scale uint8 (E8M0) [N, K / 32]

What a module is follows from its tensors; the configuration says how activations are rounded.
"""

import dataclasses
import re
from typing import Any

import numpy as np

from infer.errors import WeightFormatError
from infer.models.checkpoint import HFConfig
from infer.quant import rtn
from infer.weights.quantised.floats8 import one_number, scaled
from infer.weights.quantised.matrix import (
    FLOATS,
    SCALE_DTYPES,
    Matrix,
    Part,
    Tensors,
    bytes_of_words,
    order_of_groups,
    pack,
    unpacked,
)

_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense"),
)


def compressed(config: HFConfig, tensors: Tensors) -> dict[str, Matrix]:
    """Return the quantised matrices of a checkpoint by their modules.

    Raises:
        WeightFormatError: a form or scheme that is not read, or tensors that do not fit.
    """
    whole = config.text("format", "dense")
    if whole not in _FORMATS:
        raise WeightFormatError(
            f"{config.where}: format is {whole!r:.40}; {', '.join(_FORMATS)} are read"
        )
    for key in ("transform_config", "sparsity_config"):
        if config.get(key):
            raise WeightFormatError(
                f"{config.where}: has {key}, which this version does not do; take a checkpoint"
                " without it"
            )
    groups = config.section("config_groups")
    schemes = [] if groups is None else _schemes(groups)
    found = {}
    for module in tensors.ending("weight_packed"):
        scheme = _scheme_of(module, schemes)
        info = tensors.get(f"{module}.weight_packed", ("I32", "U8"), (None, None))
        read = _words if info.dtype == "I32" else _nibbles
        found[module] = read(module, tensors, scheme)
    for module in tensors.ending("weight_scale"):
        if module in found:
            continue
        scheme = _scheme_of(module, schemes)
        info = tensors.get(f"{module}.weight", ("I8", "F8_E4M3"), (None, None))
        found[module] = (_bytes if info.dtype == "I8" else _floats)(module, tensors, scheme)
    return found


@dataclasses.dataclass(frozen=True)
class _Scheme:
    """What a group of the configuration says of its modules."""

    targets: tuple[str, ...]
    weights: HFConfig
    inputs: HFConfig | None

    @property
    def activations(self) -> str:
        """How inputs are rounded, in the words of PlanarFormat; "" where they are not.

        Raises:
            WeightFormatError: in a way that is not done here.
        """
        x = self.inputs
        if x is None:
            return ""
        bits, kind = x.integer("num_bits"), x.text("type", "int")
        strategy = x.text("strategy", "tensor")
        dynamic = x.get("dynamic", False)
        if bits == 4 and kind == "float":  # NVFP4's and MXFP4's stay as they are here
            return ""
        if x.get("symmetric", True) is not True:
            raise WeightFormatError(
                f"{x.where}: activations have zero points (symmetric is"
                f" {x.get('symmetric')!r:.20}), and are rounded without here; take a checkpoint"
                " with symmetric ones"
            )
        name = {"int": "int8", "float": "e4m3"}.get(kind)
        if bits == 8 and name is not None and dynamic is True and strategy == "token":
            return name
        if bits == 8 and name is not None and dynamic is False and strategy == "tensor":
            return f"{name}_static"
        blocks = strategy == "group" and x.integer("group_size", 0) == 128
        if bits == 8 and kind == "float" and dynamic is True and blocks:
            return "e4m3_128"
        raise WeightFormatError(
            f"{x.where}: activations of {bits} bits ({kind}, {strategy}, dynamic {dynamic!r}) are"
            " not rounded so here; 8 bits by token, or static by tensor, are"
        )


def _schemes(groups: HFConfig) -> list[_Scheme]:
    found = []
    for key in groups.values:
        group = groups.section(key)
        if group is None:
            continue
        weights = group.section("weights")
        if weights is None:
            raise WeightFormatError(
                f"{group.where}: has no weights; what only rounds inputs is not read"
            )
        targets, inputs = tuple(group.texts("targets")), group.section("input_activations")
        found.append(_Scheme(targets, weights, inputs))
    return found


def _scheme_of(module: str, schemes: list[_Scheme]) -> _Scheme | None:
    """Return the scheme of a module: by its name, a pattern, or else its class."""
    by_name = [s for s in schemes for t in s.targets if _targets(t, module)]
    by_class = [s for s in schemes if "Linear" in s.targets]
    return next(iter([*by_name, *by_class]), None)


def _targets(target: str, module: str) -> bool:
    if target.startswith("re:"):
        try:
            return re.match(target[3:], module) is not None
        except re.error as error:
            raise WeightFormatError(f"{target!r:.80} is no pattern ({error})") from None
    return module == target or module.endswith(f".{target}")


def _activations(scheme: _Scheme | None) -> str:
    return "" if scheme is None else scheme.activations


def _with_static(parts: dict[str, Part], module: str, tensors: Tensors, acts: str) -> list[str]:
    """Put the scale of activations in; return the tensors that stand for it."""
    name = f"{module}.input_scale"
    if "static" in acts:
        parts["act_scale"] = one_number(tensors, name)
        return [name]
    beside = (name, f"{module}.input_zero_point", f"{module}.input_global_scale")
    return [n for n in beside if n in tensors.infos]


def _words(module: str, tensors: Tensors, scheme: _Scheme | None) -> Matrix:
    """Return a matrix of codes in words."""
    name = lambda part: f"{module}.weight_{part}"
    out, words = tensors.get(name("packed"), ("I32",), (None, None)).shape
    tensors.get(name("shape"), ("I64", "I32"), (2,))
    shape = tuple(int(n) for n in tensors.read(name("shape")))
    bits = 4 if scheme is None else scheme.weights.integer("num_bits")
    if bits not in (2, 3, 4, 8):
        raise tensors.error(name("packed"), f"has {bits} bits; 2, 3, 4 and 8 are read")
    per_word = 32 // bits
    width = shape[1]
    if shape[0] != out or width < 8 or width % 8 or words != -(-width // per_word):
        raise tensors.error(
            name("packed"), f"is {[out, words]}, and weight_shape {list(shape)} with {bits} bits"
        )
    scale = tensors.get(name("scale"), FLOATS, (None, None))
    if scale.shape[0] not in (1, out) or scale.shape[1] < 1 or width % scale.shape[1]:
        raise tensors.error(name("scale"), f"is {list(scale.shape)}, and the weight {list(shape)}")
    rows, groups = scale.shape
    group = width // groups
    sources = [name(part) for part in ("packed", "shape", "scale")]
    order = None
    if name("g_idx") in tensors.infos:
        sources.append(name("g_idx"))
        tensors.get(name("g_idx"), ("I32", "I64"), (width,))
        g_idx = tensors.read(name("g_idx"))
        if (g_idx >= 0).all():
            order = order_of_groups(g_idx, group, f"{tensors.path}: {module}")

    def data() -> np.ndarray:
        stream = tensors.read(name("packed"))
        if bits == 3:  # ten in a word, two bits of it empty
            places = np.arange(0, 30, 3, dtype=np.uint32)
            codes = (stream.view(np.uint32)[..., None] >> places) & 7
            codes = codes.reshape(out, -1)[:, :width].astype(np.uint8)
        else:
            stream = bytes_of_words(stream)[:, : width * bits // 8]
            if order is None:
                return stream
            codes = unpacked(stream, bits)
        return pack(codes if order is None else codes[:, order], bits)

    parts = {
        "data": Part("U8", (out, width * bits // 8), data),
        "scale": Part(scale.dtype, scale.shape, lambda: tensors.read(name("scale"))),
    }
    symmetric = name("zero_point") not in tensors.infos
    if not symmetric:
        sources.append(name("zero_point"))
        info = tensors.get(name("zero_point"), ("I32", "I8"), (None, groups))
        packed = info.dtype == "I32"
        if info.shape[0] != (-(-rows // per_word) if packed else rows):
            raise tensors.error(
                name("zero_point"), f"is {list(info.shape)}, and scales {rows} rows"
            )

        def zeros() -> np.ndarray:
            values = tensors.read(name("zero_point"))
            if not packed:
                return (values.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
            places = np.arange(0, per_word * bits, bits, dtype=np.uint32)
            codes = (values.view(np.uint32)[:, None, :] >> places[None, :, None]) & (
                (1 << bits) - 1
            )
            return codes.reshape(-1, groups)[:rows].astype(np.uint8)

        parts["zero"] = Part("U8", (rows, groups), zeros)
    acts = _activations(scheme)
    sources += _with_static(parts, module, tensors, acts)
    format = rtn.int_format(
        bits,
        0 if groups == 1 else group,
        1 if rows == out else 0,
        symmetric,
        SCALE_DTYPES[scale.dtype],
        acts,
    )
    if order is not None:
        format = dataclasses.replace(format, name=f"{format.name}-ORDERED", ordered=True)
        parts["perm"] = Part("I32", (width,), lambda: order)
    return Matrix((out, width), format, parts, tuple(sources))


def _bytes(module: str, tensors: Tensors, scheme: _Scheme | None) -> Matrix:
    """Return a matrix of int8."""
    name = f"{module}.weight"
    out, width = tensors.get(name, ("I8",), (None, None)).shape
    scale = tensors.get(f"{name}_scale", FLOATS)
    shape = scale.shape if len(scale.shape) == 2 else (int(np.prod(scale.shape)), 1)
    rows, groups = shape
    if rows not in (1, out) or groups < 1 or width % groups:
        raise tensors.error(
            f"{name}_scale", f"is {list(scale.shape)}, and the weight {[out, width]}"
        )
    unsigned = lambda values: (values.view(np.uint8) ^ np.uint8(128)).reshape
    parts = {
        "data": Part("U8", (out, width), lambda: unsigned(tensors.read(name))(out, width)),
        "scale": Part(scale.dtype, shape, lambda: tensors.read(f"{name}_scale").reshape(shape)),
    }
    sources = [name, f"{name}_scale"]
    symmetric = f"{name}_zero_point" not in tensors.infos
    if not symmetric:
        tensors.get(f"{name}_zero_point", ("I8",), scale.shape)
        sources.append(f"{name}_zero_point")
        read = lambda: unsigned(tensors.read(f"{name}_zero_point"))(shape)
        parts["zero"] = Part("U8", shape, read)
    acts = _activations(scheme)
    sources += _with_static(parts, module, tensors, acts)
    format = rtn.int_format(
        8,
        0 if groups == 1 else width // groups,
        1 if rows == out else 0,
        symmetric,
        SCALE_DTYPES[scale.dtype],
        acts,
    )
    return Matrix((out, width), format, parts, tuple(sources))


def _floats(module: str, tensors: Tensors, scheme: _Scheme | None) -> Matrix:
    """Return a matrix of E4M3."""
    acts = _activations(scheme)
    name = f"{module}.weight"
    out, width = tensors.get(name, ("F8_E4M3",), (None, None)).shape
    scale = tensors.get(f"{name}_scale", FLOATS)
    grid = -(-out // 128), -(-width // 128)
    by_block = scheme is not None and scheme.weights.text("strategy", "") == "block"
    if not by_block:
        matrix = scaled(module, tensors, static="static" in acts, dynamic=bool(acts))
        return dataclasses.replace(matrix, unused={})
    block = scheme.weights.get("block_structure")  # type: ignore[union-attr]
    if block not in ([128, 128], "128x128") or scale.shape != grid:
        raise tensors.error(
            f"{name}_scale",
            f"is {list(scale.shape)}, blocks {block!r:.40}; 128 x 128 is read",
        )
    format = dataclasses.replace(
        rtn.FORMATS["FP8-E4M3"],
        name="FP8-E4M3-B128" + (f"-A:{acts}" if acts else ""),
        rows=128,
        group=128,
        scale_dtype=SCALE_DTYPES[scale.dtype],
        activations=acts,
    )
    parts = {
        "data": Part("U8", (out, width), lambda: tensors.read(name).view(np.uint8)),
        "scale": Part(scale.dtype, grid, lambda: tensors.read(f"{name}_scale")),
    }
    return Matrix((out, width), format, parts, (name, f"{name}_scale"))


def _nibbles(module: str, tensors: Tensors, scheme: _Scheme | None) -> Matrix:
    """Return a matrix of E2M1 in pairs, NVFP4 or MXFP4."""
    name = lambda part: f"{module}.weight_{part}"
    out = tensors.get(name("packed"), ("U8",), (None, None)).shape[0]
    scale = tensors.get(name("scale"), ("F8_E4M3", "U8", "F8_E8M0"), (out, None))
    acts = [n for n in (f"{module}.input_global_scale",) if n in tensors.infos]
    sources, whole = [name("packed"), name("scale"), *acts], None
    if scale.dtype == "F8_E4M3":
        sources.append(name("global_scale"))
        whole = one_number(tensors, name("global_scale"), invert=True)
    unused = dict.fromkeys(acts, "activations stay as they are")
    return fp4(tensors, name("packed"), name("scale"), whole, sources=tuple(sources), unused=unused)


def fp4(
    tensors: Tensors,
    data: str,
    scale: str,
    global_scale: Part | None,
    *,
    sources: tuple[str, ...],
    unused: dict[str, str] | None = None,
) -> Matrix:
    """Return a matrix of E2M1, the low nibble first: NVFP4 with a global scale, else MXFP4."""
    out, half = tensors.get(data, ("U8",), (None, None)).shape
    group = 32 if global_scale is None else 16
    if 2 * half % group:
        raise tensors.error(data, f"has {2 * half} inputs, no whole groups of {group}")
    dtypes = ("U8", "F8_E8M0") if global_scale is None else ("F8_E4M3",)
    grid = (out, 2 * half // group)
    tensors.get(scale, dtypes, grid)
    parts: dict[str, Any] = {
        "data": Part("U8", (out, half), lambda: tensors.read(data)),
        "scale": Part("U8", grid, lambda: tensors.read(scale).view(np.uint8)),
    }
    if global_scale is not None:
        parts["global_scale"] = global_scale
    format = rtn.FORMATS["MXFP4" if global_scale is None else "NVFP4"]
    return Matrix((out, 2 * half), format, parts, sources, unused or {})
