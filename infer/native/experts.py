"""The gated MLPs of a mixture of experts on the CPU, one operation for all experts.

    y = sum over a token's experts e, in their order, of
        weight_e * ((act(x @ gate_e.T) * (x @ up_e.T)) @ down_e.T)

Tokens are sorted by expert, and the rows of one expert, at most 64 at a time, pass its weights
together, in the kernels of `infer.native.linear`: a token's result has the same bits alone and in
any batch, on any number of threads, with AVX2 and with AVX512.  Weights of experts that nobody
chose are not read.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from infer import native
from infer.native.linear import ACTIVATIONS
from infer.native.repack import Packed


def expert_mlp(
    x: Float[Array, "T D"],
    expert_ids: Int32[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    gate: Packed,
    up: Packed,
    down: Packed,
    activation: str,
    residual: Float[Array, "T D"] | None = None,
) -> Float[Array, "T D"]:
    """Return the weighted sum of each token's experts (+ residual).

    Args:
        x: activations, float32.
        expert_ids: 0 to E - 1; E is no expert and adds nothing.  The result of a token with any
            other id is NaN.
        expert_weights: float32.
        gate: [E, F, D], like `up`.
        up: [E, F, D].
        down: [E, D, F].
        activation: "silu" or "gelu_tanh".
        residual: added last, float32.

    Raises:
        NotImplementedError: the native operations cannot be used here, or not for this activation.
        ValueError: shapes or dtypes do not fit.
    """
    native.library()
    if activation not in ACTIVATIONS:
        raise NotImplementedError(
            f"no native expert_mlp with {activation!r}; there are {', '.join(ACTIVATIONS)}"
        )
    width = x.shape[1]
    fits = len(gate.shape) == 3 and gate.shape[2] == width and up.shape == gate.shape
    if not fits or down.shape != (gate.shape[0], width, gate.shape[1]):
        raise ValueError(
            f"gate is {gate.shape}, up {up.shape} and down {down.shape}; with x {x.shape} they"
            f" must be [E, F, {width}], [E, F, {width}] and [E, {width}, F]"
        )
    for name, array, dtype, shape in (
        ("x", x, jnp.float32, x.shape),
        ("expert_ids", expert_ids, jnp.int32, (x.shape[0], expert_ids.shape[1])),
        ("expert_weights", expert_weights, jnp.float32, expert_ids.shape),
        ("residual", residual, jnp.float32, x.shape),
    ):
        if array is not None and (array.dtype != dtype or array.shape != shape):
            raise ValueError(
                f"{name} is {array.dtype} {array.shape}; with these operands it must be"
                f" {jnp.dtype(dtype)} {shape}"
            )
    call = jax.ffi.ffi_call(
        "infer_expert_mlp",
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        vmap_method="sequential",
    )
    return call(
        x,
        expert_ids,
        expert_weights,
        gate.data,
        up.data,
        down.data,
        *(() if residual is None else (residual,)),
        formats=np.array([w.number for w in (gate, up, down)], np.int64),
        width=np.int64(gate.shape[1]),
        activation=np.int64(ACTIVATIONS[activation]),
    )
