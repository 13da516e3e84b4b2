"""What stands around products with packed weights, done in their kernel on a GPU: the norm before,
the gate between, bias and residual after.

A form here does one to three products as `infer.ops.linear` would with an op for each; `fuses` says
for which weights.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from infer.quant.qarray import QArray, is_plain, is_turned, stored


def fuses(x: Array, weights: Sequence[Any], norm: bool, activation: str | None = None) -> bool:
    """Return whether the kernel takes these operands.

    Args:
        x: activations [T, I].
        weights: each [out, in]; with `activation` gate and up.
        norm: whether x is normalised before.
        activation: of a gate, None where there is none.
    """
    from infer.pallas.gated_activation import ACTIVATIONS
    from infer.pallas.weight_parts import plan

    if x.dtype not in ((jnp.bfloat16, jnp.float32) if norm else _FLOATS) or not x.size:
        return False
    for weight in weights:
        if not isinstance(weight, QArray) or len(weight.shape) != 2:
            return False
        if is_turned(weight) or plan(stored(weight)) is None:
            return False
    if activation is None:
        return True
    gate, up = weights
    return (
        activation in ACTIVATIONS and gate.format == up.format and is_plain(gate) and is_plain(up)
    )


_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def products(
    x: Float[Array, "T I"],
    weights: tuple[QArray, ...],
    biases: tuple[Array | None, ...],
    gain: Float[Array, " I"] | None,
    residual: Float[Array, "T O"] | None,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "T O"], ...]:
    """Return each weight's product with x, normalised if there is a gain, + bias + residual: summed
    in float32, one cast to x's dtype.
    """
    from infer.ops.matmul_sizes import quantized_sizes
    from infer.pallas.quantized_matmul import quantized_matmul

    def product(weight: QArray, bias: Array | None) -> Array:
        h, g = x, gain
        if weight.perm is not None:  # the codes stay in their order, and the activations take it
            h = jnp.take(x, weight.perm, axis=1)
            g = None if gain is None else jnp.take(gain, weight.perm)
        weight = stored(weight)
        return quantized_matmul(
            h,
            weight,
            gain=g,
            eps=eps,
            bias=bias,
            residual=residual,
            dtype=x.dtype,
            blocks=quantized_sizes(h, weight),
            interpret=interpret,
        )

    return tuple(product(w, bias) for w, bias in zip(weights, biases, strict=True))


def gated_products(
    x: Float[Array, "T D"],
    weights: tuple[QArray, ...],
    biases: tuple[Array | None, ...],
    gain: Float[Array, " D"] | None,
    *,
    activation: str,
    eps: float,
    interpret: bool = False,
) -> Float[Array, "T F"]:
    """Return act(gate n) * up n, n the norm of x if there is a gain: in float32, one cast to x's
    dtype.
    """
    from infer.pallas.quantized_matmul import quantized_matmul

    gate, up = weights
    return quantized_matmul(
        x,
        gate,
        up=up,
        activation=activation,
        gain=gain,
        eps=eps,
        bias=biases[0],
        up_bias=biases[1],
        dtype=x.dtype,
        interpret=interpret,
    )
