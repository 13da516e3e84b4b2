"""Hadamard transforms: y = H x / sqrt(n), which spreads an outlier over all channels.

Sylvester's part is done by additions in log2 steps, Paley's (`infer.quant.paley`) by a product with
its few rows.  Source: QuaRot (arXiv 2404.00456), section 3.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from infer.quant.paley import factor, paley


def transform(x: Float[Array, "*B I"], size: int, *, back: bool = False) -> Float[Array, "*B I"]:
    """Return blocks of `size` numbers of the last axis, each times the orthonormal matrix.

    Computed in float32 and cast to x's dtype once.

    Args:
        x: numbers; `size` divides the last axis.
        size: of a block, for which `factor` knows a matrix.
        back: with the transposed matrix, which undoes it.
    """
    rows = factor(size)
    power = size // rows
    y = x.astype(jnp.float32).reshape(-1, rows, power)
    step = 1
    while step < power:
        pairs = y.reshape(-1, rows, power // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([a + b, a - b], axis=-2).reshape(-1, rows, power)
        step *= 2
    if rows > 1:
        signs = paley(rows).T if back else paley(rows)
        y = jnp.einsum("ij,bjp->bip", signs.astype(np.float32), y, precision=lax.Precision.HIGHEST)
    return (y.reshape(x.shape) * np.float32(1 / math.sqrt(size))).astype(x.dtype)
