"""Products of 8-bit activations with 8-bit weights.  Pallas-Triton.

    y[t, o] = sx[t] sw[o] sum_i qx[t, i] qw[o, i]                       one scale a row
    y[t, o] = sum over blocks b of 128 inputs of                        block scales
              sx[t, b] sw[o // 128, b] sum_(i in b) qx[t, i] qw[o, i]

Integers are summed exactly in int32, so the bits of a row depend on nothing else.  E4M3 products
are exact in float32; with block scales each block's sum is scaled in float32, outside the tensor
cores, whose own accumulators keep fewer bits (DeepSeek-V3, section 3.3, arXiv 2412.19437).

Grid (out / block_out, rows / block_rows).  A program walks all inputs, 128 at a time.
Bytes: the weight once for each `block_rows` rows of x, x once for each `block_out` rows of the
weight, y once.  FLOPs: 2 T O I.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Shaped

from infer.pallas.triton_call import check_launch, load, store, triton_call
from infer.pallas.weight_parts import describe
from infer.quant.formats import PlanarFormat
from infer.quant.qarray import QArray, dequantize

_STEP = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledMatmulBlocks:
    """Tile of the output, warps and stages."""

    block_out: int = 64
    block_rows: int = 16
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        """Check what Triton asks for."""
        for name in ("block_out", "block_rows"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} is {size}; use a power of two, 16 or more")
        check_launch(self.num_warps, self.num_stages)

    @classmethod
    def for_shape(cls, rows: int) -> "ScaledMatmulBlocks":
        """Return the sizes for `rows` of x: narrow tiles of the weight where there are few."""
        if rows <= 16:
            return cls(block_out=32)
        return cls(block_rows=64, block_out=64) if rows < 128 else cls(block_rows=128, num_warps=8)


def _kernel(
    # inputs
    x_ref,  # uint8 [T, I], the bits of int8 or e4m3
    x_scale_ref,  # f32 [T, 1] or [T, ceil(I / 128)]
    data_ref,  # uint8 [O, I]
    scale_ref,  # [R, Q]
    # outputs
    y_ref,  # f32 [T, O]
    *,
    code: str,
    span: int,
    blocks: ScaledMatmulBlocks,
) -> None:
    (num_rows, width), out = x_ref.shape, data_ref.shape[0]
    o = pl.program_id(0) * blocks.block_out + jnp.arange(blocks.block_out, dtype=jnp.int32)
    t = pl.program_id(1) * blocks.block_rows + jnp.arange(blocks.block_rows, dtype=jnp.int32)
    some, rows = o < out, t < num_rows
    by_block = scale_ref.shape[1] > 1
    total_dtype = jnp.int32 if code == "int" else jnp.float32
    scale_of = lambda b: (
        load(scale_ref, o // span, b, mask=some, other=0).astype(jnp.float32)[:, None]
        * load(x_scale_ref, t, b, mask=rows, other=0)[None, :]
    )

    def step(b: Array, total: Array) -> Array:
        i = b * _STEP + jnp.arange(_STEP, dtype=jnp.int32)
        w = load(
            data_ref, o[:, None], i[None, :], mask=some[:, None] & (i < width)[None, :], other=0
        )
        x = load(x_ref, t[None, :], i[:, None], mask=rows[None, :] & (i < width)[:, None], other=0)
        if code == "int":
            # The zero point is 128: the same bits with the sign turned are the signed integer.
            w = w ^ jnp.uint8(0x80)
        dtype = jnp.int8 if code == "int" else jnp.float8_e4m3fn
        w, x = (lax.bitcast_convert_type(bits, dtype) for bits in (w, x))
        dims = (((1,), (0,)), ((), ()))
        sums = lax.dot_general(w, x, dims, preferred_element_type=total_dtype)
        return total + (sums * scale_of(b) if by_block else sums)

    total = jnp.zeros(
        (blocks.block_out, blocks.block_rows), jnp.float32 if by_block else total_dtype
    )
    total = lax.fori_loop(0, -(-width // _STEP), step, total)
    y = total if by_block else total.astype(jnp.float32) * scale_of(0)
    store(y_ref, t[None, :], o[:, None], value=y, mask=some[:, None] & rows[None, :])


def scaled_matmul(
    x: Shaped[Array, "T I"],
    x_scale: Float[Array, "T S"],
    weight: QArray,
    *,
    blocks: ScaledMatmulBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "T O"]:
    """Return (x * x_scale) @ dequantize(weight).T in float32.

    Args:
        x: codes of the activations: int8 for integer weights, float8_e4m3fn for E4M3 ones.
        x_scale: a scale a row, [T, 1], or with a weight of 128 x 128 blocks one for each 128
            inputs, [T, ceil(I / 128)].
        weight: planar, 8 bits: symmetric integers with a scale a channel, or E4M3 with a scale a
            tensor, channel, or block of 128 x 128.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: the arrays do not belong together.
        NotImplementedError: a weight of another format.
    """
    format = weight.format
    where = f"scaled_matmul in Triton: {describe(format)} of shape {weight.shape}"
    good = isinstance(format, PlanarFormat) and format.bits == 8 and format.group in (0, 128)
    if good and format.code == "int":  # type: ignore[union-attr]
        good = format.symmetric and not format.group  # type: ignore[union-attr]
    elif good:
        good = format.code == "e4m3"  # type: ignore[union-attr]
    if not good or weight.perm is not None or weight.scale.dtype.kind == "u":
        raise NotImplementedError(
            f"{where} has no such kernel; it takes 8-bit symmetric integers with a scale a channel,"
            " and E4M3 with a scale a tensor, channel or 128 x 128 block"
        )
    assert isinstance(format, PlanarFormat)
    dtype = "int8" if format.code == "int" else "float8_e4m3fn"
    (num_rows, width), out = x.shape, weight.shape[0]
    wanted = (num_rows, weight.scale.shape[1])
    if width != weight.shape[1] or str(x.dtype) != dtype or x_scale.shape != wanted:
        raise ValueError(
            f"{where} with x {x.dtype} {list(x.shape)} and x_scale {list(x_scale.shape)}; pass"
            f" {dtype} [T, {weight.shape[1]}] and [T, {wanted[1]}]"
        )
    blocks = blocks or ScaledMatmulBlocks.for_shape(num_rows)
    return triton_call(
        functools.partial(_kernel, code=format.code, span=format.rows or out, blocks=blocks),
        lax.bitcast_convert_type(x, jnp.uint8),
        x_scale.astype(jnp.float32),
        weight.data,
        weight.scale,
        name="scaled_matmul",
        grid=(-(-out // blocks.block_out), -(-num_rows // blocks.block_rows)),
        out_shape=jax.ShapeDtypeStruct((num_rows, out), jnp.float32),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
    )


def scaled_matmul_reference(x: Array, x_scale: Array, weight: QArray) -> Any:
    """Compute the same by its definition, in float32."""
    spread = (
        jnp.repeat(x_scale, _STEP, axis=1)[:, : x.shape[1]] if x_scale.shape[1] > 1 else x_scale
    )
    plain = dataclasses.replace(weight, act_scale=None)
    return jnp.einsum(
        "ti,oi->to",
        x.astype(jnp.float32) * spread,
        dequantize(plain),
        precision=lax.Precision.HIGHEST,
    )
