"""Microscaling blocks: E2M1 codes (4-bit floats) under a scale of 8 bits.

    MXFP4   w = 2^(e - 127) * v      32 weights, e the E8M0 byte
    NVFP4   w = s * v                16 weights, s the unsigned E4M3 byte; four of these a block

    v in 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives under bit 3 (there is no -0)

In a block of GGUF the low nibbles are the first half of the weights that share a scale and the
high ones the second.  (Checkpoints in safetensors have weight 2i in the low nibble of byte i.)

Source: the OCP Microscaling Formats specification 1.0; the block structs of ggml (ggml-common.h,
ggml-org/ggml).  We differ from ggml and gguf-py at the E8M0 byte 255: the specification says NaN,
and so are the weights here; theirs are 2^128 * v, infinite for the most part.
"""

from typing import Any

import numpy as np

from infer.quant.bits import XpArray, lookup, planes, split

# Doubled, so that they are integers.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _mxfp4_weights() -> np.ndarray:
    """Return float32 [256 * 16]: the weight of each scale byte and code."""
    with np.errstate(over="ignore"):
        weights = np.ldexp(_E2M1.astype(np.float32), np.arange(256)[:, None] - 128)
    weights[255] = np.nan
    return weights.reshape(-1)


def _e4m3_halves() -> np.ndarray:
    """Return float32 [256]: half of each E4M3 byte; bit 7 is not read, 0x7f counts as 0."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = np.ldexp((8 + mantissa).astype(np.float32), exponent - 10)
    values = np.where(exponent == 0, np.ldexp(mantissa.astype(np.float32), -9), normal)
    values[0x7F] = 0
    return values / np.float32(2)


_MXFP4 = _mxfp4_weights()
_E4M3_HALVES = _e4m3_halves()


def mxfp4(xp: Any, blocks: XpArray) -> XpArray:
    """Decode by a table of all scales and codes.

    The smallest weights are subnormal, and compiled programs flush those to 0 in a product; a
    table lookup keeps their bits.
    """
    e, low = split(xp, blocks, 1, 16)
    codes = planes(xp, low, 4).reshape(*low.shape[:-1], 32)
    return lookup(xp, _MXFP4, (e.astype(np.uint16) << 4) | codes.astype(np.uint16))


def nvfp4(xp: Any, blocks: XpArray) -> XpArray:
    """Decode four sub-blocks of 16, each 8 bytes."""
    scales, low = split(xp, blocks, 4, 32)
    lead = blocks.shape[:-1]
    codes = planes(xp, low.reshape(*lead, 4, 8), 4).reshape(*lead, 4, 16)
    doubled = lookup(xp, _E2M1, codes).astype(np.float32)
    return (lookup(xp, _E4M3_HALVES, scales)[..., None] * doubled).reshape(*lead, 64)
