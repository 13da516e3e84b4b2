"""K-quants: 256 weights a block, in 8 sub-blocks of 32 or 16 of 16 with scales of their own.

    Q3_K, Q6_K          w = d * s * (q - zero)
    Q2_K, Q4_K, Q5_K    w = d * s * q - dmin * m

Source: the block structs and `dequantize_row_*` of ggml (ggml-common.h, ggml-quants.c;
ggml-org/ggml).
"""

from typing import Any

import numpy as np

from infer.quant.bits import XpArray, bitcast, centred, half, planes, plus, split


def _scales_mins(xp: Any, packed: XpArray) -> tuple[XpArray, XpArray]:
    """Unpack Q4_K's and Q5_K's 12 bytes into 8 scales and 8 minima of 6 bits.

    Bytes 0..3 hold scales 0..3 and bytes 4..7 minima 0..3, in 6 bits each.  Scale 4+i is the low
    nibble of byte 8+i under the top 2 bits of byte i; minimum 4+i is its high nibble under the top
    2 bits of byte 4+i.
    """
    a, b, c = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = xp.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1)
    mins = xp.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _affine(d: XpArray, s: XpArray, codes: XpArray, dmin: XpArray, m: XpArray) -> XpArray:
    """Return d * s * q - dmin * m of d, dmin [..., 1], s, m [..., sub] and codes [..., sub, n]."""
    w = plus((d * s)[..., None] * codes.astype(np.float32), -(dmin * m)[..., None])
    return w.reshape(*w.shape[:-2], 256)


def q2_k(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 16 sub-blocks: a byte of scale and minimum each, 2-bit codes, d, dmin."""
    sm, low, d, dmin = split(xp, blocks, 16, 64, 2, 2)
    codes = planes(xp, low.reshape(*low.shape[:-1], 2, 32), 2).reshape(*low.shape[:-1], 16, 16)
    s, m = (sm & 15).astype(np.float32), (sm >> 4).astype(np.float32)
    return _affine(half(xp, d), s, codes, half(xp, dmin), m)


def q3_k(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 16 sub-blocks: third bits, 2-bit codes, 6-bit scales, d."""
    high, low, packed, d = split(xp, blocks, 32, 64, 12, 2)
    lead = blocks.shape[:-1]
    # Sub-scale i: 4 bits from a nibble of bytes 0..7 (low nibbles first), 2 bits from bytes 8..11
    # (lowest pairs first).
    scales = planes(xp, packed[..., :8], 4).reshape(*lead, 16)
    scales = scales | (planes(xp, packed[..., 8:], 2).reshape(*lead, 16) << 4)
    codes = planes(xp, low.reshape(*lead, 2, 32), 2).reshape(*lead, 256)
    codes = codes | (planes(xp, high, 1).reshape(*lead, 256) << 2)  # bit set: no 4 is taken off
    w = (half(xp, d) * centred(scales, 32))[..., None] * centred(codes, 4).reshape(*lead, 16, 16)
    return w.reshape(*lead, 256)


def q4_k(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 8 sub-blocks: d, dmin, 6-bit scales and minima, nibbles."""
    d, dmin, packed, low = split(xp, blocks, 2, 2, 12, 128)
    lead = blocks.shape[:-1]
    codes = planes(xp, low.reshape(*lead, 4, 32), 4).reshape(*lead, 8, 32)
    s, m = _scales_mins(xp, packed)
    return _affine(half(xp, d), s, codes, half(xp, dmin), m)


def q5_k(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 8 sub-blocks: d, dmin, 6-bit scales and minima, fifth bits, nibbles."""
    d, dmin, packed, high, low = split(xp, blocks, 2, 2, 12, 32, 128)
    lead = blocks.shape[:-1]
    codes = planes(xp, low.reshape(*lead, 4, 32), 4).reshape(*lead, 8, 32)
    codes = codes | (planes(xp, high, 1) << 4)  # bit j of byte i belongs to weight i of sub-block j
    s, m = _scales_mins(xp, packed)
    return _affine(half(xp, d), s, codes, half(xp, dmin), m)


def q6_k(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 16 sub-blocks: nibbles, upper 2 bits, 8-bit scales, d."""
    low, high, scales, d = split(xp, blocks, 128, 64, 16, 2)
    lead = blocks.shape[:-1]
    codes = planes(xp, low.reshape(*lead, 2, 64), 4).reshape(*lead, 256)
    codes = codes | (planes(xp, high.reshape(*lead, 2, 32), 2).reshape(*lead, 256) << 4)
    s = half(xp, d) * bitcast(xp, scales, np.int8).astype(np.float32)
    w = s[..., None] * centred(codes, 32).reshape(*lead, 16, 16)
    return w.reshape(*lead, 256)
