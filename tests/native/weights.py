"""Random weights in every format that the native kernels read, and the arithmetic they promise."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from infer.native.repack import FORMATS as FORMATS
from infer.quant.blocks import FORMATS as BLOCKS
from infer.quant.qarray import QArray, dequantize

FLOATS = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
PACKED = [name for name in FORMATS if name not in FLOATS]

# Offset of each float16 in a block.
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_weight(name: str, shape: tuple[int, int], seed: int = 0) -> QArray | Array:
    """Return a weight [out, in] whose codes and sub-scales are random bytes."""
    rng = np.random.default_rng(seed)
    if name in FLOATS:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.1).astype(FLOATS[name])
    format = BLOCKS[name]
    lead = (shape[0], shape[1] // format.group)
    blocks = rng.integers(0, 256, (*lead, format.block_bytes), np.uint8)
    for at in _HALVES.get(name, (0,)):
        scales = (rng.standard_normal((*lead, 1)) * 0.01).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return QArray.create(blocks.reshape(shape[0], -1), format, shape)


def dense(weight: QArray | Array) -> np.ndarray:
    """Return the weight in float64."""
    w = dequantize(weight) if isinstance(weight, QArray) else weight.astype(jnp.float32)
    return np.asarray(w, np.float64)


def random_rows(rows: int, width: int, seed: int = 1) -> np.ndarray:
    """Return normal activations, with some outliers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width), np.float32)
    return np.where(rng.random(x.shape) < 0.01, np.float32(20) * x, x)


def rounded(x: np.ndarray) -> np.ndarray:
    """Return the activations as the kernels see them: int8 codes times max|x| / 127, by 32."""
    groups = x.astype(np.float32).reshape(x.shape[0], -1, 32)
    most = np.abs(groups).max(axis=-1, keepdims=True)
    inverse = np.where(most > 0, np.float32(127) / np.where(most > 0, most, 1), 0)
    codes = np.rint(groups * inverse.astype(np.float32))
    return (codes * (most / np.float32(127)).astype(np.float64)).reshape(x.shape)


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """Return the norm in float64."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def rms(x: np.ndarray) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def random_experts(name: str, shape: tuple[int, int, int], seed: int = 0) -> QArray | Array:
    """Return the weights [E, out, in] of experts, as `random_weight` makes them."""
    experts, out, width = shape
    weight = random_weight(name, (experts * out, width), seed)
    if not isinstance(weight, QArray):
        return weight.reshape(shape)
    data = np.asarray(weight.data).reshape(experts, out, -1)
    return QArray.create(data, weight.format, shape)


def one_expert(weight: QArray | Array, expert: int) -> QArray | Array:
    """Return the matrix [out, in] of one expert."""
    if isinstance(weight, QArray):
        return QArray.create(np.asarray(weight.data)[expert], weight.format, weight.shape[1:])
    return weight[expert]
