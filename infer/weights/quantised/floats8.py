"""FP8 checkpoints: one E4M3 matrix, and scales by tensor, row or block that multiply it.

fp8 (DeepSeek, Qwen)   weight_scale_inv [N / 128, K / 128], which multiplies, despite its name;
                       activations rounded, a scale for 128 inputs of a token
fp8 without blocks     weight_scale, one; activations: a scale a token, or input_scale (static)
fbgemm_fp8             weight_scale [N, 1]; activations: a scale a token
modelopt FP8           weight_scale, one; activations: input_scale
"""

import dataclasses
import logging

import numpy as np

from infer.errors import WeightFormatError
from infer.models.checkpoint import HFConfig
from infer.quant import rtn
from infer.weights.quantised.matrix import FLOATS, SCALE_DTYPES, Matrix, Part, Tensors

logger = logging.getLogger(__name__)

_BLOCK = 128


def fp8(config: HFConfig, tensors: Tensors) -> dict[str, Matrix]:
    """Return the quantised matrices of an "fp8" checkpoint by their modules.

    Raises:
        WeightFormatError: a layout that is not read, or tensors that do not fit it.
    """
    scheme = config.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise WeightFormatError(
            f"{config.where}: activation_scheme is {scheme!r:.40}; dynamic and static are read"
        )
    block = config.get("weight_block_size")
    if block is not None and block != [_BLOCK, _BLOCK]:
        raise WeightFormatError(
            f"{config.where}: weight_block_size is {block!r:.60}; [128, 128] is read"
        )
    if config.get("scale_fmt") is not None:
        logger.warning(
            "%s: scale_fmt is %r, powers of two for activations' scales; here they are any number,"
            " so that products differ in what is rounded away",
            config.where,
            config.get("scale_fmt"),
        )
    suffix = "weight_scale_inv" if block is not None else "weight_scale"
    found = {}
    for module in tensors.ending(suffix):
        if block is not None:
            found[module] = _blocks(module, tensors)
        else:
            found[module] = scaled(module, tensors, static=scheme == "static")
    return found


def fbgemm(config: HFConfig, tensors: Tensors) -> dict[str, Matrix]:
    """Return the quantised matrices of an "fbgemm_fp8" checkpoint by their modules."""
    if config.get("activation_scale_ub") is not None:
        logger.warning(
            "%s: activation_scale_ub, an upper bound on the activations' magnitude, is not applied",
            config.where,
        )
    return {module: scaled(module, tensors) for module in tensors.ending("weight_scale")}


def _blocks(module: str, tensors: Tensors) -> Matrix:
    name = f"{module}.weight"
    out, width = tensors.get(name, ("F8_E4M3",), (None, None)).shape
    grid = -(-out // _BLOCK), -(-width // _BLOCK)
    scale = tensors.get(f"{name}_scale_inv", FLOATS, grid)
    format = dataclasses.replace(
        rtn.FORMATS["FP8-E4M3"],
        name="FP8-E4M3-B128-A:e4m3_128",
        rows=_BLOCK,
        group=_BLOCK,
        scale_dtype=SCALE_DTYPES[scale.dtype],
        activations="e4m3_128",
    )
    parts = {
        "data": Part("U8", (out, width), lambda: tensors.read(name).view(np.uint8)),
        "scale": Part(scale.dtype, grid, lambda: tensors.read(f"{name}_scale_inv")),
    }
    return Matrix((out, width), format, parts, (name, f"{name}_scale_inv"))


def scaled(module: str, tensors: Tensors, static: bool = False, dynamic: bool = True) -> Matrix:
    """Return an E4M3 matrix with one scale, or one for each row.

    Args:
        module: its name.
        tensors: of the folder.
        static: activations are rounded under the stored `input_scale`.
        dynamic: otherwise, whether they are rounded under a scale a token.
    """
    name = f"{module}.weight"
    out, width = tensors.get(name, ("F8_E4M3",), (None, None)).shape
    scale = tensors.get(f"{name}_scale", FLOATS)
    if scale.shape not in ((), (1,), (1, 1), (out,), (out, 1)):
        raise tensors.error(
            f"{name}_scale", f"is {list(scale.shape)}, must be one number or {[out, 1]}"
        )
    by_row = scale.shape in ((out,), (out, 1)) and out > 1
    grid = (out, 1) if by_row else (1, 1)
    acts = "e4m3_static" if static else "e4m3" if dynamic else ""
    label = "FP8-E4M3" if by_row else "FP8-E4M3-TENSOR"
    format = dataclasses.replace(
        rtn.FORMATS["FP8-E4M3"],
        name=f"{label}-A:{acts}" if acts else label,
        rows=1 if by_row else 0,
        scale_dtype=SCALE_DTYPES[scale.dtype],
        activations=acts,
    )
    parts = {
        "data": Part("U8", (out, width), lambda: tensors.read(name).view(np.uint8)),
        "scale": Part(
            scale.dtype, grid, lambda: np.asarray(tensors.read(f"{name}_scale")).reshape(grid)
        ),
    }
    sources = [name, f"{name}_scale"]
    unused = {}
    input_scale = f"{module}.input_scale"
    if static:
        parts["act_scale"] = one_number(tensors, input_scale)
        sources.append(input_scale)
    elif input_scale in tensors.infos:
        unused[input_scale] = "activations have a scale a token" if dynamic else "not rounded"
        sources.append(input_scale)
    return Matrix((out, width), format, parts, tuple(sources), unused)


def one_number(tensors: Tensors, name: str, invert: bool = False) -> Part:
    """Return a float32 [] of a tensor of one number, or its reciprocal."""
    info = tensors.get(name, FLOATS)
    if info.shape not in ((), (1,), (1, 1)):
        raise tensors.error(name, f"is {list(info.shape)}, must be one number")

    def read() -> np.ndarray:
        value = np.asarray(tensors.read(name)).astype(np.float32).reshape(())
        return np.asarray(np.float32(1) / value if invert else value)

    return Part("F32", (), read)
