"""Packed weights in the form of compressed-tensors, which vLLM and transformers load.

The inverse of `compressed_tensors`: codes, scales and zero points keep their bits.  What that form
has no place for is refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from infer.errors import ConfigError
from infer.quant import codes
from infer.quant.formats import PlanarFormat
from infer.quant.qarray import QArray
from infer.weights.safetensors_writer import Entry, dtype_name

_WAY_OUT = "save it in our own form (form='infer'), or leave this weight out in a recipe"
_INPUTS: dict[str, dict[str, Any] | None] = {
    "": None,
    "int8": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    "int8_static": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False},
    "e4m3": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "e4m3_static": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    "e4m3_128": {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 128,
        "dynamic": True,
    },
}


def matrix_entries(module: str, weight: QArray) -> dict[str, Entry]:
    """Return the tensors of a packed weight.

    Args:
        module: its name without ".weight".
        weight: planar.

    Raises:
        ConfigError: the form has no place for its format.
    """
    format = checked(module, weight)
    scale = np.asarray(weight.scale)
    out, width = weight.shape
    parts: dict[str, tuple[Any, tuple[int, ...], Callable[[], np.ndarray]]] = {}
    put = lambda name, dtype, shape, read: parts.__setitem__(name, (dtype, shape, read))
    data = lambda: np.asarray(weight.data)
    kind = form_of(format)
    if format.code == "e2m1":
        put("weight_packed", np.uint8, (out, width // 2), data)
        fp8 = ml_dtypes.float8_e4m3fn
        nv = format.scale_dtype == "e4m3"
        put(
            "weight_scale",
            fp8 if nv else np.uint8,
            scale.shape,
            lambda: scale.view(fp8 if nv else np.uint8),
        )
        if nv:
            whole = np.float32(1) / np.asarray(weight.global_scale).reshape(1)
            put("weight_global_scale", np.float32, (1,), lambda: whole)
    elif format.code == "e4m3":
        fp8 = ml_dtypes.float8_e4m3fn
        put("weight", fp8, (out, width), lambda: data().view(fp8))
        single = not format.rows and not format.group
        shape = (1,) if single else scale.shape
        put("weight_scale", scale.dtype, shape, lambda: scale.reshape(shape))
    elif kind == "int-quantized":
        signed = lambda x: (np.asarray(x) ^ np.uint8(128)).view(np.int8)
        put("weight", np.int8, (out, width), lambda: signed(weight.data))
        put("weight_scale", scale.dtype, scale.shape, lambda: scale)
        if not format.symmetric:
            put("weight_zero_point", np.int8, scale.shape, lambda: signed(weight.zero))
    else:
        bits, per_word = format.bits, 32 // format.bits
        put(
            "weight_packed",
            np.int32,
            (out, -(-width // per_word)),
            lambda: _words(data(), bits, width),
        )
        put("weight_shape", np.int64, (2,), lambda: np.array([out, width], np.int64))
        put("weight_scale", scale.dtype, scale.shape, lambda: scale)
        if not format.symmetric:
            zeros = np.asarray(weight.zero).T
            rows = -(-scale.shape[0] // per_word)
            read = lambda: np.ascontiguousarray(_in_words(zeros, bits).T)
            put("weight_zero_point", np.int32, (rows, scale.shape[1]), read)
    if weight.act_scale is not None:
        put("input_scale", np.float32, (1,), lambda: np.asarray(weight.act_scale).reshape(1))
    return {
        f"{module}.{name}": Entry(dtype=dtype_name(np.dtype(dtype)), shape=shape, read=read)
        for name, (dtype, shape, read) in parts.items()
    }


def _words(data: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Return rows of our codes as words of that form."""
    if bits in (2, 4, 8):
        padded = np.pad(data, ((0, 0), (0, -data.shape[1] % 4)))
        return np.ascontiguousarray(padded).view(np.int32)
    return _in_words(np.asarray(codes.unpack(jnp.asarray(data), bits, width)), bits)


def _in_words(values: np.ndarray, bits: int) -> np.ndarray:
    """Return codes [R, n] as words [R, ceil(n / (32 // bits))], the low bits first."""
    per_word = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word))).astype(np.uint32)
    parts = padded.reshape(values.shape[0], -1, per_word)
    places = np.arange(0, per_word * bits, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(parts << places, axis=-1).view(np.int32)


def form_of(format: PlanarFormat) -> str:
    """Return the name of the form in which weights of this format are."""
    if format.code == "e2m1":
        return "nvfp4-pack-quantized" if format.scale_dtype == "e4m3" else "mxfp4-pack-quantized"
    if format.code == "e4m3":
        return "float-quantized"
    return "int-quantized" if format.bits == 8 and not format.group else "pack-quantized"


def checked(module: str, weight: Any) -> PlanarFormat:
    """Return the format of a weight that the form has a place for.

    Raises:
        ConfigError: it has none.
    """
    format = weight.format
    refuse = lambda why: ConfigError(
        f"{module}: {format.name} in compressed-tensors: {why}; {_WAY_OUT}"
    )
    if not isinstance(format, PlanarFormat):
        raise refuse("blocks of GGUF have no place there")
    if format.ordered or format.rotated:
        raise refuse(
            "an order of the inputs (GPTQ's act_order without static_groups) has no place there"
            if format.ordered
            else "turned inputs have no place there"
        )
    integers = format.code == "int" and format.bits in (2, 3, 4, 8)
    if not integers and format.code not in ("e2m1", "e4m3"):
        raise refuse(f"codes of {format.bits} bits ({format.code}) have no place there")
    if format.scale_dtype == "nested":
        raise refuse("scales under scales have no place there")
    if format.activations not in _INPUTS:
        raise refuse(f"activations rounded by {format.activations!r} have no place there")
    if format.code == "int" and format.rows != 1 and format.bits != 8:
        raise refuse("a scale for the whole matrix is there for 8 bits only")
    blocks = (format.rows, format.group) == (128, 128)
    if format.code == "e4m3" and not blocks and (format.group or format.scale_dtype == "e8m0"):
        raise refuse("E4M3 has a scale for the matrix, the row, or 128 x 128 there")
    return format


def config_of(formats: Mapping[str, PlanarFormat], stayed: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of modules of these formats.

    Args:
        formats: by module.
        stayed: modules whose weights are floats.
    """
    by_format: dict[PlanarFormat, list[str]] = {}
    for module, format in formats.items():
        by_format.setdefault(format, []).append(module)
    groups = {}
    for number, (format, modules) in enumerate(by_format.items()):
        # One scheme is that of all linear layers; of several each names its modules.
        targets = ["Linear"] if len(by_format) == 1 else modules
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": _weights_of(format),
            "input_activations": _INPUTS[format.activations],
            "output_activations": None,
            "format": form_of(format),
        }
    forms = {form_of(format) for format in by_format}
    return {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": stayed,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weights_of(format: PlanarFormat) -> dict[str, Any]:
    kind = "int" if format.code == "int" else "float"
    fields: dict[str, Any] = {
        "num_bits": format.bits,
        "type": kind,
        "symmetric": format.symmetric,
        "dynamic": False,
        "group_size": None,
    }
    if format.code == "e2m1":
        fields |= {"strategy": "tensor_group" if format.group == 16 else "group"}
        fields["group_size"] = format.group
    elif (format.rows, format.group) == (128, 128):
        fields |= {"strategy": "block", "block_structure": [128, 128]}
    elif format.group:
        fields |= {"strategy": "group", "group_size": format.group}
    else:
        fields["strategy"] = "channel" if format.rows else "tensor"
    return fields
