"""Matrix products with a weight [out, in]: a float array, a QArray, or one packed for the CPU's
native operations.

What stands around the products of a layer is fused with them where the weights are `Packed`, and on
a GPU where few rows meet QArrays: the norm before, the gate between, bias and residual after.  A
`Packed` weight has no plain XLA form.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from infer.native.formats import ROUNDINGS
from infer.native.repack import Packed
from infer.ops import choice, fused_linear
from infer.ops.activation import gated_activation
from infer.ops.norm import rms_norm
from infer.ops.quantized import (
    e4m3_activations,
    in_basis,
    integer_activations,
    quantized_product,
    round_activations,
    turned,
)
from infer.ops.rounded_input import RoundedInput
from infer.quant.formats import PlanarFormat
from infer.quant.hadamard import transform
from infer.quant.qarray import QArray, take_rows

# Gain and epsilon of an RMSNorm; None is no norm.
PreNorm = tuple[Array, float] | None


_observed: contextvars.ContextVar[list[tuple[Any, Array]] | None] = contextvars.ContextVar(
    "infer_observed", default=None
)


@contextlib.contextmanager
def observing() -> Iterator[list[tuple[Any, Array]]]:
    """Collect (weight, input [..., I]) of every product of the trace inside, in order.

    For calibration: a function that returns some of what was collected stays pure, since collection
    begins and ends inside its trace.  Weights that are `Packed` are not observed.
    """
    seen: list[tuple[Any, Array]] = []
    token = _observed.set(seen)
    try:
        yield seen
    finally:
        _observed.reset(token)


def linear(
    x: Float[Array, "*B I"],
    weight: Array | QArray | Packed | RoundedInput,
    bias: Float[Array, " O"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B O"]:
    """Return x @ weight.T (+ bias): products in x's dtype, sums in float32, one cast to x's dtype.

    Args:
        x: activations.
        weight: [out, in], a float array or packed; a QArray is decoded inside the program.
        bias: added in float32.
        implementation: see `infer.ops.choice`.
    """
    return linear_f32(x, weight, bias, implementation).astype(x.dtype)


def linear_f32(
    x: Float[Array, "*B I"],
    weight: Array | QArray | Packed | RoundedInput,
    bias: Float[Array, " O"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B O"]:
    """Return the same product as `linear`, left in float32 (for logits)."""
    if isinstance(weight, Packed):
        rows = x.reshape(-1, x.shape[-1])
        return _native(rows, (weight,), (bias,), None, None, implementation)[0].reshape(
            *x.shape[:-1], -1
        )
    choice.check_implementation(implementation)
    if isinstance(weight, RoundedInput):
        return linear_f32(weight.rounded(x), weight.weight, bias, implementation)
    seen = _observed.get()
    if seen is not None:
        seen.append((weight, x))
    if isinstance(weight, QArray):
        if implementation == "native":
            raise NotImplementedError(
                f"linear in native: the weights are {weight.format.name} in plain form; repack them"
                " (infer.load(..., packed=True), infer.models.panels.repack) or, where no native"
                " kernel takes the format, leave the implementation out"
            )
        rows = x.reshape(-1, x.shape[-1])
        y = _packed_product(rows, weight, implementation).reshape(*x.shape[:-1], -1)
    else:
        choice.record(choice.Choice("linear", "xla", "the weights are not packed for another"))
        # HIGHEST: a float32 model asks for float32 products, not the GPU's TF32; other dtypes
        # ignore it.
        y = jnp.einsum(
            "...i,oi->...o",
            x,
            weight.astype(x.dtype),
            preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST,
        )
    if bias is not None:
        y = y + bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
    return y


# Rows from which decoding a whole tile of the weight and one large product is thought to be faster.
_MOST_ROWS = 64
# The first whose tensor cores multiply E4M3.
_ADA = (8, 9)


def _packed_product(
    x: Float[Array, "T I"], weight: QArray, implementation: str | None
) -> Float[Array, "T O"]:
    """Return x @ weight.T in float32, on a GPU in the kernel that decodes in registers."""

    def kernel(x: Array, weight: QArray, interpret: bool = False) -> Array:
        from infer.ops.matmul_sizes import quantized_sizes, scaled_sizes
        from infer.pallas.quantized_matmul import quantized_matmul
        from infer.pallas.scaled_matmul import scaled_matmul

        x, weight = in_basis(x, weight)
        rounds = isinstance(weight.format, PlanarFormat) and weight.format.activations
        if not rounds or rounds == "outliers":
            blocks = quantized_sizes(x, weight)
            return quantized_matmul(x, weight, blocks=blocks, interpret=interpret)
        if not interpret:
            _check_e4m3(weight)
        x, scales = _rounded(x, weight)
        blocks = scaled_sizes(x, weight)
        return scaled_matmul(x, scales, weight, blocks=blocks, interpret=interpret)

    def on_hopper(x: Array, weight: QArray) -> Array:
        from infer.pallas.quantized_matmul_mosaic import quantized_matmul_mosaic
        from infer.pallas.scaled_matmul_mosaic import scaled_matmul_mosaic

        x, weight = in_basis(x, weight)
        if not rounds:
            return quantized_matmul_mosaic(x, weight)
        return scaled_matmul_mosaic(*_rounded(x, weight), weight)

    def by_hand(x: Array, weight: QArray) -> Array:
        from infer.jax_triton.quantized_matmul import quantized_matmul

        return quantized_matmul(*in_basis(x, weight))

    rounds = isinstance(weight.format, PlanarFormat) and weight.format.activations
    few = _few_rows(x) or (bool(rounds) and x.dtype.itemsize == 2)
    mosaic = {"mosaic": choice.with_xla_gradient(on_hopper, quantized_product)}
    return choice.choose(
        "linear",
        (x, weight),
        xla=quantized_product,
        kernels={
            "triton": choice.with_xla_gradient(kernel, quantized_product),
            "jax_triton": choice.with_xla_gradient(by_hand, quantized_product),
            "interpret": functools.partial(kernel, interpret=True),
            # Of 8-bit activations and planar integers alone: other products choose as if no form
            # was named.
            **(mosaic if rounds != "outliers" and (rounds or _whole_codes(weight)) else {}),
        },
        preferred=("triton",) if few else (),
        implementation=implementation,
    )


def _whole_codes(weight: QArray) -> bool:
    """Return whether the weight is integers whose codes lie whole in bytes or halves of one."""
    format = weight.format
    return isinstance(format, PlanarFormat) and format.code == "int" and format.bits in (4, 8)


def _few_rows(x: Array) -> bool:
    return x.shape[0] <= _MOST_ROWS and x.dtype.itemsize == 2


def _check_e4m3(weight: QArray) -> None:
    """Raise NotImplementedError for E4M3 products on a GPU that has none: Triton would end the
    process.
    """
    gpu = choice.target_gpu()
    assert isinstance(weight.format, PlanarFormat)
    e4m3 = weight.format.activations.startswith("e4m3")
    if e4m3 and gpu is not None and gpu.capability is not None and gpu.capability < _ADA:
        raise NotImplementedError(
            f"linear in triton: {weight.format.name} of shape {weight.shape} multiplies E4M3 with"
            f" E4M3, which needs compute capability 8.9, not {gpu.kind} {gpu.capability}; use"
            " 'xla', or None, which chooses"
        )


def _rounded(x: Array, weight: QArray) -> tuple[Array, Array]:
    """Return codes and scales of the activations as the weight's format rounds them."""
    assert isinstance(weight.format, PlanarFormat)
    x = x.astype(jnp.float32)
    if weight.format.activations.startswith("int"):
        return integer_activations(x, weight.format.activations, weight.act_scale)
    block = 128 if weight.format.activations == "e4m3_128" else None
    return e4m3_activations(x, block, weight.act_scale)


def linears(
    x: Float[Array, "T I"],
    weights: Sequence[Any],
    biases: Sequence[Array | None],
    *,
    norm: PreNorm = None,
    residual: Float[Array, "T O"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T O"], ...]:
    """Return the products of several weights with one input, fused with what stands around them.

    Args:
        x: activations.
        weights: each [out, in].
        biases: one or None for each.
        norm: of x before the products.
        residual: added to the product of the only weight.
        implementation: see `infer.ops.choice`.
    """
    weights = tuple(weights)
    if _all_packed(weights):
        ys = _native(x, weights, biases, norm, residual, implementation)
        return tuple(y.astype(x.dtype) for y in ys)
    biases = tuple(biases)
    gain, eps = (None, 0.0) if norm is None else norm
    around = norm is not None or residual is not None or any(b is not None for b in biases)
    if around and _fuses(x, weights, norm, implementation):
        return _fused(
            "linear",
            fused_linear.products,
            _one_by_one,
            (x, weights, biases, gain, residual),
            implementation,
            eps=eps,
        )
    return _one_by_one(x, weights, biases, gain, residual, eps=eps, implementation=implementation)


def _one_by_one(
    x: Array,
    weights: Sequence[Any],
    biases: Sequence[Array | None],
    gain: Array | None,
    residual: Array | None,
    *,
    eps: float,
    implementation: str | None,
) -> tuple[Array, ...]:
    """Compute `linears` with an op for each part."""
    h = x if gain is None else rms_norm(x, gain, eps, implementation)
    ys = tuple(linear(h, w, b, implementation) for w, b in zip(weights, biases, strict=True))
    return ys if residual is None else (residual + ys[0],)


def _fuses(
    x: Array,
    weights: Sequence[Any],
    norm: PreNorm,
    implementation: str | None,
    activation: str | None = None,
) -> bool:
    """Return whether the products and what stands around them are one kernel's.

    Not where weights are observed: what they read then has to be there.
    """
    if implementation is None:
        wanted = _few_rows(x) and choice.target_gpu() is not None
    else:
        wanted = implementation in ("triton", "interpret")
    if not wanted or _observed.get() is not None:
        return False
    return fused_linear.fuses(x, weights, norm is not None, activation)


def _fused(
    op: str,
    kernel: choice.Form,
    by_parts: choice.Form,
    operands: tuple[Any, ...],
    implementation: str | None,
    **static: Any,
) -> Any:
    """Run the kernel, or plain XLA part by part where the program is lowered for a CPU."""

    def xla(*operands: Any) -> Any:
        with choice.recording():  # the parts' own choices are not what is recorded
            return by_parts(*operands, **static, implementation="xla")

    triton = functools.partial(kernel, **static)
    return choice.choose(
        op,
        operands,
        xla=xla,
        kernels={
            "triton": choice.with_xla_gradient(triton, xla),
            "interpret": functools.partial(triton, interpret=True),
        },
        preferred=("triton",),
        implementation=implementation,
    )


def gated_mlp(
    x: Float[Array, "T D"],
    weights: Sequence[Any],
    biases: Sequence[Array | None],
    activation: str,
    *,
    norm: PreNorm = None,
    residual: bool = False,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """Return down(act(gate n) * up n) (+ x), n the norm of x.

    Args:
        x: activations.
        weights: gate, up and down.
        biases: one or None for each.
        activation: "silu", "gelu_tanh" or "gelu".
        norm: of x.
        residual: whether to add x.
        implementation: see `infer.ops.choice`.
    """
    gate, up, down = weights
    plain = all(bias is None for bias in biases) and activation != "gelu"
    if plain and _all_packed(weights) and all(map(_takes_rows, weights)):
        return _native_mlp(x, gate, up, down, activation, norm, residual, implementation)
    pair, beside = (gate, up), tuple(biases[:2])
    gain, eps = (None, 0.0) if norm is None else norm
    if _fuses(x, pair, norm, implementation, activation):
        inner = _fused(
            "gated_mlp",
            fused_linear.gated_products,
            _gate_and_up,
            (x, pair, beside, gain),
            implementation,
            activation=activation,
            eps=eps,
        )
    else:
        inner = _gate_and_up(
            x, pair, beside, gain, activation=activation, eps=eps, implementation=implementation
        )
    more = x if residual else None
    return linears(inner, (down,), biases[2:], residual=more, implementation=implementation)[0]


def _gate_and_up(
    x: Array,
    weights: Sequence[Any],
    biases: Sequence[Array | None],
    gain: Array | None,
    *,
    activation: str,
    eps: float,
    implementation: str | None,
) -> Array:
    """Return act(gate n) * up n with an op for each part."""
    norm = None if gain is None else (gain, eps)
    g, u = linears(x, weights, biases, norm=norm, implementation=implementation)
    return gated_activation(g, u, activation, implementation)


def embed(
    weight: Array | QArray | Packed, tokens: Int[Array, "*B"], dtype: DTypeLike
) -> Float[Array, "*B D"]:
    """Return the rows `tokens` of an embedding [V, D].  Ids must be in [0, V): the caller has
    checked or padded them.
    """
    if isinstance(weight, Packed):
        from infer.native.embed import embed as rows_of

        rows = rows_of(weight, tokens.reshape(-1)).reshape(*tokens.shape, -1).astype(dtype)
        if weight.perm is not None:
            rows = jnp.take(rows, jnp.argsort(weight.perm), axis=-1)
        return transform(rows, weight.rotated, back=True) if weight.rotated else rows
    if isinstance(weight, QArray):
        return take_rows(weight, tokens, dtype)
    return weight.at[tokens].get(mode="clip").astype(dtype)


def _all_packed(weights: Sequence[Any]) -> TypeGuard[Sequence[Packed]]:
    return all(isinstance(w, Packed) for w in weights)


def _native(
    x: Array,
    weights: Sequence[Packed],
    biases: Sequence[Array | None],
    norm: PreNorm,
    residual: Array | None,
    implementation: str | None,
) -> tuple[Array, ...]:
    from infer.native.linear import linear as kernel

    only_native("linear", implementation)
    f32 = lambda a: None if a is None else a.astype(jnp.float32)
    gain, eps = (None, 0.0) if norm is None else norm
    x, gain, biases = x.astype(jnp.float32), f32(gain), tuple(map(f32, biases))
    if all(map(_takes_rows, weights)):
        return kernel(x, weights, gain, eps, biases, f32(residual))
    one = lambda w, bias: _native_own(x, w, bias, gain, eps, f32(residual))
    return tuple(one(w, bias) for w, bias in zip(weights, biases, strict=True))


def _takes_rows(weight: Packed) -> bool:
    """Return whether a weight takes rows as they are: in order, not turned, rounded as the kernels
    do.
    """
    return weight.perm is None and not weight.rotated and not weight.activations


def _native_own(
    x: Array,
    weight: Packed,
    bias: Array | None,
    gain: Array | None,
    eps: float,
    residual: Array | None,
) -> Array:
    """Return the product of a weight that has its inputs in an order or a rounding of its own."""
    from infer.native.linear import linear as kernel

    if weight.rotated:
        if gain is not None:
            x, gain = rms_norm(x, gain, eps, "xla"), None
        x = turned(x, weight.rotated)
    if weight.perm is not None:  # the norm of a row does not depend on its order
        x = jnp.take(x, weight.perm, axis=1)
        gain = None if gain is None else jnp.take(gain, weight.perm)
    rounding, act_scale = 0, None
    if weight.is_integer:
        rounding = ROUNDINGS[weight.activations]
        act_scale = weight.act_scale
    elif weight.activations:
        if gain is not None:
            x, gain = rms_norm(x, gain, eps, "xla"), None
        x = round_activations(x, weight.activations, weight.act_scale)
    return kernel(x, (weight,), gain, eps, (bias,), residual, rounding, act_scale)[0]


def _native_mlp(
    x: Array,
    gate: Packed,
    up: Packed,
    down: Packed,
    activation: str,
    norm: PreNorm,
    residual: bool,
    implementation: str | None,
) -> Array:
    from infer.native.linear import gated_mlp as kernel

    only_native("gated_mlp", implementation)
    gain, eps = (None, 0.0) if norm is None else norm
    gain = None if gain is None else gain.astype(jnp.float32)
    y = kernel(x.astype(jnp.float32), gate, up, down, activation, gain, eps, residual)
    return y.astype(x.dtype)


def only_native(op: str, implementation: str | None) -> None:
    """Record the choice that packed weights leave."""
    choice.check_implementation(implementation)
    if implementation not in (None, "native"):
        raise NotImplementedError(
            f"{op} in {implementation}: the weights are packed for the CPU's native operations; "
            "load a GGUF file with packed='blocks', a folder with packed=False, or use "
            "implementation=None"
        )
    choice.record(choice.Choice(op, "native"))
