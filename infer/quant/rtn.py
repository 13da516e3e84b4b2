"""Round to nearest: the scales of a weight from its own numbers, and the codes under given scales.

    integers    q = clip(round(w / s) + z),  w' = s (q - z);  with s exact the error is uniform in
                [-s/2, s/2] and its mean square s^2 / 12
    floats      q = the nearest number of the format to w / s

All is pure and jit-able, and gives equal codes with and without jit: a quotient is rounded once
(`quotient`).  Rounding is to the nearest even integer.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, UInt8

from infer.quant import codes
from infer.quant.formats import NESTED_GROUP, PlanarFormat
from infer.quant.qarray import NestedScale, QArray, denested, power_of_two

# How the scale of a symmetric group of b bits follows from its numbers, h = 2^(b-1).
CONVENTIONS = {
    "full": "max|w| / (h - 1/2), codes -h to h - 1 (compressed-tensors, GPTQ)",
    "restricted": "max|w| / (h - 1), codes 1 - h to h - 1 (AWQ, QuaRot; the textbook's)",
    "signed": "-(the number of largest magnitude) / h, codes -h to h - 1 (GGUF's Q4_0)",
    "no_clipping": "max(-min / h, max / (h - 1)), codes -h to h - 1 (torchao)",
}

# How the power of two of a block follows from its largest magnitude m, e the largest exponent of
# the element's format: 2^(floor(log2 m) - e) for "floor" (OCP's rule), and so on.
E8M0_RULES = ("floor", "ceil", "even", "rceil")
# Exponent of the largest number of each element.
_TOP_EXPONENT = {"e2m1": 2, "e2m3": 2, "e3m2": 4, "e4m3": 8, "e5m2": 15}
_MANTISSA = {"e2m1": 1, "e2m3": 3, "e3m2": 2, "e4m3": 3, "e5m2": 2}


def blocks_of(w: Float[Array, "O I"], format: PlanarFormat) -> Float[Array, "R Q r g"]:
    """Return the weights by scale: [R, Q, rows, group], padded with zeros at ragged edges."""
    rows, group = format.rows or w.shape[0], format.group or w.shape[1]
    padded = jnp.pad(w, ((0, -w.shape[0] % rows), (0, -w.shape[1] % group)))
    high, wide = padded.shape[0] // rows, padded.shape[1] // group
    return padded.reshape(high, rows, wide, group).swapaxes(1, 2)


def spread(grid: Array, format: PlanarFormat, shape: tuple[int, int]) -> Array:
    """Return [out, in]: for each weight the entry of its scale in a grid [R, Q]."""
    rows, group = format.rows or shape[0], format.group or shape[1]
    return jnp.repeat(jnp.repeat(grid, rows, 0)[: shape[0]], group, 1)[:, : shape[1]]


def quotient(a: Float[Array, "*B"], b: Any) -> Float[Array, "*B"]:
    """Return a / b, rounded once.

    Where b is a constant or broadcast, XLA multiplies by its reciprocal instead, which rounds twice
    (and is zero for 2^127), depending on what is compiled together; it leaves a divisor alone that
    depends on a.
    """
    return a / jnp.where(jnp.isfinite(a), b, jnp.float32(1))


def _matrix(w: Array) -> tuple[int, int]:
    return w.shape[0], w.shape[1]


# ---- Integers ----------------------------------------------------------------------------------


def int_params(
    values: Float[Array, "*B g"],
    bits: int,
    symmetric: bool = True,
    convention: str = "full",
    scale_dtype: str = "float32",
    clip: Float[Array, "*B"] | Float[Array, ""] | float = 1.0,
) -> tuple[Float[Array, "*B"], UInt8[Array, "*B"]]:
    """Return scale and zero point of groups of numbers.

    The scale is rounded to its dtype, in which it is stored, and widened again, up where float16
    has it as a subnormal; of a group of zeros it is 1.

    Args:
        values: a group along the last axis.
        bits: of a code.
        symmetric: the zero point is 2^(bits - 1); otherwise the range is widened to contain 0.
        convention: a key of CONVENTIONS, for symmetric groups.
        scale_dtype: "float32", "float16" or "bfloat16".
        clip: share of the range that is kept; what is outside gets the outermost code.
    """
    half, levels = float(1 << (bits - 1)), float((1 << bits) - 1)
    low = jnp.minimum(values.min(-1), 0.0) * clip
    high = jnp.maximum(values.max(-1), 0.0) * clip
    if not symmetric:
        scale = _stored(quotient(high - low, levels), scale_dtype)
        zero = jnp.clip(jnp.round(quotient(-low, scale)), 0, levels)
        return scale, zero.astype(jnp.uint8)
    most = jnp.maximum(-low, high)
    if convention == "full":
        scale = quotient(most, half - 0.5)
    elif convention == "restricted":
        scale = quotient(most, half - 1)
    elif convention == "signed":
        scale = quotient(jnp.where(high > -low, high, low), -half)
    elif convention == "no_clipping":
        scale = jnp.maximum(quotient(-low, half), quotient(high, half - 1))
    else:
        raise ValueError(f"convention is {convention!r}; use {', '.join(CONVENTIONS)}")
    scale = _stored(scale, scale_dtype)
    return scale, jnp.full(scale.shape, np.uint8(half), jnp.uint8)


# Below this float16 has fewer bits than it should; the steps there are _STEP.
_SMALL = float(np.finfo(np.float16).smallest_normal)
_STEP = float(np.finfo(np.float16).smallest_subnormal)


def _stored(scale: Array, dtype: str) -> Array:
    """Return scales as they are stored, widened again, and 1 for 0.

    float16's subnormals are so far apart that one rounded down clips much of its group, or is 0:
    those are rounded away from zero.
    """
    stored = scale.astype(dtype).astype(jnp.float32)
    if dtype == "float16":
        steps = jnp.ceil(jnp.abs(scale) * np.float32(1 / _STEP)) * np.float32(_STEP)  # exact
        up = jnp.where(scale < 0, -steps, steps)
        stored = jnp.where(jnp.abs(scale) < _SMALL, up, stored)
    return jnp.where(stored == 0, jnp.float32(1), stored)


def int_codes(
    w: Float[Array, "*B"], scale: Array, zero: Array, bits: int, restricted: bool = False
) -> UInt8[Array, "*B"]:
    """Return the codes of numbers under scales and zero points of the same shape.

    Args:
        w: numbers.
        scale: not 0.
        zero: uint8.
        bits: of a code.
        restricted: the least code is not used (symmetric, 1 - h to h - 1).
    """
    q = jnp.round(quotient(w, scale)) + zero.astype(jnp.float32)
    return jnp.clip(q, 1 if restricted else 0, (1 << bits) - 1).astype(jnp.uint8)


def quantize_int(
    w: Float[Array, "O I"],
    format: PlanarFormat,
    convention: str = "full",
    clip: Float[Array, "R Q"] | Float[Array, ""] | float = 1.0,
) -> QArray:
    """Return `w` rounded to integers of this format.

    Args:
        w: weight [out, in].
        format: code "int".
        convention: of symmetric scales, a key of CONVENTIONS.
        clip: share of each group's range to keep.
    """
    w = w.astype(jnp.float32)
    groups = blocks_of(w, format)
    groups = groups.reshape(*groups.shape[:2], -1)
    scale, zero = int_params(
        groups, format.bits, format.symmetric, convention, format.scale_dtype, clip
    )
    full = lambda grid: spread(grid, format, _matrix(w))
    q = int_codes(w, full(scale), full(zero), format.bits, _is_restricted(format, convention))
    return from_codes(q, scale, None if format.symmetric else zero, format)


def _is_restricted(format: PlanarFormat, convention: str) -> bool:
    return format.symmetric and convention == "restricted"


def from_codes(q: UInt8[Array, "O I"], scale: Array, zero: Any, format: PlanarFormat) -> QArray:
    """Return the QArray of codes and float32 scales."""
    data = codes.pack(q, format.bits)
    return QArray(
        data, scale.astype(format.scale_dtype), zero, format=format, shape=(q.shape[0], q.shape[1])
    )


# ---- Floats ------------------------------------------------------------------------------------


def quantize_float(w: Float[Array, "O I"], format: PlanarFormat) -> QArray:
    """Return `w` in small floats (FP8) or levels (NF4, FP4), the largest magnitude of each group on
    the largest number of the format.
    """
    w = w.astype(jnp.float32)
    most = jnp.abs(blocks_of(w, format)).max((2, 3))
    scale: Any = quotient(most, codes.LARGEST[format.code])
    if format.scale_dtype == "nested":
        stored = nested(scale)
        scale = denested(stored)
    else:
        scale = _stored(scale, format.scale_dtype)
        stored = scale.astype(format.scale_dtype)
    scale = jnp.where(scale == 0, jnp.float32(1), scale)
    q = codes.nearest(quotient(w, spread(scale, format, _matrix(w))), format.code)
    return QArray(codes.pack(q, format.bits), stored, format=format, shape=_matrix(w))


def nested(scale: Float[Array, "R Q"]) -> NestedScale:
    """Return scales quantised to 8 bits in groups of 256 of them, less their mean."""
    offset = quotient(scale.sum(), float(scale.size))
    flat = (scale - offset).reshape(-1)
    groups = jnp.pad(flat, (0, -flat.size % NESTED_GROUP)).reshape(-1, NESTED_GROUP)
    absmax = jnp.abs(groups).max(-1)
    unit = quotient(groups, jnp.where(absmax == 0, jnp.float32(1), absmax)[:, None])
    bounds = (codes.DYNAMIC[1:].astype(np.float64) + codes.DYNAMIC[:-1]) / 2
    q = jnp.searchsorted(jnp.asarray(bounds.astype(np.float32)), unit.reshape(-1))
    return NestedScale(q[: flat.size].astype(jnp.uint8).reshape(scale.shape), absmax, offset)


# ---- Microscaling ------------------------------------------------------------------------------


def e8m0_scale(most: Float[Array, "*B"], code: str, rule: str = "floor") -> UInt8[Array, "*B"]:
    """Return the E8M0 bytes of blocks whose largest magnitudes are `most`.

    Args:
        most: not negative.
        code: of the elements.
        rule: "floor" (OCP), "ceil", "even" (the mantissa rounded first), "rceil" (the least power
            of two with which nothing is clipped).

    Source: OCP Microscaling Formats 1.0, section 6.3; torchao's to_mx for the other rules.
    """
    if rule not in E8M0_RULES:
        raise ValueError(f"scale_rule is {rule!r}; use {', '.join(E8M0_RULES)}")
    if rule == "rceil":
        bits = jax.lax.bitcast_convert_type(quotient(most, codes.LARGEST[code]), jnp.int32)
        exponent = (bits >> 23) + jnp.where((bits & 0x7FFFFF) > 0, 1, 0)
        return jnp.clip(exponent, 0, 254).astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(most, jnp.int32)
    if rule == "even":
        bits = bits + (1 << (22 - _MANTISSA[code]))
    exponent = bits >> 23
    if rule == "ceil":
        exponent = exponent + jnp.where((bits & 0x7FFFFF) > 0, 1, 0)
    return jnp.clip(exponent - _TOP_EXPONENT[code], 0, 254).astype(jnp.uint8)


def quantize_mx(w: Float[Array, "O I"], format: PlanarFormat, rule: str = "floor") -> QArray:
    """Return `w` in a microscaling format: small floats under a power of two for 32 of them."""
    w = w.astype(jnp.float32)
    scale = e8m0_scale(jnp.abs(blocks_of(w, format)).max((2, 3)), format.code, rule)
    # 2^-127, a block of zeros, is no divisor where subnormals count as 0.
    value = jnp.maximum(power_of_two(scale), np.finfo(np.float32).tiny)
    q = codes.nearest(quotient(w, spread(value, format, _matrix(w))), format.code)
    return QArray(codes.pack(q, format.bits), scale, format=format, shape=_matrix(w))


def quantize_nvfp4(w: Float[Array, "O I"], format: PlanarFormat) -> QArray:
    """Return `w` in NVFP4: E2M1 under an E4M3 scale for 16 and one float32 for all.

    The codes are taken under the rounded scale, which is at least 2^-9, E4M3's least: a group far
    smaller than the others keeps its largest numbers.  A group of zeros has the scale 1.

    Source: ModelOpt, global = max|w| / (6 * 448).
    """
    w = w.astype(jnp.float32)
    most = jnp.abs(blocks_of(w, format)).max((2, 3))
    whole = quotient(most.max(), 6.0 * 448)
    whole = jnp.where(whole == 0, jnp.float32(1), whole)
    scale = jnp.maximum(codes.nearest(quotient(most, 6 * whole), "e4m3"), np.uint8(1))
    scale = jnp.where(most == 0, np.uint8(0x38), scale)
    value = codes.values(scale, "e4m3") * whole
    value = jnp.where(value == 0, jnp.float32(1), value)
    q = codes.nearest(quotient(w, spread(value, format, _matrix(w))), "e2m1")
    return QArray(
        codes.pack(q, format.bits), scale, global_scale=whole, format=format, shape=_matrix(w)
    )


# ---- Formats by name ---------------------------------------------------------------------------


def int_format(
    bits: int,
    group: int = 0,
    rows: int = 1,
    symmetric: bool = True,
    scale_dtype: str = "float16",
    activations: str = "",
) -> PlanarFormat:
    """Return the format of integers: group 0, rows 1 is a scale a channel, both 0 one for all."""
    codes.checked_bits(bits)
    name = f"INT{bits}" + (f"-G{group}" if group else "" if rows else "-TENSOR")
    name += "" if symmetric else "-ASYM"
    name += f"-A:{activations}" if activations else ""
    return PlanarFormat(
        name=name,
        bits=bits,
        group=group,
        rows=rows,
        symmetric=symmetric,
        scale_dtype=scale_dtype,
        activations=activations,
    )


_E4M3 = PlanarFormat(name="FP8-E4M3", bits=8, group=0, code="e4m3", scale_dtype="float32")
FORMATS: dict[str, PlanarFormat] = {
    "FP8-E4M3": _E4M3,
    "FP8-E5M2": dataclasses.replace(_E4M3, name="FP8-E5M2", code="e5m2"),
    "NF4": PlanarFormat(name="NF4", bits=4, group=64, code="nf4", scale_dtype="float32"),
    "FP4": PlanarFormat(name="FP4", bits=4, group=64, code="fp4", scale_dtype="float32"),
    "MXFP4": PlanarFormat(name="MXFP4", bits=4, group=32, code="e2m1", scale_dtype="e8m0"),
    "MXFP6-E2M3": PlanarFormat(
        name="MXFP6-E2M3", bits=6, group=32, code="e2m3", scale_dtype="e8m0"
    ),
    "MXFP6-E3M2": PlanarFormat(
        name="MXFP6-E3M2", bits=6, group=32, code="e3m2", scale_dtype="e8m0"
    ),
    "MXFP8-E4M3": PlanarFormat(
        name="MXFP8-E4M3", bits=8, group=32, code="e4m3", scale_dtype="e8m0"
    ),
    "MXFP8-E5M2": PlanarFormat(
        name="MXFP8-E5M2", bits=8, group=32, code="e5m2", scale_dtype="e8m0"
    ),
    "NVFP4": PlanarFormat(name="NVFP4", bits=4, group=16, code="e2m1", scale_dtype="e4m3"),
}
