"""I-quants: codes that stand for points of 8 or 4 weights, or for values on an uneven scale.

    IQ2_XXS, IQ2_XS, IQ2_S    w = d * (s + 1/2) / 4 * sign * point      points of 8 weights
    IQ3_XXS                   w = d * (s + 1/2) / 2 * sign * point      points of 4
    IQ3_S                     w = d * (2 s + 1) * sign * point          points of 4
    IQ1_S, IQ1_M              w = d * (2 s + 1) * (point +- 1/8)        points of 8
    IQ4_NL                    w = d * value                             32 weights a block
    IQ4_XS                    w = d * (s - 32) * value

All but IQ4_NL have 256 weights a block.  The points are in `infer.quant.iq_grids`.  Signs that are
stored in 7 bits for 8 weights have an even number of minuses: the eighth bit is their parity.

Source: the block structs and `dequantize_row_iq*` of ggml (ggml-common.h, ggml-quants.c;
ggml-org/ggml).
"""

from typing import Any

import numpy as np

from infer.quant.bits import XpArray, bitcast, fields, half, lookup, planes, split
from infer.quant.iq_grids import GRIDS

# Row b holds -1 where bit i of b is set and 0 elsewhere, for i = 0..7.
_MINUS = -np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(
    np.int8
)
_PARITY = _MINUS.sum(1) & 1
_EVEN_MINUS = _MINUS[np.arange(128) | (_PARITY[:128] << 7)]

# Source: kvalues_iq4nl of ggml (ggml-common.h).
_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


def _index(low: XpArray, high: XpArray) -> XpArray:
    """Return indices of 8 bits in `low` and more in `high`."""
    return low.astype(np.uint16) | (high.astype(np.uint16) << 8)


def _signed(points: XpArray, minus: XpArray) -> XpArray:
    """Return points [..., 256 weights in any cut] negated where `minus` [..., n, 8] is -1."""
    return (points.reshape(minus.shape) ^ minus) - minus  # two's complement


def _scaled(scales: XpArray, codes: XpArray) -> XpArray:
    """Return scales [..., n] times codes [..., 256 weights in any cut]: weights [..., 256]."""
    lead, n = scales.shape[:-1], scales.shape[-1]
    w = scales[..., None] * codes.reshape(*lead, n, 256 // n).astype(np.float32)
    return w.reshape(*lead, 256)


def _odd(s: XpArray) -> XpArray:
    """Return 2 s + 1, as float32."""
    return (2 * s + 1).astype(np.float32)


# ---- points of 8, 2 bits and more a weight -------------------------------------------------------


def iq2_xxs(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 8 sub-blocks: four bytes of codes, then a word of 4 * 7 sign bits and a scale."""
    d, packed = split(xp, blocks, 2, 64)
    lead = blocks.shape[:-1]
    pairs = packed.reshape(*lead, 8, 8)
    codes, words = split(xp, pairs, 4, 4)
    words = bitcast(xp, words, np.uint32)[..., 0]
    minus = lookup(xp, _EVEN_MINUS, fields(xp, words, 7, 4))
    points = lookup(xp, GRIDS["IQ2_XXS"], codes)
    return _scaled(half(xp, d) * (_odd(words >> 28) * 0.125), _signed(points, minus))


def iq2_xs(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 32 words of a 9-bit code and 7 sign bits; a scale for each two."""
    d, words, scales = split(xp, blocks, 2, 64, 8)
    words = bitcast(xp, words, np.uint16)
    minus = lookup(xp, _EVEN_MINUS, words >> 9)
    points = lookup(xp, GRIDS["IQ2_XS"], words & 511)
    return _scaled(half(xp, d) * (_odd(fields(xp, scales, 4, 2)) * 0.125), _signed(points, minus))


def iq2_s(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 32 codes of 8 and 2 bits, a byte of signs each, a scale for each two."""
    d, low, signs, high, scales = split(xp, blocks, 2, 32, 32, 8, 8)
    points = lookup(xp, GRIDS["IQ2_S"], _index(low, fields(xp, high, 2, 4)))
    codes = _signed(points, lookup(xp, _MINUS, signs))
    return _scaled(half(xp, d) * (_odd(fields(xp, scales, 4, 2)) * 0.125), codes)


# ---- points of 4, 3 bits and more a weight -------------------------------------------------------


def iq3_xxs(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 64 codes of 8 bits, then 8 words of 4 * 7 sign bits and a scale."""
    d, codes, words = split(xp, blocks, 2, 64, 32)
    words = bitcast(xp, words, np.uint32)
    minus = lookup(xp, _EVEN_MINUS, fields(xp, words, 7, 4))
    points = lookup(xp, GRIDS["IQ3_XXS"], codes)
    return _scaled(half(xp, d) * (_odd(words >> 28) * 0.25), _signed(points, minus))


def iq3_s(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 64 codes of 8 and 1 bits, a byte of signs for each two, a scale for each eight."""
    d, low, high, signs, scales = split(xp, blocks, 2, 64, 8, 32, 4)
    points = lookup(xp, GRIDS["IQ3_S"], _index(low, fields(xp, high, 1, 8)))
    codes = _signed(points, lookup(xp, _MINUS, signs))
    return _scaled(half(xp, d) * _odd(fields(xp, scales, 4, 2)), codes)


# ---- points of 8, less than 2 bits a weight ------------------------------------------------------


def _shifted(points: XpArray, down: XpArray) -> XpArray:
    """Return points in eighths plus 1, or minus 1 where `down` [..., n] is set."""
    shift = 1 - 2 * down.astype(np.int8)
    return points.reshape(*shift.shape, 256 // shift.shape[-1]) + shift[..., None]


def iq1_s(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 32 codes of 8 and 3 bits; a word for each four: 4 * 3 high bits, scale, shift."""
    d, low, words = split(xp, blocks, 2, 32, 16)
    words = bitcast(xp, words, np.uint16)
    points = lookup(xp, GRIDS["IQ1_S"], _index(low, fields(xp, words, 3, 4)))
    scales = half(xp, d) * (_odd((words >> 12) & 7) * 0.125)
    return _scaled(scales, _shifted(points, words >> 15))


def iq1_m(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 32 codes of 8 and 3 bits, a shift each, a scale for each two.

    The float16 d is spread over the top nibbles of the 4 words of scales.
    """
    low, high, words = split(xp, blocks, 32, 16, 8)
    words = bitcast(xp, words, np.uint16)
    top = words >> 12
    d = top[..., 0:1] | (top[..., 1:2] << 4) | (top[..., 2:3] << 8) | (top[..., 3:4] << 12)
    d = bitcast(xp, d, np.float16).astype(np.float32)
    high = fields(xp, high, 4, 2)
    points = lookup(xp, GRIDS["IQ1_S"], _index(low, high & 7))
    scales = d * (_odd(fields(xp, words, 3, 4)) * 0.125)
    return _scaled(scales, _shifted(points, high >> 3))


# ---- an uneven scale of 16 values ----------------------------------------------------------------


def iq4_nl(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 32 nibbles, the low ones first."""
    d, low = split(xp, blocks, 2, 16)
    codes = planes(xp, low, 4).reshape(*low.shape[:-1], 32)
    return half(xp, d) * lookup(xp, _IQ4_VALUES, codes).astype(np.float32)


def iq4_xs(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 8 sub-blocks of 32 nibbles, the low ones first; scales of 4 and 2 bits."""
    d, high, low_scales, low = split(xp, blocks, 2, 2, 4, 128)
    high = fields(xp, bitcast(xp, high, np.uint16), 2, 8).astype(np.uint8)
    scales = fields(xp, low_scales, 4, 2) | (high << 4)
    s = half(xp, d) * (scales.astype(np.int8) - 32).astype(np.float32)
    return _scaled(s, lookup(xp, _IQ4_VALUES, planes(xp, low.reshape(*low.shape[:-1], 8, 16), 4)))
