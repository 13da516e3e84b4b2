"""Ternary blocks, w = d * (q - 1) for q in 0, 1, 2, of 256 weights.

TQ2_0 gives a weight 2 bits.  TQ1_0 packs five into a byte as the digits of a number in base 3,

    byte = ceil(256 / 243 * (81 q0 + 27 q1 + 9 q2 + 3 q3 + q4))

which is a fraction of 256 in fixed point: a multiplication by 3 moves its first digit above the
point, and what stays below is the fraction of the remaining digits.

Source: the block structs and `dequantize_row_*` of ggml (ggml-common.h, ggml-quants.c;
ggml-org/ggml).
"""

from typing import Any

import numpy as np

from infer.quant.bits import XpArray, centred, half, planes, split


def _digits(xp: Any, x: XpArray, count: int) -> XpArray:
    """Return planes [..., count * n] of base-3 digits of bytes [..., n], all first digits first."""
    shifted = xp.stack([x * 3**i for i in range(count)], axis=-2)  # modulo 256: the fraction
    digits = (shifted.astype(np.uint16) * 3) >> 8
    return digits.reshape(*x.shape[:-1], count * x.shape[-1])


def tq1_0(xp: Any, blocks: XpArray) -> XpArray:
    """Decode 160 + 80 + 16 weights: five digits of 32 bytes, five of 16, four of 4."""
    a, b, c, d = split(xp, blocks, 32, 16, 4, 2)
    codes = xp.concatenate([_digits(xp, a, 5), _digits(xp, b, 5), _digits(xp, c, 4)], axis=-1)
    return half(xp, d) * centred(codes, 1)


def tq2_0(xp: Any, blocks: XpArray) -> XpArray:
    """Decode two halves of 128 weights, each in planes of 32 (code 3 is w = 2 d)."""
    low, d = split(xp, blocks, 64, 2)
    lead = blocks.shape[:-1]
    codes = planes(xp, low.reshape(*lead, 2, 32), 2).reshape(*lead, 256)
    return half(xp, d) * centred(codes, 1)
