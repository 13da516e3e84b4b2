"""Blocks of one weight, F32, F16 and BF16, and ggml's first blocks of 32.

    Q4_0, Q5_0, Q8_0    w = d * (q - zero)
    Q4_1, Q5_1          w = d * q + m

Source: the block structs and `dequantize_row_*` of ggml (ggml-common.h, ggml-quants.c;
ggml-org/ggml).
"""

from typing import Any

import numpy as np

from infer.quant.bits import XpArray, bitcast, centred, half, planes, plus, split


def f32(xp: Any, blocks: XpArray) -> XpArray:
    """Read little-endian float32."""
    return bitcast(xp, blocks, np.float32)


def f16(xp: Any, blocks: XpArray) -> XpArray:
    """Read little-endian float16."""
    return half(xp, blocks)


def bf16(xp: Any, blocks: XpArray) -> XpArray:
    """Read little-endian bfloat16."""
    # The upper half of a float32.  By bits, not by a cast: numpy has no bfloat16, and a denormal
    # must survive.
    return bitcast(xp, bitcast(xp, blocks, np.uint16).astype(np.uint32) << 16, np.float32)


def codes4(xp: Any, low: XpArray) -> XpArray:
    """Codes of 4 bits: the low nibbles are weights 0..15, the high ones 16..31."""
    return planes(xp, low, 4).reshape(*low.shape[:-1], 32)


def codes5(xp: Any, high: XpArray, low: XpArray) -> XpArray:
    """Codes of 5 bits: nibbles as in `codes4`, and above weight i's the i-th bit of `high`."""
    return codes4(xp, low) | (xp.unpackbits(high, axis=-1, bitorder="little") << 4)


def q4_0(xp: Any, blocks: XpArray) -> XpArray:
    """Decode d, 32 nibbles."""
    d, low = split(xp, blocks, 2, 16)
    return half(xp, d) * centred(codes4(xp, low), 8)


def q4_1(xp: Any, blocks: XpArray) -> XpArray:
    """Decode d, m, 32 nibbles."""
    d, m, low = split(xp, blocks, 2, 2, 16)
    return plus(half(xp, d) * codes4(xp, low).astype(np.float32), half(xp, m))


def q5_0(xp: Any, blocks: XpArray) -> XpArray:
    """Decode d, 32 fifth bits, 32 nibbles."""
    d, high, low = split(xp, blocks, 2, 4, 16)
    return half(xp, d) * centred(codes5(xp, high, low), 16)


def q5_1(xp: Any, blocks: XpArray) -> XpArray:
    """Decode d, m, 32 fifth bits, 32 nibbles."""
    d, m, high, low = split(xp, blocks, 2, 2, 4, 16)
    return plus(half(xp, d) * codes5(xp, high, low).astype(np.float32), half(xp, m))


def q8_0(xp: Any, blocks: XpArray) -> XpArray:
    """Decode d, 32 signed bytes."""
    d, codes = split(xp, blocks, 2, 32)
    return half(xp, d) * bitcast(xp, codes, np.int8).astype(np.float32)
