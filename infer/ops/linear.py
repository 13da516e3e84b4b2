"""Matrix products with a weight that is a float array or a QArray, both [out, in]."""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from infer.quant.qarray import QArray, dequantize, take_rows


def linear(
    x: Float[Array, "*B I"], weight: Array | QArray, bias: Float[Array, " O"] | None = None
) -> Float[Array, "*B O"]:
    """Return x @ weight.T (+ bias): products in x's dtype, sums in float32, one cast to x's dtype.

    Args:
        x: activations.
        weight: [out, in], a float array or packed; packed weights are decoded inside the program.
        bias: added in float32.
    """
    return linear_f32(x, weight, bias).astype(x.dtype)


def linear_f32(
    x: Float[Array, "*B I"], weight: Array | QArray, bias: Float[Array, " O"] | None = None
) -> Float[Array, "*B O"]:
    """Return the same product as `linear`, left in float32 (for logits)."""
    w = dequantize(weight, x.dtype) if isinstance(weight, QArray) else weight.astype(x.dtype)
    # HIGHEST: a float32 model asks for float32 products, not the GPU's TF32; other dtypes ignore
    # it.
    y = jnp.einsum(
        "...i,oi->...o", x, w, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )
    if bias is not None:
        y = y + bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
    return y


def embed(
    weight: Array | QArray, tokens: Int[Array, "*B"], dtype: DTypeLike
) -> Float[Array, "*B D"]:
    """Return the rows `tokens` of an embedding [V, D].  Ids must be in [0, V): the caller has
    checked or padded them.
    """
    if isinstance(weight, QArray):
        return take_rows(weight, tokens, dtype)
    return weight.at[tokens].get(mode="clip").astype(dtype)
