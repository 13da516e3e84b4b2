"""bitsandbytes' layouts.

4 bits: weight uint8 [N K / 2, 1], row after row, the first number of a pair in the HIGH nibble;
absmax of blocks of 64 numbers, or, with double quantisation, bytes of it under nested_absmax (of
256 of them) and nested_quant_map, less nested_offset; quant_state.bitsandbytes__nf4 has the rest as
JSON.  8 bits: weight int8 [N, K] and SCB float32 [N], w = q * SCB / 127.

Source: bitsandbytes 0.50, functional.QuantState.as_dict and nn.Int8Params.
"""

import dataclasses
import json
from typing import Any

import numpy as np

from infer.errors import WeightFormatError
from infer.models.checkpoint import HFConfig
from infer.ops.quantized import OUTLIER
from infer.quant import codes, rtn
from infer.quant.formats import NESTED_GROUP
from infer.weights.quantised.matrix import Matrix, Part, Tensors

_STATE = "weight.quant_state.bitsandbytes__"


def bitsandbytes(config: HFConfig, tensors: Tensors) -> dict[str, Matrix]:
    """Return the quantised matrices of a checkpoint by their modules.

    Raises:
        WeightFormatError: tensors that do not fit the layout.
    """
    found = {}
    for kind in ("nf4", "fp4"):
        for module in tensors.ending(f"{_STATE}{kind}"):
            found[module] = _four_bits(module, tensors, kind)
    eight = tensors.ending("SCB")
    threshold = config.get("llm_int8_threshold", OUTLIER)
    if eight and threshold != OUTLIER:
        raise WeightFormatError(
            f"{config.where}: llm_int8_threshold is {threshold!r:.40}, and outliers begin at"
            f" {OUTLIER:g} here; take a checkpoint with that"
        )
    for module in eight:
        found[module] = _eight_bits(module, tensors)
    return found


def _four_bits(module: str, tensors: Tensors, kind: str) -> Matrix:
    name, state_name = f"{module}.weight", f"{module}.{_STATE}{kind}"
    state = _state(tensors, state_name)
    shape: Any = state.get("shape")
    block: Any = state.get("blocksize")
    good = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int for n in shape)
    if not good or type(block) is not int or block < 8 or min(shape) < 1 or shape[1] % block:
        raise tensors.error(
            state_name,
            f"has the shape {shape!r:.40} and blocks of {block!r:.20}; rows are whole blocks here",
        )
    out, width = shape
    tensors.get(name, ("U8",), (out * width // 2, 1))
    tensors.get(f"{name}.quant_map", ("F32",), (16,))
    level = tensors.read(f"{name}.quant_map")
    if not np.array_equal(level, codes.LEVELS[kind].astype(np.float32)):
        raise tensors.error(f"{name}.quant_map", f"is not {kind}'s table of levels")
    grid = (out, width // block)
    sources = [name, state_name, f"{name}.quant_map", f"{name}.absmax"]

    def data() -> np.ndarray:
        pairs = tensors.read(name).reshape(out, width // 2)
        return (pairs >> 4) | (pairs << 4)

    parts = {"data": Part("U8", (out, width // 2), data)}
    double = f"{name}.nested_absmax" in tensors.infos
    if double:
        if state.get("nested_blocksize") != NESTED_GROUP:
            raise tensors.error(
                state_name,
                f"has nested_blocksize {state.get('nested_blocksize')!r:.20}; 256 is read",
            )
        count = -(-grid[0] * grid[1] // NESTED_GROUP)
        tensors.get(f"{name}.absmax", ("U8",), (grid[0] * grid[1],))
        tensors.get(f"{name}.nested_absmax", ("F32",), (count,))
        tensors.get(f"{name}.nested_quant_map", ("F32",), (256,))
        if not np.array_equal(tensors.read(f"{name}.nested_quant_map"), codes.DYNAMIC):
            raise tensors.error(f"{name}.nested_quant_map", "is not the dynamic map of 8 bits")
        offset: Any = state.get("nested_offset")
        if type(offset) not in (int, float) or not np.isfinite(offset):
            raise tensors.error(state_name, f"has nested_offset {offset!r:.40}, no number")
        sources += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
        parts |= {
            "scale.codes": Part("U8", grid, lambda: tensors.read(f"{name}.absmax").reshape(grid)),
            "scale.absmax": Part("F32", (count,), lambda: tensors.read(f"{name}.nested_absmax")),
            "scale.offset": Part("F32", (), lambda: np.asarray(offset, np.float32)),
        }
    else:
        tensors.get(f"{name}.absmax", ("F32",), (grid[0] * grid[1],))
        parts["scale"] = Part("F32", grid, lambda: tensors.read(f"{name}.absmax").reshape(grid))
    base = rtn.FORMATS[kind.upper()]
    label = base.name + (f"-G{block}" if block != base.group else "") + ("-DQ" if double else "")
    format = dataclasses.replace(
        base, name=label, group=block, scale_dtype="nested" if double else "float32"
    )
    return Matrix((out, width), format, parts, tuple(sources))


def _state(tensors: Tensors, name: str) -> dict[str, Any]:
    tensors.get(name, ("U8",), (None,))
    try:
        state = json.loads(bytes(tensors.read(name)).decode())
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise tensors.error(name, f"is no JSON ({error!r:.60})") from None
    if not isinstance(state, dict):
        raise tensors.error(name, "is no object")
    return state


def _eight_bits(module: str, tensors: Tensors) -> Matrix:
    name, scb = f"{module}.weight", f"{module}.SCB"
    out, width = tensors.get(name, ("I8",), (None, None)).shape
    tensors.get(scb, ("F32",), (out,))
    format = rtn.int_format(8, scale_dtype="float32", activations="outliers")
    parts = {
        "data": Part("U8", (out, width), lambda: tensors.read(name).view(np.uint8) ^ np.uint8(128)),
        "scale": Part(
            "F32", (out, 1), lambda: (tensors.read(scb) / np.float32(127)).reshape(out, 1)
        ),
    }
    beside = [n for n in (f"{module}.weight_format",) if n in tensors.infos]
    return Matrix((out, width), format, parts, (name, scb, *beside))
