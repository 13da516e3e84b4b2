"""Multi-head latent attention of few query tokens a row over a paged latent cache: Pallas-Triton.

    x_nj = scale (q_n · [c_j, r_j]),   o_n = sum_j softmax_j(x_n) c_j

c_j [R] is the compressed key and value that all heads share, r_j the key's rotated part, and q_n
the query with its projection absorbed: [W_uk^T q_nope, q_rope].  The value projection follows
outside.  Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; absorbed form as in FlashMLA.

A row of the cache is [c, r], R + r wide (512 + 64): two products of powers of two make a score,
and the tile c serves as values as it lies in registers, so a latent is read once.

Grid (tiles B, 1, splits).  A program owns `block_rows` of the T x N queries and `split_keys` keys;
splits are merged in order by `infer.pallas.paged_attention_merge`.  What bits depend on is said in
`infer.pallas.paged_attention`.

Bytes: S (R + r) a tile of a row, once from memory where a row's tiles run side by side, plus
2 T N (R + 2) floats a split: with 128 heads a split of 1024 keys costs half of its latents.
FLOPs: 2 T S N (2 R + r) a row.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from infer.pallas import paged_tile
from infer.pallas.argument_checks import (
    as_int32,
    check_blocks,
    check_dtypes,
    check_numbers,
    check_shapes,
)
from infer.pallas.paged_attention import CORES, in_float32, store_split
from infer.pallas.paged_attention_merge import merge_splits
from infer.pallas.paged_tile import TileSpec
from infer.pallas.triton_call import load, power_of_two, triton_call

# The widest latents whose tiles fit the shared memory of every chip: DeepSeek's.
MAX_RANK = 512
MAX_ROTATED = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaDecodeBlocks:
    """Sizes of a program's work, and how Triton compiles it."""

    block_rows: int = 16
    block_keys: int = 32
    split_keys: int = 1024
    num_warps: int = 4
    num_stages: int = 2
    merge_warps: int = 4

    def __post_init__(self) -> None:
        """Check what Triton and the kernel's loop ask for."""
        check_blocks(self, "block_keys", "block_rows")

    @classmethod
    def for_shape(
        cls,
        batch: int,
        context: int,
        *,
        num_heads: int,
        latent_dtype: Any = jnp.bfloat16,
        q_dtype: Any = jnp.bfloat16,
        chip: str = "h200-141gb",
        split: Literal["fixed", "tuned"] = "fixed",
    ) -> "MlaDecodeBlocks":
        """Return sizes for `batch` rows of at most `context` keys.

        `split="fixed"` depends on the model only.  `split="tuned"` asks for two programs a
        multiprocessor; a row's bits then depend on the batch's size and on `context`.
        """
        # Tiles of 64 rows would need 128 registers a thread for their sums alone.
        sizes = cls() if num_heads <= 16 else cls(block_rows=32, num_warps=8)
        if in_float32(latent_dtype, q_dtype):
            sizes = cls(block_keys=16, num_warps=8, num_stages=1)
        if split == "fixed":
            return sizes
        tiles = -(-num_heads // sizes.block_rows)
        programs = lambda keys: batch * tiles * -(-context // keys)
        fits = [
            keys for keys in (4096, 2048, 1024, 512) if programs(keys) >= 2 * CORES.get(chip, 100)
        ]
        return dataclasses.replace(sizes, split_keys=fits[0] if fits else 256)


def _split_kernel(
    *refs: Any, names: tuple[str, ...], spec: TileSpec, tiles: int, split_keys: int
) -> None:
    # inputs: q [B, T, N, R + r], latents [P, U, R + r], table [B, M], positions [B, T], and where
    #   used bounds [B, 2]
    # outputs: acc [B, 1, T * N, splits, R], m and l [B, 1, T * N, splits]
    ref = dict(zip(names, refs, strict=True))
    b, tile = (
        lax.div(pl.program_id(0), jnp.int32(tiles)),
        lax.rem(pl.program_id(0), jnp.int32(tiles)),
    )
    head, split = jnp.int32(0), pl.program_id(2)
    rank = ref["acc"].shape[4]
    rotated = ref["q"].shape[3] - rank
    rows = paged_tile.rows_of_tile(tile, head, ref["positions"].shape[1], spec)
    i = load(ref["positions"], b, rows.token, mask=rows.ok, other=jnp.int32(-1))
    start, end = paged_tile.key_range(
        i, b, ref, capacity=spec.capacity, window=spec.window, drafted=0
    )
    start, stop = jnp.maximum(start, split * split_keys), jnp.minimum(end, (split + 1) * split_keys)
    latents = ref["latents"]

    def columns(array: Any, where: tuple[Any, ...], ok: Array) -> tuple[Array, Array]:
        return (
            paged_tile.load_columns(array, where, ok, 0, rank),
            paged_tile.load_columns(array, where, ok, rank, rotated),
        )

    @pl.when(start < stop)
    def _() -> None:
        q = columns(ref["q"], (b, rows.token, rows.head), rows.ok)

        def block_at(j: Array) -> paged_tile.Block:
            page, slot, ok = paged_tile.find_pages(
                j, start, stop, b, ref["table"], *latents.shape[:2]
            )
            c, r = (x.astype(q[0].dtype) for x in columns(latents, (page, slot), ok))
            return paged_tile.Block((c, r), (c,), None, None, ok)

        result = paged_tile.attend(
            q,
            start,
            stop,
            block_at,
            lambda j: paged_tile.visible(i, j, rows, b, ref, spec),
            spec,
            (power_of_two(rank, 16),),
        )
        store_split(ref, (b, head, tile, split), rows, result, rank, spec)


def mla_decode(
    q: Float[Array, "B T N C"],
    latent_pages: Float[Array, "P U C"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    rank: int,
    scale: float,
    bounds: Int[Array, "B 2"] | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    blocks: MlaDecodeBlocks | None = None,
    interpret: bool = False,
) -> Any:
    """Return causal attention of T queries a row over that row's latents, [B, T, N, rank].

    Args:
        q: absorbed queries; C = rank + the rotated width.
        latent_pages: pool of [c, r]; the queries' own tokens are already written.
        page_table: pages of each row, P (or any number outside the pool) where there is none.
        positions: of each query; negative for padding (output 0).
        rank: width of c, 512 in DeepSeek-V2 and V3.
        scale: factor on q·[c, r]; that of the heads before absorption, 1 / sqrt(128 + 64) there.
        bounds: first key and one past the last key that a row may see, at most; None for all.
        return_lse: return (o, lse), see `paged_attention`.
        out_dtype: of o; q's by default.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: shapes that do not fit each other.
        NotImplementedError: a dtype or a width that the kernel does not serve.
    """
    scale, _, _ = check_numbers("mla_decode", scale)
    _check_arguments(q, latent_pages, page_table, positions, bounds, rank)
    page_table, positions = as_int32(page_table), as_int32(positions)
    bounds = None if bounds is None else as_int32(bounds)
    batch, num_tokens, num_heads, _ = q.shape
    blocks = blocks or MlaDecodeBlocks.for_shape(
        batch, 0, num_heads=num_heads, latent_dtype=latent_pages.dtype, q_dtype=q.dtype
    )
    flat, capacity = num_tokens * num_heads, page_table.shape[1] * latent_pages.shape[1]
    tiles, splits = -(-flat // blocks.block_rows), -(-capacity // blocks.split_keys)
    spec = TileSpec(
        rows=blocks.block_rows,
        block_keys=blocks.block_keys,
        group=num_heads,
        capacity=capacity,
        drafted=0,
        scale=scale,
        window=None,
        softcap=None,
    )
    inputs = {"q": q, "latents": latent_pages, "table": page_table, "positions": positions}
    inputs |= {} if bounds is None else {"bounds": bounds}
    shape = (batch, 1, flat, splits)
    acc, m, total = triton_call(
        functools.partial(
            _split_kernel,
            names=(*inputs, "acc", "m", "l"),
            spec=spec,
            tiles=tiles,
            split_keys=blocks.split_keys,
        ),
        *inputs.values(),
        name="mla_decode_split",
        grid=(tiles * batch, 1, splits),
        out_shape=(
            jax.ShapeDtypeStruct((*shape, rank), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
    )
    return merge_splits(
        acc,
        m,
        total,
        positions,
        spec,
        bounds=bounds,
        sinks=None,
        split_keys=blocks.split_keys,
        out_dtype=jnp.dtype(out_dtype or q.dtype),
        return_lse=return_lse,
        num_warps=blocks.merge_warps,
        interpret=interpret,
    )


def _check_arguments(
    q: Array,
    latent_pages: Array,
    page_table: Array,
    positions: Array,
    bounds: Array | None,
    rank: int,
) -> None:
    check_shapes(
        "mla_decode",
        q=(q, "B T N C"),
        latent_pages=(latent_pages, "P U C"),
        page_table=(page_table, "B M"),
        positions=(positions, "B T"),
        bounds=(bounds, "B 2"),
    )
    integers = {"page_table": page_table, "positions": positions, "bounds": bounds}
    check_dtypes("mla_decode", q=q, integers=integers, floats={})
    if not 0 < rank < q.shape[3]:
        raise ValueError(
            f"mla_decode: q and latents are {q.shape[3]} wide, rank {rank}; they have rank + "
            "rotated width, both positive"
        )
    if latent_pages.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"mla_decode in Triton reads no latents of {latent_pages.dtype}, shape "
            f"{latent_pages.shape}; use bfloat16, float16 or float32"
        )
    if rank > MAX_RANK or q.shape[3] - rank > MAX_ROTATED:
        raise NotImplementedError(
            f"mla_decode in Triton: q {list(q.shape)} of {q.dtype}, rank {rank}; it takes ranks up "
            f"to {MAX_RANK} and {MAX_ROTATED} rotated numbers; use plain XLA"
        )


def mla_decode_reference(
    q: Float[Array, "B T N C"],
    latent_pages: Float[Array, "P U C"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    rank: int,
    scale: float,
) -> tuple[Float[Array, "B T N R"], Float[Array, "B T N"]]:
    """Return (o, lse) in float32, all scores of a row at once."""
    num_pages = latent_pages.shape[0]
    here = (page_table >= 0) & (page_table < num_pages)
    cache = jnp.take(latent_pages, jnp.where(here, page_table, 0), axis=0).astype(jnp.float32)
    cache = cache.reshape(q.shape[0], -1, q.shape[3])
    j = jnp.arange(cache.shape[1], dtype=jnp.int32)[None, None, :]
    seen = (j <= positions[:, :, None]) & jnp.repeat(here, latent_pages.shape[1], axis=1)[
        :, None, :
    ]
    # Memory that no query of the row sees may hold anything.
    cache = jnp.where(jnp.any(seen, axis=1)[:, :, None], cache, 0.0)
    x = jnp.einsum("btnc,bsc->btns", q.astype(jnp.float32), cache, precision="highest") * scale
    x = jnp.where(seen[:, :, None, :], x, -jnp.inf)
    lse = jax.nn.logsumexp(x, axis=-1)
    p = jnp.exp(x - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
    return jnp.einsum("btns,bsr->btnr", p, cache[..., :rank], precision="highest"), lse
