"""Products with a packed weight, decoded in registers.  Pallas-Triton.

    y = x @ dequantize(w).T

for few rows of x (decoding) and, with larger tiles, many.  `infer.pallas.weight_parts` says how a
format's bytes become numbers.  Products are those of x's dtype, sums float32; scales multiply sums.

Grid (out / block_out, splits, rows / block_rows).  A program owns `block_out` rows of the weight, a
part of its columns, and `block_rows` rows of x.  The splits are summed afterwards, in order.  Their
number and the tiles depend on the weight's shape alone: up to 16 rows the bits of one do not depend
on how many there are.

Bytes: the packed weight once, x once for each `block_out` rows (from the L2 cache), y once, and
8 splits T O of partial sums.  FLOPs: 2 T O I.

Source: the decoding in registers as in Frantar et al. 2024, arXiv 2408.11743 (Marlin); splits of
the inner dimension: Hoque et al. 2024, arXiv 2402.00025.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float

from infer.pallas.triton_call import check_launch, load, store, triton_call
from infer.pallas.weight_parts import FORMATS, Parts, Tile, describe, plan
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
    def for_shape(cls, rows: int, out: int, num_steps: int) -> "QuantizedMatmulBlocks":
        """Return the sizes for `rows` of x, a weight of `out` rows and `num_steps` steps along its
        columns.

        Few rows: splits until there are 512 programs, of two steps at least.  Many rows:
        tiles of 64 x 32.
        """
        if rows > 16:
            return cls(block_rows=32, num_warps=8)
        tiles = -(-out // 64)
        return cls(num_warps=8, splits=max(1, min(_PROGRAMS // tiles, num_steps // 2, 16)))


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    parts: Parts,
    shape: tuple[int, int],
    num_steps: int,
    blocks: QuantizedMatmulBlocks,
) -> None:
    # inputs                                   outputs
    # [T, I], and the weight's parts by name   [S, T, O]
    *inputs, out_ref = refs
    x_ref, *weight_refs = inputs
    num_rows = x_ref.shape[0]
    out, width = shape
    o = pl.program_id(0) * blocks.block_out + jnp.arange(blocks.block_out, dtype=jnp.int32)
    split = pl.program_id(1)
    t = pl.program_id(2) * blocks.block_rows + jnp.arange(blocks.block_rows, dtype=jnp.int32)
    tile = Tile(dict(zip(names, weight_refs, strict=True)), o, shape)
    share = -(-num_steps // blocks.splits)
    first = split * share

    def step(i: Array, total: Array) -> Array:
        for part in parts(tile, i):
            inside = (t < num_rows)[None, :] & (part.columns < width)[:, None]
            x = load(x_ref, t[None, :], part.columns[:, None], mask=inside, other=0.0)
            # [block_out, block_rows]: the weights are the side that is read once.
            sums = triton.dot(part.codes.astype(x.dtype), x, allow_tf32=False)
            if part.scale is not None:
                sums = sums * part.scale[:, None]
            total = total + sums
            if part.minus is not None:
                xs = jnp.sum(x.astype(jnp.float32), axis=0)
                total = total - part.minus[:, None] * xs[None, :]
        return total

    last = jnp.minimum(first + share, num_steps)
    total = jnp.zeros((blocks.block_out, blocks.block_rows), jnp.float32)
    total = lax.fori_loop(first, last, step, total)
    inside = (o < out)[:, None] & (t < num_rows)[None, :]
    store(out_ref, split, t[None, :], o[:, None], value=total, mask=inside)


def quantized_matmul(
    x: Float[Array, "T I"],
    weight: QArray,
    *,
    blocks: QuantizedMatmulBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "T O"]:
    """Return x @ dequantize(weight).T in float32.

    Args:
        x: activations, bfloat16, float16 or float32.
        weight: packed [O, I], of a format that takes activations as they are.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: x and the weight do not fit.
        NotImplementedError: a format or dtype that has no kernel.
    """
    if len(weight.shape) != 2 or x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x is {x.shape}, weight {weight.shape}; x must be [T, I], weight (O, I)")
    where = f"quantized_matmul in Triton: {describe(weight.format)} of shape {weight.shape}"
    if str(x.dtype) not in ("bfloat16", "float16", "float32"):
        raise NotImplementedError(f"{where} with x of {x.dtype}; it takes floats of 16 and 32 bits")
    steps = plan(weight)
    if steps is None:
        raise NotImplementedError(
            f"{where} is not decoded there; it takes {', '.join(FORMATS)}, and planar formats of 4"
            " and 8 bits with a group that is a power of two from 32 (16 for NVFP4), without an"
            " order of columns and without rounding of activations"
        )
    (num_rows, _), out = x.shape, weight.shape[0]
    blocks = blocks or QuantizedMatmulBlocks.for_shape(num_rows, out, steps.num_steps)
    splits = min(blocks.splits, steps.num_steps)
    # So that the last split is not empty.
    splits = -(-steps.num_steps // -(-steps.num_steps // splits))
    blocks = dataclasses.replace(blocks, splits=splits)
    partial = triton_call(
        functools.partial(
            _kernel,
            names=tuple(steps.operands),
            parts=steps.parts,
            shape=weight.shape,
            num_steps=steps.num_steps,
            blocks=blocks,
        ),
        x,
        *steps.operands.values(),
        name="quantized_matmul",
        grid=(
            -(-out // blocks.block_out),
            blocks.splits,
            -(-num_rows // blocks.block_rows),
        ),
        out_shape=jax.ShapeDtypeStruct((blocks.splits, num_rows, out), jnp.float32),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
    )
    y = partial[0]
    for split in range(1, blocks.splits):  # in this order, whatever the shape
        y = y + partial[split]
    return y if steps.global_scale is None else y * steps.global_scale


def quantized_matmul_reference(x: Array, weight: QArray) -> Array:
    """Compute the same by its definition, in float32."""
    return jnp.einsum(
        "ti,oi->to", x.astype(jnp.float32), dequantize(weight), precision=lax.Precision.HIGHEST
    )
