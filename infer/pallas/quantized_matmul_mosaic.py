"""Products of many tokens with a packed weight on Hopper: decoded in registers, multiplied by
wgmma.  Pallas Mosaic GPU.

    y[t, o] = sum over groups g of 128 inputs of  scale[o, g] sum_(i in g) code[o, i] x[t, i]

and the same with one group, the whole row.  Codes less their zero point are small integers that
16-bit floats hold exactly, so the tensor cores multiply those; the sums of each 128 inputs are
scaled, and added to the others, in float32.

A byte of 4-bit codes holds an even and an odd input.  Rather than to sort the codes, the tokens are
cut into their even and odd inputs once, and each half of the byte is multiplied with its own: the
high ones as 16 times the code, without a shift.  8-bit codes are multiplied as they lie.  The grid
and the pipeline stand in `hopper_matmul`.
Bytes: the packed weight once for each group of token tiles, x once for each wave of blocks, y once.
FLOPs: 2 T O I.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from infer.pallas.hopper_matmul import (
    NUM_CONSUMERS,
    OUT_MULTIPLE,
    PRODUCER,
    STEP,
    Consumer,
    HopperMatmulBlocks,
    Limits,
    Tiles,
    by_row,
    consume,
    corner_of_block,
    produce,
    store,
    stored_tile,
)
from infer.pallas.mosaic_call import (
    TILE_ROWS,
    WARPGROUP,
    WARPGROUP_ROWS,
    across,
    full,
    mosaic_call,
    tile,
)
from infer.quant.formats import PlanarFormat
from infer.quant.qarray import QArray, dequantize

# By bits of a code.
LIMITS = {
    bits: Limits(tokens=128, row_bytes=STEP * bits // 8, token_bytes=STEP * 2) for bits in (4, 8)
}


@dataclasses.dataclass(frozen=True)
class _Shared:
    """References to shared memory and barriers of one block of the grid."""

    w: Any  # int8 [num_stages x row parts, 64, bytes of a step]
    x: Any  # [num_stages x token parts x planes, tokens, 128 / planes]
    scale: Any  # f32 [num_stages x row parts, 64]; without groups [2, 64]
    y: Any  # see `stored_tile`
    loaded: Any
    free: Any
    scales_loaded: Any  # a barrier a consumer; None with groups


def _shared_memory(blocks: HopperMatmulBlocks, bits: int, dtype: Any, by_group: bool) -> list[Any]:
    """Return the scratch that `_Shared` names, in its order."""
    slots, planes = blocks.num_stages, 8 // bits
    rows = slots * blocks.row_parts
    copies = blocks.row_parts * (2 if by_group else 1) + blocks.token_parts * planes
    return [
        tile((rows, WARPGROUP_ROWS, STEP * bits // 8), jnp.int8),
        tile((slots * blocks.token_parts * planes, blocks.tokens, STEP // planes), dtype),
        plgpu.SMEM((rows if by_group else NUM_CONSUMERS, WARPGROUP_ROWS), jnp.float32),
        stored_tile(blocks),
        plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=slots),
        None if by_group else plgpu.Barrier(num_barriers=NUM_CONSUMERS),
    ]


def _kernel(
    *refs: Any, blocks: HopperMatmulBlocks, bits: int, by_group: bool, interpret: bool
) -> None:
    # inputs: int8 [O, bytes], [planes, T, I / planes], f32 [Q, O] or without groups [O]
    w_ref, x_ref, scale_ref, *rest = refs
    # outputs: f32 [T, O]
    y_ref, *scratch = rest
    shared = _Shared(*scratch)
    planes, step_bytes = 8 // bits, STEP * bits // 8
    num_steps = w_ref.shape[1] // step_bytes
    block = corner_of_block(blocks)

    def producer() -> None:
        def fetch(i: Array, slot: Array) -> None:
            loaded = shared.loaded.at[slot]
            for part in range(blocks.row_parts):
                rows = pl.ds(block.out + part * WARPGROUP_ROWS, WARPGROUP_ROWS)
                at = slot * blocks.row_parts + part
                columns = pl.ds(i * step_bytes, step_bytes)
                plgpu.copy_gmem_to_smem(w_ref.at[rows, columns], shared.w.at[at], loaded)
                if by_group:
                    plgpu.copy_gmem_to_smem(scale_ref.at[i, rows], shared.scale.at[at], loaded)
            columns = pl.ds(i * (STEP // planes), STEP // planes)
            for part in range(blocks.token_parts):
                rows = pl.ds(block.token + part * blocks.tokens, blocks.tokens)
                for plane in range(planes):
                    target = shared.x.at[(slot * blocks.token_parts + part) * planes + plane]
                    plgpu.copy_gmem_to_smem(x_ref.at[plane, rows, columns], target, loaded)

        produce(num_steps, blocks.num_stages, shared.free, fetch)

    def consumer() -> None:
        part = Consumer.of(block, blocks)
        shape = (WARPGROUP_ROWS, blocks.tokens)
        if not by_group:
            rows = pl.ds(part.corner.out, WARPGROUP_ROWS)
            scale = shared.scale.at[part.me]
            plgpu.copy_gmem_to_smem(scale_ref.at[rows], scale, shared.scales_loaded.at[part.me])

        def step(i: Array, slot: Array, total: Array) -> Array:
            at = slot * blocks.row_parts + part.row_part
            numbers = _decode(shared.w[at], bits, x_ref.dtype)
            first = (slot * blocks.token_parts + part.token_part) * planes
            xs = [shared.x.at[first + plane] for plane in range(planes)]
            sums = _product(numbers, xs, shape, interpret=interpret)
            if by_group:
                sums = sums * across(by_row(shared.scale.at[at]), shape)
            # What was read without wgmma is ordered before the TMA that overwrites it.
            plgpu.commit_smem()
            return total + sums

        zero = full(shape, 0.0)
        total = consume(num_steps, blocks.num_stages, shared.loaded, shared.free, step, zero)
        if not by_group:
            plgpu.barrier_wait(shared.scales_loaded.at[part.me])
            total = total * across(by_row(shared.scale.at[part.me]), shape)
        some = lambda start, size: total[:, start : start + size]
        store(y_ref, shared.y, part, blocks, some, interpret=interpret)

    # One branch: what only one side needs is not held in registers through the other.
    lax.cond(lax.axis_index(WARPGROUP) == PRODUCER, producer, consumer)


def _decode(packed: Array, bits: int, dtype: Any) -> list[Array]:
    """Return the codes less their zero point of int8 [64, bytes], [64, bytes] for each plane."""
    if bits == 8:
        # The zero point is 128: the same bits with the sign turned are the signed integer.
        return [(packed ^ jnp.int8(-128)).astype(dtype)]
    low = (packed & jnp.int8(15)).astype(dtype) - jnp.asarray(8, dtype)
    high = (packed ^ jnp.int8(-128)) & jnp.int8(-16)
    return [low, high.astype(dtype) * jnp.asarray(1 / 16, dtype)]


def _product(
    numbers: list[Array], xs: list[Any], shape: tuple[int, int], *, interpret: bool
) -> Array:
    """Return the sum of products of numbers [64, k] in registers with x [n, k] turned over."""
    if interpret:
        # The interpreter's wgmma takes no operand in registers.
        wide = lambda x: x.astype(jnp.float32)
        dot = functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)
        return sum(dot(wide(w), wide(x[...]).T) for w, x in zip(numbers, xs, strict=True))  # type: ignore[return-value]

    def product(acc_ref: Any) -> Array:
        for w, x in zip(numbers, xs, strict=True):
            plgpu.wgmma(acc_ref, w, x.transpose((1, 0)))
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def quantized_matmul_mosaic(
    x: Float[Array, "T I"],
    weight: QArray,
    *,
    blocks: HopperMatmulBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "T O"]:
    """Return x @ dequantize(weight).T in float32.

    Args:
        x: activations, bfloat16 or float16, any number of rows; I a multiple of 128.
        weight: planar symmetric integers of 4 or 8 bits with float scales, one for each 128 inputs,
            a channel or the tensor; O a multiple of 32.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: x and the weight do not fit.
        NotImplementedError: a format, dtype or size that this form does not serve.
    """
    format = weight.format
    where = f"quantized_matmul in Mosaic: {format.name} of shape {tuple(weight.shape)}"
    _check(where, x, weight)
    assert isinstance(format, PlanarFormat)
    (num_rows, width), out, bits = x.shape, weight.shape[0], format.bits
    by_group, planes = format.group == STEP, 8 // bits
    limits = LIMITS[bits]
    blocks = blocks or HopperMatmulBlocks.for_shape(num_rows, out, limits)
    blocks.check(where, limits)
    if not num_rows:  # a grid has no empty axis
        return jnp.zeros((0, out), jnp.float32)
    # TMA of tiled memory takes whole tiles of rows; most numbers of tokens need no copy.
    pad = -num_rows % TILE_ROWS
    x = jnp.pad(x, ((0, pad), (0, 0))) if pad else x
    x_PTX = x.reshape(num_rows + pad, width // planes, planes).transpose(2, 0, 1)
    scale = weight.scale.astype(jnp.float32)
    scale = scale.T if by_group else jnp.broadcast_to(scale[:, 0], (out,))
    (y,) = mosaic_call(
        functools.partial(
            _kernel, blocks=blocks, bits=bits, by_group=by_group, interpret=interpret
        ),
        lax.bitcast_convert_type(weight.data, jnp.int8),
        x_PTX,
        scale,
        name="quantized_matmul_mosaic",
        grid=Tiles.of(num_rows, out, blocks).grid,
        out_shape=[jax.ShapeDtypeStruct((num_rows + pad, out), jnp.float32)],
        scratch=_shared_memory(blocks, bits, x.dtype, by_group),
        num_warpgroups=NUM_CONSUMERS + 1,
        interpret=interpret,
    )
    return y[:num_rows]


def _check(where: str, x: Array, weight: QArray) -> None:
    """Raise for arrays that do not fit, and for those that this form does not serve."""
    shape = tuple(weight.shape)
    if len(shape) != 2 or x.ndim != 2 or x.shape[1] != shape[1]:
        raise ValueError(f"{where} with x {list(x.shape)}; x must be [T, I], the weight (O, I)")
    if not _served(weight):
        raise NotImplementedError(
            f"{where} has no such kernel; it takes symmetric integers of 4 and 8 bits with float"
            f" scales, one for each {STEP} inputs, a channel or the tensor, without an order of"
            " columns and without rounding of activations"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"{where} with x of {x.dtype}; it takes bfloat16 and float16")
    if shape[1] % STEP or shape[0] % OUT_MULTIPLE:
        raise NotImplementedError(
            f"{where}: it takes a multiple of {OUT_MULTIPLE} outputs and of {STEP} inputs; use"
            " 'triton'"
        )


def _served(weight: QArray) -> bool:
    """Return whether the weight's format has such a kernel."""
    format = weight.format
    if not isinstance(format, PlanarFormat) or weight.perm is not None or format.activations:
        return False
    if format.bits not in (4, 8) or format.code != "int" or not format.symmetric:
        return False
    floats = format.scale_dtype in ("float32", "float16", "bfloat16")
    return floats and (format.group, format.rows) in ((0, 0), (0, 1), (STEP, 1))


def quantized_matmul_mosaic_reference(x: Array, weight: QArray) -> Array:
    """Compute the same by its definition, in float32."""
    return jnp.einsum(
        "ti,oi->to", x.astype(jnp.float32), dequantize(weight), precision=lax.Precision.HIGHEST
    )
