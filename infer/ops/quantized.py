"""Products with a QArray in plain XLA: decoded a tile of rows at a time, activations rounded as the
weight's format says.

No more than a tile of a matrix is ever there as floats.  What the activations' rounding means:

    int8      s = max|x| / 127 over the token, x' = s clip(round(x / s), -127, 127)
    e4m3      s = max|x| / 448 over the token, or over each 128 inputs of it
    static    s is stored with the weight
    outliers  entries of magnitude 6 and more stay as they are, the others are int8 under the
              largest of the rest.  LLM.int8() takes a whole column out where one token of the batch
              has such an entry; here each token decides for itself, so that no result depends on
              what else is in the batch, and no entry is rounded that LLM.int8() would not round.

Source: LLM.int8() (arXiv 2208.07339); SmoothQuant (arXiv 2211.10438) for int8 with one scale a
token; DeepSeek-V3, section 3.3 (arXiv 2412.19437) for blocks of 128.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int8

from infer.quant import codes
from infer.quant.formats import PlanarFormat
from infer.quant.hadamard import transform
from infer.quant.qarray import QArray, dequantize_tile, is_plain, scales, stored
from infer.quant.rtn import quotient

# Weights of one tile: 2 MB as float32.
_TILE = 1 << 19
OUTLIER = 6.0
# Share of a token's largest magnitude that 4-bit activations reach.
_INT4_CLIP = 0.9


def quantized_product(x: Float[Array, "T I"], weight: QArray) -> Float[Array, "T O"]:
    """Return x' @ dequantize(weight).T in float32, x' the activations as the format rounds them.

    Products are taken in x's dtype; between int8 activations and integers with a scale a channel
    they are exact.

    Args:
        x: activations.
        weight: packed [out, in].
    """
    x, weight = in_basis(x, weight)
    format = weight.format
    if not isinstance(format, PlanarFormat) or not format.activations:
        return _tiled(weight, lambda w: _dot(x, w), x.dtype)
    integers = format.activations in ("int8", "int8_static", "int4")
    if integers and format.code == "int" and not format.group:
        return _integers(x.astype(jnp.float32), weight, format)
    rounded = round_activations(x.astype(jnp.float32), format.activations, weight.act_scale)
    rounded = rounded.astype(x.dtype)
    return _tiled(weight, lambda w: _dot(rounded, w), x.dtype)


def in_basis(x: Float[Array, "T I"], weight: QArray) -> tuple[Float[Array, "T I"], QArray]:
    """Return operands of the same product where the activations are in the order and turned as the
    weight's codes are.
    """
    if is_plain(weight):
        return x, weight
    x = turned(x, weight.format.rotated)  # type: ignore[attr-defined]
    return x if weight.perm is None else jnp.take(x, weight.perm, axis=1), stored(weight)


def turned(x: Float[Array, "T I"], rotated: int) -> Float[Array, "T I"]:
    """Return activations with each block of `rotated` inputs turned; 0 turns nothing."""
    return transform(x, rotated) if rotated else x


def round_activations(
    x: Float[Array, "T I"], how: str, act_scale: Float[Array, ""] | None = None
) -> Float[Array, "T I"]:
    """Return the activations x', float32.

    Args:
        x: activations, float32.
        how: the format's `activations`, not "".
        act_scale: of the weight, where that is static.
    """
    if how == "outliers":
        outlier = jnp.abs(x) >= OUTLIER
        q, s = int8_activations(jnp.where(outlier, 0.0, x))
        return jnp.where(outlier, x, q.astype(jnp.float32) * s)
    if how in ("int8", "int8_static", "int4"):
        q, s = integer_activations(x, how, act_scale)
        return q.astype(jnp.float32) * s
    assert how in ("e4m3", "e4m3_static", "e4m3_128"), how
    q, s = e4m3_activations(x, 128 if how == "e4m3_128" else None, act_scale)
    spread = s if s.shape[1] == 1 else jnp.repeat(s, 128, axis=1)[:, : x.shape[1]]
    return q.astype(jnp.float32) * spread


def int8_activations(
    x: Float[Array, "T I"], scale: Array | None = None
) -> tuple[Int8[Array, "T I"], Float[Array, "T 1"]]:
    """Return codes and scales of activations: a scale a token, or the one that is given."""
    if scale is None:
        s = quotient(jnp.abs(x).max(-1, keepdims=True), 127.0)
        s = jnp.where(s == 0, jnp.float32(1), s)
    else:
        s = jnp.broadcast_to(scale, (x.shape[0], 1))
    return jnp.clip(jnp.round(quotient(x, s)), -127, 127).astype(jnp.int8), s


def integer_activations(
    x: Float[Array, "T I"], how: str, act_scale: Array | None = None
) -> tuple[Int8[Array, "T I"], Float[Array, "T 1"]]:
    """Return codes and scales of activations, in the way of the format's `activations`.

    4 bits have a scale a token of 0.9 of its largest magnitude, which clips the few that are
    beyond: QuaRot (arXiv 2404.00456), section 4.
    """
    if how != "int4":
        return int8_activations(x, act_scale)
    s = quotient(jnp.abs(x).max(-1, keepdims=True) * np.float32(_INT4_CLIP), 7.0)
    s = jnp.where(s == 0, jnp.float32(1), s)
    return jnp.clip(jnp.round(quotient(x, s)), -8, 7).astype(jnp.int8), s


def e4m3_activations(
    x: Float[Array, "T I"], block: int | None = None, scale: Array | None = None
) -> tuple[Array, Float[Array, "T S"]]:
    """Return codes float8_e4m3fn [T, I] and scales of activations: a scale a token, the one that is
    given, or one for each `block` inputs, [T, ceil(I / block)].
    """
    rows, width = x.shape
    size = block or width
    parts = jnp.pad(x, ((0, 0), (0, -width % size))).reshape(rows, -1, size)
    largest = codes.LARGEST["e4m3"]  # a cast of what is more would give NaN
    if scale is None:
        s = quotient(jnp.maximum(jnp.abs(parts).max(-1), 1e-4), largest)
    else:
        s = jnp.broadcast_to(scale, parts.shape[:2])
    q = jnp.clip(quotient(parts, s[..., None]), -largest, largest).astype(jnp.float8_e4m3fn)
    return q.reshape(rows, -1)[:, :width], s


def _dot(x: Array, w: Array) -> Float[Array, "T O"]:
    return jnp.einsum(
        "ti,oi->to", x, w, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )


def _tiled(
    weight: QArray, product: Callable[[Array], Array], dtype: jnp.dtype
) -> Float[Array, "T O"]:
    """Return the products with all rows of `weight`, a tile of them after the other."""
    out, width = weight.shape
    size = max(16, _TILE // width // 16 * 16)
    if out <= size:
        return product(dequantize_tile(weight, 0, out, dtype))
    count = out // size
    starts = jnp.arange(count, dtype=jnp.int32) * size
    y = lax.map(lambda start: product(dequantize_tile(weight, start, size, dtype)), starts)
    y = y.swapaxes(0, 1).reshape(y.shape[1], -1)
    if count * size < out:
        rest = product(dequantize_tile(weight, count * size, out - count * size, dtype))
        y = jnp.concatenate([y, rest], axis=1)
    return y


def _integers(x: Float[Array, "T I"], weight: QArray, format: PlanarFormat) -> Array:
    """Return the products of int8 activations with integers, summed exactly in int32."""
    q, s = integer_activations(x, format.activations, weight.act_scale)
    # With fewer rows XLA's CPU product of int8 is many times slower.
    rows = q.shape[0]
    q = jnp.pad(q, ((0, max(0, 8 - rows)), (0, 0)))
    coded = codes.unpack(jnp.asarray(weight.data), format.bits, weight.shape[1])
    w = (coded - np.uint8(1 << (format.bits - 1))).astype(jnp.int8)  # modulo 256
    sums = jnp.einsum("ti,oi->to", q, w, preferred_element_type=jnp.int32)[:rows]
    if not format.symmetric:
        less = weight.zero.astype(jnp.int32) - (1 << (format.bits - 1))
        sums = sums - q[:rows].astype(jnp.int32).sum(-1, keepdims=True) * less.reshape(1, -1)
    return sums.astype(jnp.float32) * s * scales(weight).reshape(1, -1)
