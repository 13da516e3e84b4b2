"""Weights times activations on the CPU: norm, products, gate and residual in one operation each.

    q, d = round(x / d), max|x| / 127        for each row of x and each group of 32
    y_o  = sum over groups of d * (scale_o * sum(w q) + min_o * sum(q))

`w`, `scale` and `min` are the codes, scales and minima of the weight's blocks, so that only the
activations are rounded.  Integers whose format says how activations are rounded (`int8`: a scale a
row; `int8_static`: a stored one) take them so.  Weights that are floats take the activations
unrounded.

The sums in a group are exact integers and the groups are added in order: a row's result has the
same bits alone and in any batch, on any number of threads, with AVX2, AVX512 and AMX.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from infer import native
from infer.native.repack import Packed

# Name -> its number in gemm.h.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def linear(
    x: Float[Array, "T I"],
    weights: Sequence[Packed],
    norm_gain: Float[Array, " I"] | None = None,
    eps: float = 0.0,
    biases: Sequence[Float[Array, " _"] | None] | None = None,
    residual: Float[Array, "T O"] | None = None,
    rounding: int = 0,
    act_scale: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "T _"], ...]:
    """Return n @ w.T (+ bias) (+ residual) for each weight; n is x, or its RMS norm.

    What a `Packed` says of its inputs' order and rounding is the caller's to do.

    Args:
        x: activations, float32.
        weights: one to three, of the same width.
        norm_gain: if given, n = x / sqrt(mean(x^2) + eps) * norm_gain.
        eps: of the norm.
        biases: one or None for each weight.
        residual: added to the result of the only weight.
        rounding: of activations, for integers: one of `formats.ROUNDINGS`.
        act_scale: of rounding 2.

    Raises:
        NotImplementedError: the native operations cannot be used here.
        ValueError: shapes or dtypes do not fit.
    """
    native.library()
    biases = tuple(biases) if biases is not None else (None,) * len(weights)
    if not 1 <= len(weights) <= 3 or len(biases) != len(weights):
        raise ValueError(f"linear takes 1 to 3 weights and as many biases, not {len(weights)}")
    if residual is not None and len(weights) != 1:
        raise ValueError(f"a residual goes with one weight, not with {len(weights)}")
    _check("x", x, (x.shape[0], weights[0].shape[1]))
    _check("norm_gain", norm_gain, (x.shape[1],))
    for weight, bias in zip(weights, biases, strict=True):
        _check_width(weight, x.shape[1])
        _check("bias", bias, (weight.shape[0],))
    _check("residual", residual, (x.shape[0], weights[0].shape[0]))
    if (rounding == 2) != (act_scale is not None):
        raise ValueError(f"rounding is {rounding}; act_scale goes with 2, and with that alone")
    _check("act_scale", act_scale, ())
    call = jax.ffi.ffi_call(
        "infer_linear",
        tuple(jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32) for w in weights),
        vmap_method="sequential",
    )
    given = (norm_gain, act_scale, *(w.data for w in weights), *biases, residual)
    return tuple(
        call(
            x,
            *(a for a in given if a is not None),
            formats=_int64s([w.number for w in weights]),
            has_bias=_int64s([b is not None for b in biases]),
            has_gain=norm_gain is not None,
            has_residual=residual is not None,
            eps=np.float32(eps),
            rounding=np.int64(rounding),
        )
    )


def gated_mlp(
    x: Float[Array, "T D"],
    gate: Packed,
    up: Packed,
    down: Packed,
    activation: str,
    norm_gain: Float[Array, " D"] | None = None,
    eps: float = 0.0,
    residual: bool = False,
) -> Float[Array, "T D"]:
    """Return (act(n @ gate.T) * (n @ up.T)) @ down.T (+ x); n is x, or its RMS norm.

    Args:
        x: activations, float32.
        gate: [F, D], like `up`.
        up: [F, D].
        down: [D, F].
        activation: "silu" or "gelu_tanh".
        norm_gain: as of `linear`.
        eps: of the norm.
        residual: whether to add x.

    Raises:
        NotImplementedError: the native operations cannot be used here, or not for this activation.
        ValueError: shapes or dtypes do not fit.
    """
    native.library()
    if activation not in ACTIVATIONS:
        raise NotImplementedError(
            f"no native gated_mlp with {activation!r}; there are {', '.join(ACTIVATIONS)}"
        )
    width = gate.shape[0]
    _check("x", x, (x.shape[0], gate.shape[1]))
    _check("norm_gain", norm_gain, (x.shape[1],))
    if (
        len(gate.shape) != 2
        or len(down.shape) != 2
        or up.shape != gate.shape
        or down.shape[1] != width
    ):
        raise ValueError(
            f"gate is {gate.shape}, up {up.shape} and down {down.shape}; they must be [F, D],"
            " [F, D] and [D, F]"
        )
    if residual and down.shape[0] != x.shape[1]:
        raise ValueError(f"x {x.shape} cannot be added to {down.shape[0]} outputs")
    call = jax.ffi.ffi_call(
        "infer_gated_mlp",
        jax.ShapeDtypeStruct((x.shape[0], down.shape[0]), jnp.float32),
        vmap_method="sequential",
    )
    return call(
        x,
        gate.data,
        up.data,
        down.data,
        *(() if norm_gain is None else (norm_gain,)),
        formats=_int64s([w.number for w in (gate, up, down)]),
        width=np.int64(width),
        activation=np.int64(ACTIVATIONS[activation]),
        residual=residual,
        eps=np.float32(eps),
    )


def _int64s(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def _check(name: str, array: Array | None, shape: tuple[int, ...]) -> None:
    if array is not None and (array.shape != shape or array.dtype != jnp.float32):
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}; with these operands it must be float32 {shape}"
        )


def _check_width(weight: Packed, width: int) -> None:
    if len(weight.shape) != 2 or weight.shape[1] != width:
        raise ValueError(f"a weight is {weight.shape} where x has the width {width}")
