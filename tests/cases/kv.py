"""Quantised keys and values as numpy defines them, and heads that are hard to quantise."""

import ml_dtypes
import numpy as np

_LARGEST = {"int8": 127, "int4": 7, "float8_e4m3": 448}


def heads(width: int, count: int = 40) -> np.ndarray:
    """Return heads [count, width]: of all sizes, ties, zeros, one number, next to nothing."""
    rng = np.random.default_rng(width)
    x = rng.standard_normal((count, width)) * 10.0 ** rng.uniform(-30, 30, (count, 1))
    x[0] = 0
    x[1] = 0
    x[1, 1] = -3
    x[2] = 1e-41
    x[3] = 1e-37
    # Scale 1 and halves: every number is a tie.
    x[4] = rng.integers(-7, 7, width) + 0.5
    x[4, 0] = 7
    x[5] = rng.integers(-127, 127, width) + 0.5
    x[5, 0] = 127
    # E4M3's subnormals and ties.
    x[6] = rng.integers(-40, 40, width) / 2.0**10
    x[6, 0] = 448
    x[7] = -0.0
    return x.astype(np.float32)


def definition(x: np.ndarray, kv_format: str) -> tuple[np.ndarray, np.ndarray]:
    """Return data and float32 scales of heads [..., H]."""
    largest = _LARGEST[kv_format]
    scale = np.abs(x).max(-1) * np.float32(1 / largest)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    at = scale[..., None]
    y = np.where(at == 0, np.float32(0), x / np.where(at == 0, np.float32(1), at))
    y = np.clip(y, -largest, largest)
    if kv_format == "float8_e4m3":
        return y.astype(ml_dtypes.float8_e4m3fn), scale
    codes = np.rint(y).astype(np.int8)
    if kv_format == "int8":
        return codes, scale
    low, high = np.split((codes + 8).astype(np.uint8), 2, axis=-1)
    return low | high << 4, scale


def numbers(data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the float32 numbers that they stand for."""
    if data.dtype == np.uint8:
        data = np.concatenate([data & 15, data >> 4], axis=-1).astype(np.float32) - 8
    return data.astype(np.float32) * scale[..., None]
