"""Weights of the tiny checkpoints behind the golden files, made from their names: both sides build
the same checkpoint, and the files hold only configuration, logits and ids.  Needs numpy alone.
"""

import zlib

import numpy as np


def values(name: str, shape: tuple[int, ...], norm_base: float) -> np.ndarray:
    """Return the float32 values of a tensor of a checkpoint.

    Matrices are N(0, 1 / columns), embeddings N(0, 0.0025), biases N(0, 0.01), gains
    N(norm_base, 0.04).
    """
    draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 2:
        embeds = any(part in name for part in ("embed", "wte", "wpe"))
        draw = draw * (0.05 if embeds else shape[-1] ** -0.5)
    elif name.endswith("bias"):
        draw = draw * 0.1
    else:
        draw = norm_base + 0.2 * draw
    return draw.astype(np.float32)
