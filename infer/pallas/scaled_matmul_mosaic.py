"""Products of 8-bit activations with 8-bit weights on Hopper: TMA and wgmma.  Pallas Mosaic GPU.

    y[t, o] = sx[t] sw[o] sum_i qx[t, i] qw[o, i]                       one scale a row
    y[t, o] = sum over blocks b of 128 inputs of                        block scales
              sx[t, b] sw[o // 128, b] sum_(i in b) qx[t, i] qw[o, i]

Integers are summed exactly in int32.  The tensor cores add E4M3 products with about 14 bits, so the
sum of each 128 inputs is added to the others in float32, outside of them, whatever the scales
(DeepSeek-V3, section 3.3, arXiv 2412.19437).

Integer weights pass through registers, where the sign bit is turned (they are stored with 128
added); E4M3 ones stay in shared memory.  The grid and the pipeline stand in `hopper_matmul`.
Bytes: the weight once for each group of token tiles, x once for each wave of blocks, y once.
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
from jaxtyping import Float, Shaped

from infer.pallas.hopper_matmul import (
    NUM_CONSUMERS,
    OUT_MULTIPLE,
    PRODUCER,
    STEP,
    Consumer,
    HopperMatmulBlocks,
    Limits,
    Tiles,
    by_column,
    by_row,
    consume,
    corner_of_block,
    down,
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
    rows_times_columns,
    tile,
)
from infer.quant.formats import PlanarFormat
from infer.quant.qarray import QArray, dequantize

# Of integers a consumer holds one set of sums, of E4M3 two.
LIMITS = {
    "int": Limits(tokens=256, row_bytes=STEP, token_bytes=STEP),
    "e4m3": Limits(tokens=128, row_bytes=STEP, token_bytes=STEP),
}


@dataclasses.dataclass(frozen=True)
class _Shared:
    """References to shared memory and barriers of one block of the grid."""

    w: Any  # [num_stages x row parts, 64, 128]
    x: Any  # [num_stages x token parts, tokens, 128]
    x_scale: Any  # f32 [num_stages x token parts, tokens]; without block scales [2, tokens]
    w_scale: Any  # f32 [2, 64]; None with block scales
    y: Any  # see `stored_tile`
    loaded: Any
    free: Any
    scales_loaded: Any  # a barrier a consumer; None with block scales


def _shared_memory(blocks: HopperMatmulBlocks, dtype: Any, by_block: bool) -> list[Any]:
    """Return the scratch that `_Shared` names, in its order."""
    slots, tokens = blocks.num_stages, blocks.tokens
    x_slots = slots * blocks.token_parts
    copies = blocks.row_parts + blocks.token_parts * (2 if by_block else 1)
    return [
        tile((slots * blocks.row_parts, WARPGROUP_ROWS, STEP), dtype),
        tile((x_slots, tokens, STEP), dtype),
        plgpu.SMEM((x_slots if by_block else NUM_CONSUMERS, tokens), jnp.float32),
        None if by_block else plgpu.SMEM((NUM_CONSUMERS, WARPGROUP_ROWS), jnp.float32),
        stored_tile(blocks),
        plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=slots),
        None if by_block else plgpu.Barrier(num_arrivals=2, num_barriers=NUM_CONSUMERS),
    ]


def _kernel(*refs: Any, blocks: HopperMatmulBlocks, by_block: bool, interpret: bool) -> None:
    # inputs: [O, I], [T, I], f32 [O] or with block scales [R, Q], f32 [T] or [Q, T]
    w_ref, x_ref, w_scale_ref, x_scale_ref, *rest = refs
    # outputs: f32 [T, O]
    y_ref, *scratch = rest
    shared = _Shared(*scratch)
    integers = w_ref.dtype == jnp.int8
    num_steps = w_ref.shape[1] // STEP
    block = corner_of_block(blocks)

    def producer() -> None:
        def fetch(i: Array, slot: Array) -> None:
            loaded, columns = shared.loaded.at[slot], pl.ds(i * STEP, STEP)
            for part in range(blocks.row_parts):
                rows = pl.ds(block.out + part * WARPGROUP_ROWS, WARPGROUP_ROWS)
                target = shared.w.at[slot * blocks.row_parts + part]
                plgpu.copy_gmem_to_smem(w_ref.at[rows, columns], target, loaded)
            for part in range(blocks.token_parts):
                rows = pl.ds(block.token + part * blocks.tokens, blocks.tokens)
                at = slot * blocks.token_parts + part
                plgpu.copy_gmem_to_smem(x_ref.at[rows, columns], shared.x.at[at], loaded)
                if by_block:
                    plgpu.copy_gmem_to_smem(x_scale_ref.at[i, rows], shared.x_scale.at[at], loaded)

        produce(num_steps, blocks.num_stages, shared.free, fetch)

    def consumer() -> None:
        part = Consumer.of(block, blocks)
        shape = (WARPGROUP_ROWS, blocks.tokens)
        if not by_block:
            arrived = shared.scales_loaded.at[part.me]
            rows = pl.ds(part.corner.out, WARPGROUP_ROWS)
            plgpu.copy_gmem_to_smem(w_scale_ref.at[rows], shared.w_scale.at[part.me], arrived)
            rows = pl.ds(part.corner.token, blocks.tokens)
            plgpu.copy_gmem_to_smem(x_scale_ref.at[rows], shared.x_scale.at[part.me], arrived)

        def step(i: Array, slot: Array, total: Array) -> Array:
            # One traced index: a constant one among several is lost in `pl.run_state`.
            w = shared.w.at[slot * blocks.row_parts + part.row_part]
            at = slot * blocks.token_parts + part.token_part
            x = shared.x.at[at]
            if integers:
                total = _add_integers(total, w, x, interpret=interpret)
            else:
                sums = rows_times_columns(w, x, interpret=interpret)
                if by_block:
                    w_scale = w_scale_ref[lax.div(part.corner.out, jnp.int32(STEP)), i]
                    sums = sums * down(by_column(shared.x_scale.at[at]) * w_scale, shape)
                total = total + sums
            if by_block or integers:
                # What was read without wgmma is ordered before the TMA that overwrites it.
                plgpu.commit_smem()
            return total

        if integers:
            zero = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), plgpu.Layout.WGMMA)
        else:
            zero = full(shape, 0.0)
        total = consume(num_steps, blocks.num_stages, shared.loaded, shared.free, step, zero)
        if by_block:
            scaled = lambda start, size: total[:, start : start + size]
        else:
            plgpu.barrier_wait(shared.scales_loaded.at[part.me])
            w_scale = by_row(shared.w_scale.at[part.me])

            def scaled(start: int, size: int) -> Array:
                some = total[:, start : start + size].astype(jnp.float32)
                x_scale = by_column(shared.x_scale.at[part.me, pl.ds(start, size)])
                return some * (across(w_scale, some.shape) * down(x_scale, some.shape))

        store(y_ref, shared.y, part, blocks, scaled, interpret=interpret)

    # One branch: what only one side needs is not held in registers through the other.
    lax.cond(lax.axis_index(WARPGROUP) == PRODUCER, producer, consumer)


def _add_integers(total: Array, w_ref: Any, x_ref: Any, *, interpret: bool) -> Array:
    """Return total [64, n] + (w [64, 128] - 128) times the transpose of x [n, 128], in int32."""
    # The zero point is 128: the same bits with the sign turned are the signed integer.
    w = w_ref[...] ^ jnp.int8(-128)
    if interpret:
        # The interpreter has no run_state.
        return total + jnp.dot(w.astype(jnp.int32), x_ref[...].astype(jnp.int32).T)

    def product(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, w, x_ref.transpose((1, 0)))

    # Typed as what it is given, the reference; it returns the array.
    run: Any = pl.run_state(product)
    return run(plgpu.WGMMAAccumulatorRef.init(total))


def scaled_matmul_mosaic(
    x: Shaped[Array, "T I"],
    x_scale: Float[Array, "T S"],
    weight: QArray,
    *,
    blocks: HopperMatmulBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "T O"]:
    """Return (x * x_scale) @ dequantize(weight).T in float32.

    The activations are rounded before: this form fuses no quantisation, like the Triton one.

    Args:
        x: codes of the activations: int8 for integer weights, float8_e4m3fn for E4M3 ones.  Any
            number of rows; I a multiple of 128.
        x_scale: a scale a row, [T, 1], or with a weight of 128 x 128 blocks one for each 128
            inputs, [T, I / 128].
        weight: planar, 8 bits: symmetric integers with a scale a channel or tensor, or E4M3 with a
            scale a tensor, channel, or block of 128 x 128.  O a multiple of 32.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: the arrays do not belong together.
        NotImplementedError: a weight of another format, or sizes that this form does not serve.
    """
    format = weight.format
    where = f"scaled_matmul in Mosaic: {format.name} of shape {tuple(weight.shape)}"
    _check(where, x, x_scale, weight)
    assert isinstance(format, PlanarFormat)
    (num_rows, _), out, by_block = x.shape, weight.shape[0], format.group == STEP
    limits = LIMITS[format.code]
    blocks = blocks or HopperMatmulBlocks.for_shape(num_rows, out, limits)
    blocks.check(where, limits)
    if not num_rows:  # a grid has no empty axis
        return jnp.zeros((0, out), jnp.float32)
    # TMA of tiled memory takes whole tiles of rows; most numbers of tokens need no copy.
    pad = -num_rows % TILE_ROWS
    if pad:
        x, x_scale = (jnp.pad(array, ((0, pad), (0, 0))) for array in (x, x_scale))
    scale, x_scale = weight.scale.astype(jnp.float32), x_scale.astype(jnp.float32).T
    if not by_block:
        scale, x_scale = jnp.broadcast_to(scale[:, 0], (out,)), x_scale[0]
    (y,) = mosaic_call(
        functools.partial(_kernel, blocks=blocks, by_block=by_block, interpret=interpret),
        lax.bitcast_convert_type(weight.data, x.dtype),
        x,
        scale,
        x_scale,
        name="scaled_matmul_mosaic",
        grid=Tiles.of(num_rows, out, blocks).grid,
        out_shape=[jax.ShapeDtypeStruct((num_rows + pad, out), jnp.float32)],
        scratch=_shared_memory(blocks, x.dtype, by_block),
        num_warpgroups=NUM_CONSUMERS + 1,
        interpret=interpret,
    )
    return y[:num_rows]


def _check(where: str, x: Array, x_scale: Array, weight: QArray) -> None:
    """Raise for arrays that do not belong together, and for those that this form does not serve."""
    format, shape = weight.format, tuple(weight.shape)
    if not _served(weight):
        raise NotImplementedError(
            f"{where} has no such kernel; it takes 8-bit symmetric integers with a scale a channel"
            " or tensor, and E4M3 with a scale a tensor, channel or 128 x 128 block"
        )
    assert isinstance(format, PlanarFormat)
    if shape[1] % STEP or shape[0] % OUT_MULTIPLE:
        raise NotImplementedError(
            f"{where}: it takes a multiple of {OUT_MULTIPLE} outputs and of {STEP} inputs; use"
            " 'triton'"
        )
    dtype = "int8" if format.code == "int" else "float8_e4m3fn"
    scales = (x.shape[0], weight.scale.shape[1])
    if x.shape[1] != shape[1] or str(x.dtype) != dtype or x_scale.shape != scales:
        raise ValueError(
            f"{where} with x {x.dtype} {list(x.shape)} and x_scale {list(x_scale.shape)}; pass"
            f" {dtype} [T, {shape[1]}] and [T, {scales[1]}]"
        )


def _served(weight: QArray) -> bool:
    """Return whether the weight's format has such a kernel."""
    format = weight.format
    if not isinstance(format, PlanarFormat) or format.bits != 8 or weight.perm is not None:
        return False
    if weight.scale.dtype.kind == "u":
        return False
    by_row = format.group == 0 and format.rows in (0, 1)
    if format.code == "int":
        return by_row and format.symmetric
    return format.code == "e4m3" and (by_row or (format.group, format.rows) == (STEP, STEP))


def scaled_matmul_mosaic_reference(x: Array, x_scale: Array, weight: QArray) -> Array:
    """Compute the same by its definition: integers exactly, E4M3 in float32."""
    if x.dtype == jnp.int8:
        one = dataclasses.replace(weight, scale=jnp.ones_like(weight.scale), act_scale=None)
        codes = dequantize(one).astype(jnp.int8)
        sums = jnp.einsum("ti,oi->to", x, codes, preferred_element_type=jnp.int32)
        scale = weight.scale.astype(jnp.float32)[:, 0][None, :]
        return sums.astype(jnp.float32) * (x_scale * scale)
    parts = x.reshape(x.shape[0], x_scale.shape[1], -1).astype(jnp.float32)
    wide = (parts * x_scale[:, :, None]).reshape(x.shape)
    weights = dequantize(dataclasses.replace(weight, act_scale=None))
    return jnp.einsum("ti,oi->to", wide, weights, precision=lax.Precision.HIGHEST)
