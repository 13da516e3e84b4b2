"""Low-rank adapters, one of many for each row, added to a product.  Pallas-Triton.

    h[t] = x[t] @ a[id].T                       (rounded to x's dtype)
    y[t] = y[t] + scale[id] h[t] @ b[id].T      id the row's adapter; -1 adds nothing

Two kernels, for few rows (decoding), each of which reads the adapter of its row where it lies: no
adapter is copied, and rows of one adapter find it in the L2 cache.

Shrink: grid (T, splits).  A program owns a part of one row's columns; sums [splits, T, r].
Expand: grid (T, O / block_out).  A program adds the splits of one row, in order, and owns
`block_out` of its outputs.

A row's program sees no other row, and sizes depend on rank and widths alone: the bits of a row do
not depend on the batch.  Products are exact in float32, as are all sums.

Bytes: (I + O) r elements for each adapter in use, x and y once in, y once out, and 8 splits T r of
sums.  FLOPs: 2 T r (I + O).

Source: Hu et al. 2021, arXiv 2106.09685; batches of rows with an adapter each: Chen et al. 2023,
arXiv 2310.18547 (Punica).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from infer.pallas.triton_call import check_launch, load, power_of_two, store, triton_call

MOST_RANK = 64
# Values of an adapter that a program holds: 32 for each thread of four warps.
_TILE = 4096
_MOST_SPLITS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraBlocks:
    """Columns of a and rows of b that a program takes at a time, splits of the columns, warps."""

    block_in: int = 256
    block_out: int = 256
    splits: int = 16
    num_warps: int = 4

    def __post_init__(self) -> None:
        """Check what Triton asks for."""
        for name in ("block_in", "block_out"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} is {size}; use a power of two, 16 or more")
        if self.splits < 1:
            raise ValueError(f"splits is {self.splits}; use 1 or more")
        check_launch(self.num_warps)

    @classmethod
    def for_shape(cls, rank: int, width: int) -> "LoraBlocks":
        """Return the sizes for adapters of `rank` on inputs of `width`: tiles of 4,096 values, and
        a split for each tile up to 16.
        """
        size = _TILE // power_of_two(rank, 8)
        return cls(block_in=size, block_out=size, splits=min(_MOST_SPLITS, -(-width // size)))


def _shrink(
    # inputs
    x_ref,  # [T, I]
    a_ref,  # [N, r, I]
    id_ref,  # [T]
    # outputs
    sums_ref,  # [S, T, r]
    *,
    blocks: LoraBlocks,
) -> None:
    num_adapters, rank, width = a_ref.shape
    t, split = pl.program_id(0), pl.program_id(1)
    r = jnp.arange(power_of_two(rank), dtype=jnp.int32)
    adapter, there = _adapter(id_ref, t, num_adapters)
    num_tiles = -(-width // blocks.block_in)
    share = -(-num_tiles // blocks.splits)
    first = split * share

    def step(n: Array, total: Array) -> Array:
        i = n * blocks.block_in + jnp.arange(blocks.block_in, dtype=jnp.int32)
        inside = (i < width) & there
        x = load(x_ref, t, i, mask=inside, other=0.0)
        mask = (r < rank)[:, None] & inside[None, :]
        a = load(a_ref, adapter, r[:, None], i[None, :], mask=mask, other=0.0).astype(x.dtype)
        return total + a.astype(jnp.float32) * x.astype(jnp.float32)[None, :]

    total = jnp.zeros((r.shape[0], blocks.block_in), jnp.float32)
    last = jnp.where(there, jnp.minimum(first + share, num_tiles), first)
    total = lax.fori_loop(first, last, step, total)
    store(sums_ref, split, t, r, value=jnp.sum(total, axis=1), mask=r < rank)


def _expand(
    # inputs
    y_ref,  # [T, O]
    sums_ref,  # [S, T, r]
    b_ref,  # [N, O, r]
    scale_ref,  # [N]
    id_ref,  # [T]
    # outputs
    out_ref,  # [T, O]
    *,
    block_out: int,
    dtype: Any,
) -> None:
    num_adapters, out, rank = b_ref.shape
    t = pl.program_id(0)
    o = pl.program_id(1) * block_out + jnp.arange(block_out, dtype=jnp.int32)
    r = jnp.arange(power_of_two(rank), dtype=jnp.int32)
    adapter, there = _adapter(id_ref, t, num_adapters)

    def add(split: Array, total: Array) -> Array:
        return total + load(sums_ref, split, t, r, mask=(r < rank) & there, other=0.0)

    h = lax.fori_loop(0, sums_ref.shape[0], add, jnp.zeros(r.shape, jnp.float32)).astype(dtype)
    mask = (o < out)[:, None] & (r < rank)[None, :] & there
    b = load(b_ref, adapter, o[:, None], r[None, :], mask=mask, other=0.0).astype(dtype)
    delta = jnp.sum(b.astype(jnp.float32) * h.astype(jnp.float32)[None, :], axis=1)
    delta = delta * load(scale_ref, adapter)
    y = load(y_ref, t, o, mask=o < out, other=0.0).astype(jnp.float32)
    # What is neither an adapter nor none is seen.
    lost = (load(id_ref, t) != -1) & ~there
    value = jnp.where(there, y + delta, jnp.where(lost, jnp.float32(jnp.nan), y))
    store(out_ref, t, o, value=value.astype(out_ref.dtype), mask=o < out)


def _adapter(id_ref: Any, t: Array, num_adapters: int) -> tuple[Array, Array]:
    """Return a row's adapter (the first where there is none), and whether there is one."""
    number = load(id_ref, t)
    there = (number >= 0) & (number < num_adapters)
    return jnp.where(there, number, 0), there


def lora(
    y: Float[Array, "T O"],
    x: Float[Array, "T I"],
    a: Float[Array, "N r I"],
    b: Float[Array, "N O r"],
    scale: Float[Array, " N"],
    ids: Int[Array, " T"],
    *,
    blocks: LoraBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "T O"]:
    """Return y with each row's adapter of x added, in y's dtype.

    Args:
        y: what is added to.
        x: what the adapters read.
        a: the adapters' first matrices, taken in x's dtype.
        b: the second ones, taken in x's dtype.
        scale: what each adapter is multiplied with.
        ids: each row's adapter, 0 to N - 1; -1 is none, and any other id makes the row NaN.
        blocks: the kernels' sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: the arrays do not fit.
        NotImplementedError: a rank or dtype that has no kernel.
    """
    (num_rows, width), out = x.shape, y.shape[1]
    num_adapters, rank = a.shape[0], a.shape[1]
    if (
        y.shape[0] != num_rows
        or ids.shape != (num_rows,)
        or a.shape != (num_adapters, rank, width)
        or b.shape != (num_adapters, out, rank)
        or scale.shape != (num_adapters,)
    ):
        raise ValueError(
            f"y is {y.shape}, x {x.shape}, a {a.shape}, b {b.shape}, scale {scale.shape}, ids"
            f" {ids.shape}; they must be [T, O], [T, I], [N, r, I], [N, O, r], [N] and [T]"
        )
    floats = {str(array.dtype) for array in (y, x, a, b)}
    if rank > MOST_RANK or not floats <= {"bfloat16", "float16", "float32"}:
        raise NotImplementedError(
            f"lora in Triton: rank {rank}, x of shape {x.shape}, dtypes {', '.join(sorted(floats))}"
            f"; it takes ranks to {MOST_RANK} and floats of 16 and 32 bits"
        )
    blocks = blocks or LoraBlocks.for_shape(rank, width)
    num_tiles = -(-width // blocks.block_in)
    # So that the last split is not empty.
    splits = -(-num_tiles // -(-num_tiles // min(blocks.splits, num_tiles)))
    blocks = dataclasses.replace(blocks, splits=splits)
    ids = ids.astype(jnp.int32)
    sums = triton_call(
        functools.partial(_shrink, blocks=blocks),
        x,
        a,
        ids,
        name="lora_shrink",
        grid=(num_rows, splits),
        out_shape=jax.ShapeDtypeStruct((splits, num_rows, rank), jnp.float32),
        num_warps=blocks.num_warps,
        interpret=interpret,
    )
    return triton_call(
        functools.partial(_expand, block_out=blocks.block_out, dtype=x.dtype),
        y,
        sums,
        b,
        scale.astype(jnp.float32),
        ids,
        name="lora_expand",
        grid=(num_rows, -(-out // blocks.block_out)),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        num_warps=blocks.num_warps,
        interpret=interpret,
    )


def lora_reference(y: Array, x: Array, a: Array, b: Array, scale: Array, ids: Array) -> Array:
    """Compute the same a row at a time, in float32 throughout."""
    rows = []
    for t in range(x.shape[0]):
        one = lambda stack, t=t: stack.at[ids[t]].get(mode="fill", fill_value=jnp.nan)
        wide = x[t].astype(jnp.float32)
        inner = jnp.einsum(
            "i,ri->r", wide, one(a).astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
        delta = jnp.einsum(
            "r,or->o", inner, one(b).astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
        rows.append(jnp.where(ids[t] == -1, 0.0, one(scale) * delta))
    return (y.astype(jnp.float32) + jnp.stack(rows)).astype(y.dtype)
