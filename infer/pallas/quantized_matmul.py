"""Products with a packed weight, decoded in registers, and what stands around them.  Pallas-Triton.

    y = x @ dequantize(w).T
    y = act(n @ gate.T + b) * (n @ up.T + c) + r,    n = x / sqrt(mean(x^2) + eps) * gain

for few rows of x (decoding) and, with larger tiles, many.  All but one product of the second line
may be missing.  `infer.pallas.weight_parts` says how a format's bytes become numbers.  Products are
those of x's dtype, sums float32; scales multiply sums; what stands after the sums is float32 too,
with one cast at the end.

The norm: x * gain is what is multiplied, rounded to x's dtype, and the row's 1 / sqrt(mean + eps)
multiplies the sums.  The squares are summed beside the products, of the same tiles, so that no
program reads all of x before it can begin.  The form that normalises first rounds after that factor
instead: as accurate, but other bits.  (float16 has no range for a residual stream times its gain,
and is refused.)

Grid (out / block_out, splits, rows / block_rows).  A program owns `block_out` rows of each weight,
a part of their columns, and `block_rows` rows of x; gate and up share its x.  The splits are summed
afterwards, in order.  Their number and the tiles depend on the weight's shape alone: up to 16 rows
the bits of one do not depend on how many there are.

What needs the whole sum (the norm's factor, a global scale, bias, activation, residual) is done in
the program where there is one split, and where there are more by what adds them, which XLA makes
one kernel with what follows; the first program of each split writes the squares.

Bytes: the packed weights once, x once for each `block_out` rows (from the L2 cache), y once, and
8 splits T O a weight of partial sums where there are splits.  FLOPs: 2 T O I a weight.

Source: the decoding in registers as in Frantar et al. 2024, arXiv 2408.11743 (Marlin); splits of
the inner dimension: Hoque et al. 2024, arXiv 2402.00025; RMSNorm: Zhang and Sennrich 2019,
arXiv 1910.07467; the gate: Shazeer 2020, arXiv 2002.05202.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Float

from infer.pallas.gated_activation import ACTIVATIONS, act
from infer.pallas.triton_call import check_launch, load, store, triton_call
from infer.pallas.weight_parts import FORMATS, Plan, Tile, describe, plan
from infer.quant.qarray import QArray, dequantize

# Programs that keep a large GPU busy with loads: about four for each of its processors.
_PROGRAMS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatmulBlocks:
    """Tile of the output, splits of the inner dimension, warps and stages."""

    block_out: int = 64
    block_rows: int = 16
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        """Check what Triton asks for."""
        for name in ("block_out", "block_rows"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} is {size}; use a power of two, 16 or more")
        if self.splits < 1:
            raise ValueError(f"splits is {self.splits}; use 1 or more")
        check_launch(self.num_warps, self.num_stages)

    @classmethod
    def for_shape(
        cls, rows: int, out: int, num_steps: int, gated: bool = False
    ) -> "QuantizedMatmulBlocks":
        """Return the sizes for `rows` of x, a weight of `out` rows and `num_steps` steps along its
        columns; a gate doubles what a program holds, and halves its rows of a weight.

        Few rows: splits until there are 512 programs, of two steps at least.  Many rows:
        tiles of 64 x 32.
        """
        block_out, num_warps = (32, 4) if gated else (64, 8)
        if rows > 16:
            return cls(block_out=block_out, block_rows=32, num_warps=num_warps)
        tiles = -(-out // block_out)
        splits = max(1, min(_PROGRAMS // tiles, num_steps // 2, 16))
        return cls(block_out=block_out, num_warps=num_warps, splits=splits)


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    plans: tuple[Plan, ...],
    shape: tuple[int, int],
    eps: float,
    activation: str | None,
    blocks: QuantizedMatmulBlocks,
) -> None:
    # inputs, those of `names`: x [T, I], gain [I], a bias [O] and a global scale [1] of each
    # weight, residual [T, O], and the weights' parts
    # outputs: y [T, O]; with splits sums [W, S, T, O], and with a norm squares [S, T]
    given = dict(zip(names, refs[: len(names)], strict=True))
    outputs = refs[len(names) :]
    x_ref, gain_ref = given["x"], given.get("gain")
    num_rows, (out, width) = x_ref.shape[0], shape
    tile_of_out, split = pl.program_id(0), pl.program_id(1)
    o = tile_of_out * blocks.block_out + jnp.arange(blocks.block_out, dtype=jnp.int32)
    t = pl.program_id(2) * blocks.block_rows + jnp.arange(blocks.block_rows, dtype=jnp.int32)
    tiles = []
    for w, steps in enumerate(plans):
        mine = {name: given[f"weight{w}.{name}"] for name in steps.operands}
        tiles.append(Tile(mine, o, shape))
    num_steps = plans[0].num_steps
    share = -(-num_steps // blocks.splits)
    first = split * share

    def step(i: Array, carry: tuple[tuple[Array, ...], Array | None]) -> Any:
        totals, squares = carry
        each = (steps.parts(tile, i) for steps, tile in zip(plans, tiles, strict=True))
        for parts in zip(*each, strict=True):  # of the same columns
            columns = parts[0].columns
            inside = (t < num_rows)[None, :] & (columns < width)[:, None]
            x = load(x_ref, t[None, :], columns[:, None], mask=inside, other=0.0)
            if squares is not None:
                wide = x.astype(jnp.float32)
                squares = squares + wide * wide
                gain = load(gain_ref, columns, mask=columns < width, other=0.0)
                x = (wide * gain.astype(jnp.float32)[:, None]).astype(x.dtype)
            new = []
            for part, total in zip(parts, totals, strict=True):
                # [block_out, block_rows]: the weights are the side that is read once.
                sums = triton.dot(part.codes.astype(x.dtype), x, allow_tf32=False)
                if part.scale is not None:
                    sums = sums * part.scale[:, None]
                total = total + sums
                if part.minus is not None:
                    xs = jnp.sum(x.astype(jnp.float32), axis=0)
                    total = total - part.minus[:, None] * xs[None, :]
                new.append(total)
            totals = tuple(new)
        return totals, squares

    last = jnp.minimum(first + share, num_steps)
    zeros = jnp.zeros((blocks.block_out, blocks.block_rows), jnp.float32)
    squares = None
    if gain_ref is not None:
        # A part for the number of its columns alone: its loads are dead code.
        columns = next(plans[0].parts(tiles[0], first)).columns
        squares = jnp.zeros((columns.shape[0], blocks.block_rows), jnp.float32)
    totals, squares = lax.fori_loop(first, last, step, ((zeros,) * len(plans), squares))
    if squares is not None:
        squares = jnp.sum(squares, axis=0)
    inside = (o < out)[:, None] & (t < num_rows)[None, :]
    if blocks.splits > 1:
        for w, total in enumerate(totals):
            store(outputs[0], w, split, t[None, :], o[:, None], value=total, mask=inside)
        if squares is not None:
            mine = (tile_of_out == 0) & (t < num_rows)
            store(outputs[1], split, t, value=squares, mask=mine)
        return
    inverse = residual = None
    if squares is not None:
        inverse = lax.rsqrt(squares / width + eps)[None, :]
    if "residual" in given:
        residual = load(given["residual"], t[None, :], o[:, None], mask=inside, other=0.0)
    some = lambda name, read: read(given[name]) if name in given else None
    y = _finish(
        totals,
        inverse,
        [some(f"scale{w}", lambda ref: load(ref, 0)) for w in range(len(plans))],
        [
            some(f"bias{w}", lambda ref: load(ref, o, mask=o < out, other=0.0)[:, None])
            for w in range(len(plans))
        ],
        activation,
        residual,
    )
    store(outputs[0], t[None, :], o[:, None], value=y.astype(outputs[0].dtype), mask=inside)


def _finish(
    totals: Sequence[Array],
    inverse: Array | None,
    scales: Sequence[Array | None],
    biases: Sequence[Array | None],
    activation: str | None,
    residual: Array | None,
) -> Array:
    """Return what becomes of whole sums, in float32; all else broadcasts against them."""
    ys = []
    for y, scale, bias in zip(totals, scales, biases, strict=True):
        if inverse is not None:
            y = y * inverse
        if scale is not None:
            y = y * scale
        ys.append(y if bias is None else y + bias.astype(jnp.float32))
    y = ys[0] if activation is None else act(ys[0], activation) * ys[1]
    return y if residual is None else y + residual.astype(jnp.float32)


def quantized_matmul(
    x: Float[Array, "T I"],
    weight: QArray,
    *,
    up: QArray | None = None,
    activation: str | None = None,
    gain: Float[Array, " I"] | None = None,
    eps: float = 0.0,
    bias: Float[Array, " O"] | None = None,
    up_bias: Float[Array, " O"] | None = None,
    residual: Float[Array, "T O"] | None = None,
    dtype: DTypeLike = jnp.float32,
    blocks: QuantizedMatmulBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "T O"]:
    """Return x @ dequantize(weight).T, or with `up` the gated product, in `dtype`.

    Args:
        x: activations, bfloat16, float16 or float32.
        weight: packed [O, I], of a format that takes activations as they are; with `up` the gate's.
        up: the other projection, of the same shape and format.
        activation: "silu" or "gelu_tanh", with `up`.
        gain: of an RMSNorm of x before the products; None is no norm.
        eps: added to the mean square, with `gain`.
        bias: added to the product with `weight`.
        up_bias: added to the product with `up`.
        residual: added last.
        dtype: of the result.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: the arrays do not fit.
        NotImplementedError: a format, dtype or activation that has no kernel, or a norm of float16.
    """
    weights = (weight,) if up is None else (weight, up)
    biases = (bias,) if up is None else (bias, up_bias)
    _check(x, weights, activation, gain, biases, residual)
    if up is None and up_bias is not None:
        raise ValueError("up_bias is there without up; pass both")
    plans = tuple(_plan(x, w, gain is not None) for w in weights)
    (num_rows, _), out, num_steps = x.shape, weight.shape[0], plans[0].num_steps
    blocks = blocks or QuantizedMatmulBlocks.for_shape(num_rows, out, num_steps, up is not None)
    splits = min(blocks.splits, num_steps)
    # So that the last split is not empty.
    splits = -(-num_steps // -(-num_steps // splits))
    blocks = dataclasses.replace(blocks, splits=splits)
    operands = {"x": x, "gain": gain}
    for w, steps in enumerate(plans):
        operands |= {f"weight{w}.{name}": array for name, array in steps.operands.items()}
    scales = [None if p.global_scale is None else p.global_scale.reshape(1) for p in plans]
    if splits == 1:  # the whole sum is in the program
        for w, (scale, added) in enumerate(zip(scales, biases, strict=True)):
            operands |= {f"scale{w}": scale, f"bias{w}": added}
        operands["residual"] = residual
        outputs = (jax.ShapeDtypeStruct((num_rows, out), dtype),)
    else:
        outputs = (jax.ShapeDtypeStruct((len(plans), splits, num_rows, out), jnp.float32),)
        if gain is not None:
            outputs += (jax.ShapeDtypeStruct((splits, num_rows), jnp.float32),)
    present: Mapping[str, Array] = {k: v for k, v in operands.items() if v is not None}
    found = triton_call(
        functools.partial(
            _kernel,
            names=tuple(present),
            plans=plans,
            shape=(out, x.shape[1]),
            eps=eps,
            activation=activation,
            blocks=blocks,
        ),
        *present.values(),
        name="quantized_matmul",
        grid=(-(-out // blocks.block_out), splits, -(-num_rows // blocks.block_rows)),
        out_shape=outputs,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
    )
    if splits == 1:
        return found[0]
    inverse = None
    if gain is not None:
        inverse = lax.rsqrt(_in_sequence(found[1]) / x.shape[1] + eps)[:, None]
    along = [None if added is None else added[None, :] for added in biases]
    scales = [None if scale is None else scale[None, :] for scale in scales]
    totals = [_in_sequence(sums) for sums in found[0]]
    return _finish(totals, inverse, scales, along, activation, residual).astype(dtype)


def _in_sequence(sums: Array) -> Array:
    """Return the sum over the first axis, in this order whatever the shape."""
    return functools.reduce(jnp.add, (sums[split] for split in range(sums.shape[0])))


def _plan(x: Array, weight: QArray, normed: bool) -> Plan:
    where = f"quantized_matmul in Triton: {describe(weight.format)} of shape {weight.shape}"
    if str(x.dtype) not in ("bfloat16", "float16", "float32"):
        raise NotImplementedError(f"{where} with x of {x.dtype}; it takes floats of 16 and 32 bits")
    if normed and x.dtype == jnp.float16:
        raise NotImplementedError(
            f"{where} with a norm of x in float16, whose range x * gain may leave; normalise x"
            " before, or use bfloat16"
        )
    steps = plan(weight)
    if steps is None:
        raise NotImplementedError(
            f"{where} is not decoded there; it takes {', '.join(FORMATS)}, and planar formats of 4"
            " and 8 bits with a group that is a power of two from 32 (16 for NVFP4), without an"
            " order of columns and without rounding of activations"
        )
    return steps


def _check(
    x: Array,
    weights: Sequence[QArray],
    activation: str | None,
    gain: Array | None,
    biases: Sequence[Array | None],
    residual: Array | None,
) -> None:
    shape = weights[0].shape
    if len(shape) != 2 or x.ndim != 2 or x.shape[1] != shape[1]:
        raise ValueError(f"x is {x.shape}, weight {shape}; x must be [T, I], weight (O, I)")
    if (activation is None) != (len(weights) == 1):
        missing = "missing" if len(weights) == 1 else "there"
        raise ValueError(f"activation is {activation!r} and up {missing}; pass both or neither")
    for name, array, want in (
        ("gain", gain, shape[1:]),
        *(("a bias", bias, shape[:1]) for bias in biases),
        ("residual", residual, (x.shape[0], shape[0])),
    ):
        if array is not None and array.shape != want:
            raise ValueError(f"{name} is {array.shape}; with x {x.shape} it must be {want}")
    if activation is None:
        return
    gate, up = weights
    if up.shape != shape:
        raise ValueError(f"weight is {shape}, up {up.shape}; gate and up must be alike")
    where = f"quantized_matmul in Triton: gate and up of shape {shape}"
    if activation not in ACTIVATIONS:
        raise NotImplementedError(
            f"{where} of {describe(gate.format)} with {activation!r}; there are"
            f" {', '.join(ACTIVATIONS)}"
        )
    if gate.format != up.format:
        raise NotImplementedError(
            f"{where} are {describe(gate.format)} and {describe(up.format)}; give them one format"
        )


def quantized_matmul_reference(
    x: Array,
    weight: QArray,
    *,
    up: QArray | None = None,
    activation: str | None = None,
    gain: Array | None = None,
    eps: float = 0.0,
    bias: Array | None = None,
    up_bias: Array | None = None,
    residual: Array | None = None,
) -> Array:
    """Compute the same by its definition, in float32."""
    h = x.astype(jnp.float32)
    if gain is not None:
        root = jnp.sqrt(jnp.mean(jnp.square(h), axis=1, keepdims=True) + eps)
        h = h / root * gain.astype(jnp.float32)[None, :]

    def product(w: QArray, added: Array | None) -> Array:
        y = jnp.einsum("ti,oi->to", h, dequantize(w), precision=lax.Precision.HIGHEST)
        return y if added is None else y + added.astype(jnp.float32)[None, :]

    y = product(weight, bias)
    if up is not None:
        gate = jax.nn.silu(y) if activation == "silu" else jax.nn.gelu(y, approximate=True)
        y = gate * product(up, up_bias)
    return y if residual is None else y + residual.astype(jnp.float32)
