"""Codes of 2 to 8 bits: how they lie in bytes, and which numbers they stand for.

A row of codes is cut into planes whose widths are powers of two, the wide one first: 3 bits are a
plane of 2 and one of 1, 5 are 4 + 1, 6 are 4 + 2.  In a plane the code of a lower column stands in
the lower bits.  So a row of n codes takes exactly n * bits / 8 bytes.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, UInt8

_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


def pack(codes: UInt8[Array, "*B I"], bits: int) -> UInt8[Array, "*B _"]:
    """Return codes [..., n] in bytes [..., n * bits / 8].

    Raises:
        ValueError: they do not fill whole bytes.
    """
    if bits == 8:
        return codes
    if codes.shape[-1] % 8:
        raise ValueError(
            f"rows of {codes.shape[-1]} codes of {bits} bits fill no whole bytes; use a width that"
            " is a multiple of 8, or 8 bits"
        )
    lead, parts, shift = codes.shape[:-1], [], 0
    for width in _PLANES[bits]:
        part = ((codes >> shift) & ((1 << width) - 1)).reshape(*lead, -1, 8 // width)
        places = np.arange(0, 8, width, dtype=np.uint8)
        parts.append((part << places.reshape((1,) * (part.ndim - 1) + (-1,))).sum(-1, jnp.uint8))
        shift += width
    return jnp.concatenate(parts, axis=-1)


def unpack(data: UInt8[Array, "*B _"], bits: int, width: int) -> UInt8[Array, "*B I"]:
    """Return the codes [..., width] of bytes [..., width * bits / 8]."""
    if bits == 8:
        return data
    lead, codes, shift, start = data.shape[:-1], None, 0, 0
    for plane in _PLANES[bits]:
        size = width * plane // 8
        places = np.arange(0, 8, plane, dtype=np.uint8)
        part = data[..., start : start + size, None] >> places.reshape((1,) * data.ndim + (-1,))
        part = (part & ((1 << plane) - 1)).reshape(*lead, width)
        codes = part if codes is None else codes | (part << shift)
        start, shift = start + size, shift + plane
    assert codes is not None
    return codes


def _small_float(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Return float32 [2^bits]: the numbers of a float with a sign, without infinity and NaN."""
    code = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    normal = np.ldexp(1 + mantissa / (1 << mantissa_bits), exponent - bias)
    values = np.where(exponent == 0, np.ldexp(mantissa / (1 << mantissa_bits), 1 - bias), normal)
    return np.concatenate([values, -values]).astype(np.float32)


def _e4m3() -> np.ndarray:
    values = _small_float(4, 3, 7)
    values[[0x7F, 0xFF]] = np.nan
    return values


def _e5m2() -> np.ndarray:
    values = _small_float(5, 2, 15)
    for sign in (0, 0x80):
        values[sign + 0x7C] = -np.inf if sign else np.inf
        values[sign + 0x7D : sign + 0x80] = np.nan
    return values


# Code -> number.  NF4: the quantiles of a normal distribution of QLoRA (arXiv 2305.14314, appendix
# E); FP4: bitsandbytes' own, which is not E2M1.
LEVELS: dict[str, np.ndarray] = {
    "e4m3": _e4m3(),
    "e5m2": _e5m2(),
    "e2m3": _small_float(2, 3, 1),
    "e3m2": _small_float(3, 2, 3),
    "e2m1": _small_float(2, 1, 1),
    "nf4": np.array(
        [
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
            -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
            0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
            0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
        ],
        np.float32,
    ),
    "fp4": np.array(
        [
            *(0, 0.0052083333, 0.66666667, 1, 0.33333333, 0.5, 0.16666667, 0.25),
            *(-0.0, -0.0052083333, -0.66666667, -1, -0.33333333, -0.5, -0.16666667, -0.25),
        ],
        np.float32,
    ),
}  # fmt: skip


def _dynamic_map() -> np.ndarray:
    """Return float32 [256], ascending: decades from 1e-6 to 1, each with twice the steps of the one
    below, at the centres of equal parts of [0.1, 1].

    Bit for bit that of bitsandbytes: its edges are counted in float32 steps from the nearer end.

    Source: 8-bit Optimizers via Block-wise Quantization, section 1.3 (arXiv 2110.02861).
    """
    first, positive = np.float32(0.1), [0.0, 1.0]
    for decade in range(7):
        count, i = 2**decade, np.arange(2**decade + 1)
        step = np.float64((1 - first) / np.float32(count))
        edges = np.where(2 * i < count, first + step * i, 1 - step * (count - i))
        edges = edges.astype(np.float32)
        centres = (edges[:-1] + edges[1:]) / np.float32(2)
        positive += list(np.float32(10.0 ** (decade - 6)) * centres)
    return np.sort(np.array(positive + [-x for x in positive[2:]], np.float32))


DYNAMIC = _dynamic_map()

# The largest number of each.
LARGEST = {name: float(np.nanmax(v[np.isfinite(v)])) for name, v in LEVELS.items()}


def values(codes: UInt8[Array, "*B"], code: str) -> Float[Array, "*B"]:
    """Return the float32 numbers of codes of `LEVELS[code]`."""
    return jnp.take(jnp.asarray(LEVELS[code]), codes, axis=0, mode="clip")


def nearest(x: Float[Array, "*B"], code: str) -> UInt8[Array, "*B"]:
    """Return the code whose number is nearest to x, out of range the largest.

    Between two numbers the tie goes to the even code, as IEEE 754 rounds; to the lower number where
    the codes are not those of a float (NF4, FP4: bitsandbytes compares with `>`).
    """
    table = LEVELS[code]
    if code in ("nf4", "fp4"):
        order = np.argsort(table, kind="stable")
        order = order[np.concatenate([[True], np.diff(table[order]) > 0])]  # one zero
        levels = table[order]
        bounds = ((levels[1:].astype(np.float64) + levels[:-1]) / 2).astype(np.float32)
        index = jnp.searchsorted(jnp.asarray(bounds), x, side="left")
        return jnp.asarray(order.astype(np.uint8))[index]
    magnitudes = table[: len(table) // 2]
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    bounds = jnp.asarray((magnitudes[1:] + magnitudes[:-1]) / 2)
    size = jnp.abs(x)
    low = jnp.searchsorted(bounds, size, side="left").astype(jnp.uint8)
    tie = jnp.searchsorted(bounds, size, side="right").astype(jnp.uint8)
    index = jnp.where(low % 2 == 0, low, tie)
    return index | jnp.where(jnp.signbit(x), np.uint8(len(table) // 2), np.uint8(0))


def small_integers(bits: int) -> tuple[int, int]:
    """Return the least and the largest signed integer of `bits` bits."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def checked_bits(bits: Any) -> int:
    """Return `bits`, or raise ValueError."""
    if bits not in (2, 3, 4, 5, 6, 8):
        raise ValueError(f"bits is {bits!r}; use 2, 3, 4, 5, 6 or 8")
    return bits
