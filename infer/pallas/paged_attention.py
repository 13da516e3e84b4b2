"""Attention of few query tokens a row over a paged cache: FlashDecoding, Pallas-Triton.

    split s of a row: m_s = max_j x_j,  l_s = sum_j exp(x_j - m_s),  a_s = sum_j exp(x_j - m_s) v_j
    merge:            o = sum_s exp(m_s - m) a_s / (exp(sink - m) + sum_s exp(m_s - m) l_s)

over the keys j of the split, x_j = softcap(scale q·k_j) and m the maximum of all m_s and the sink.
Source: FlashDecoding (Dao et al. 2023); Kwon et al. 2023, arXiv 2309.06180.

Grid (tiles B, K, splits).  A program owns `block_rows` of the T x G queries of one key/value head
and `split_keys` keys; one without a visible key ends at once and writes nothing.  The merge is
`infer.pallas.paged_attention_merge`.

What bits depend on: blocks and splits of keys begin at their multiples and are merged in order, so
a query's result depends on its own keys and on the blocks' sizes.  It does not depend on the other
rows of the batch, on the width of the page table, on the number of splits, on padding or, where
`block_rows` is set, on how many tokens come with it.

Bytes: 2 S K H a row once, plus 2 T N (H + 2) floats a split.  FLOPs: 4 T S N H a row.  Memory
besides: T N (H + 2) floats a row and split of the page table, so that a table should be no wider
than its longest row (in steps, since each width is a program).
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Bool, Float, Int, Shaped

from infer.pallas import kv_formats, paged_tile
from infer.pallas.argument_checks import (
    as_int32,
    check_blocks,
    check_dtypes,
    check_numbers,
    check_shapes,
)
from infer.pallas.paged_attention_merge import merge_splits
from infer.pallas.paged_tile import TileSpec
from infer.pallas.triton_call import load, power_of_two, store, triton_call

# Of a head: the widest whose tiles fit the shared memory of every chip.
MAX_WIDTH = 256
# Of shared memory a block, Ada and consumer Blackwell: 99 KiB.  A100 has 163, Hopper 227.
SHARED_BYTES = 99 * 1024
# Streaming multiprocessors, from the data sheets.
CORES = {
    "a100-80gb": 108,
    "l4-24gb": 58,
    "h100-80gb": 132,
    "h200-141gb": 132,
    "b200-180gb": 148,
    "rtx-5060-8gb": 30,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedAttentionBlocks:
    """Sizes of a program's work, and how Triton compiles it.

    `block_rows` None means the fewest that hold all queries of a row, 16 to `most_rows`.  A
    number makes a query's bits independent of how many tokens come with it, too.  `num_warps` None
    means 4, and 8 for the largest tiles and float32, which would spill registers with 4.
    """

    block_keys: int = 64
    split_keys: int = 256
    block_rows: int | None = None
    num_warps: int | None = None
    num_stages: int = 2
    merge_warps: int = 2

    def __post_init__(self) -> None:
        """Check what Triton and the kernel's loop ask for."""
        check_blocks(self, "block_keys", "block_rows")

    @classmethod
    def for_shape(
        cls,
        batch: int,
        context: int,
        *,
        num_kv: int,
        width: int,
        pool_dtype: Any = jnp.bfloat16,
        q_dtype: Any = jnp.bfloat16,
        chip: str = "h200-141gb",
        split: Literal["fixed", "tuned"] = "fixed",
    ) -> "PagedAttentionBlocks":
        """Return sizes for `batch` rows of at most `context` keys.

        `split="fixed"` depends on the model and the chip only, so a row's bits never depend on its
        batch.  `split="tuned"` asks for four programs a multiprocessor, with splits of 128 to 1024
        keys: quicker for few rows with short contexts, but a row's bits then depend on the batch's
        size and on `context`.

        Raises:
            ValueError: another `split`.
        """
        if split not in ("fixed", "tuned"):
            raise ValueError(f"split is {split!r}; use 'fixed' or 'tuned'")
        if in_float32(pool_dtype, q_dtype):
            sizes = cls(
                block_keys=32 if width <= 128 else 16,
                num_warps=8 if width <= 128 or pool_dtype == jnp.uint8 else 4,
                num_stages=1,
            )
        else:
            # Tiles of 16 KiB: two stages of keys and values fit the 99 KiB of the smallest chips.
            # Data of 8 and 4 bits are multiplied in 16.
            sizes = cls(block_keys=min(64, max(16, 8192 // power_of_two(width, 16))))
        if split == "fixed":
            return sizes
        want = 4 * CORES.get(chip, 100)
        programs = lambda keys: batch * num_kv * -(-context // keys)
        fits = [keys for keys in (1024, 512, 256) if programs(keys) >= want]
        return dataclasses.replace(sizes, split_keys=fits[0] if fits else 128)


def _split_kernel(
    *refs: Any, names: tuple[str, ...], spec: TileSpec, tiles: int, split_keys: int
) -> None:
    # inputs: q [B, T, N, H], k and v [P, K, U, H], table [B, M], positions [B, T], and where used
    #   k_scales, v_scales [P, K, U], bounds [B, 2], tree [B, T, words]
    # outputs: acc [B, K, T * G, splits, H], m and l [B, K, T * G, splits]
    ref = dict(zip(names, refs, strict=True))
    kv_head, split = pl.program_id(1), pl.program_id(2)
    b, tile = (
        lax.div(pl.program_id(0), jnp.int32(tiles)),
        lax.rem(pl.program_id(0), jnp.int32(tiles)),
    )
    rows = paged_tile.rows_of_tile(tile, kv_head, ref["positions"].shape[1], spec)
    i = load(ref["positions"], b, rows.token, mask=rows.ok, other=jnp.int32(-1))
    start, end = paged_tile.key_range(
        i, b, ref, capacity=spec.capacity, window=spec.window, drafted=spec.drafted
    )
    start, stop = jnp.maximum(start, split * split_keys), jnp.minimum(end, (split + 1) * split_keys)

    @pl.when(start < stop)
    def _() -> None:
        parts = kv_formats.num_parts(ref["k"].dtype)
        q = paged_tile.load_parts(ref["q"], (b, rows.token, rows.head), rows.ok, parts)
        part_width = ref["q"].shape[3] // parts
        block = power_of_two(part_width, 16)
        m, total, acc = paged_tile.attend(
            q,
            start,
            stop,
            lambda j: paged_tile.load_block(j, start, stop, b, kv_head, ref, q[0].dtype),
            lambda j: paged_tile.visible(i, j, rows, b, ref, spec),
            spec,
            (block,) * parts,
        )
        store_split(ref, (b, kv_head, tile, split), rows, (m, total, acc), part_width, spec)


def store_split(
    ref: dict[str, Any],
    place: tuple[Any, ...],
    rows: paged_tile.Rows,
    result: tuple[Array, Array, tuple[Array, ...]],
    part_width: int,
    spec: TileSpec,
) -> None:
    """Write what a tile found in one split; `place` is its row, head, tile and split."""
    b, kv_head, tile, split = place
    m, total, acc = result
    flat = tile * spec.rows + jnp.arange(spec.rows, dtype=jnp.int32)
    store(ref["m"], b, kv_head, flat, split, value=m, mask=rows.ok)
    store(ref["l"], b, kv_head, flat, split, value=total, mask=rows.ok)
    h = jnp.arange(acc[0].shape[1], dtype=jnp.int32)
    mask = rows.ok[:, None] & (h < part_width)[None, :]
    for part, a in enumerate(acc):
        column = (h + part * part_width)[None, :]
        store(ref["acc"], b, kv_head, flat[:, None], split, column, value=a, mask=mask)


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: Shaped[Array, "P K U W"],
    v_pages: Shaped[Array, "P K U W"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scales: Float[Array, "P K U"] | None = None,
    v_scales: Float[Array, "P K U"] | None = None,
    tree: Bool[Array, "B T T"] | None = None,
    bounds: Int[Array, "B 2"] | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    blocks: PagedAttentionBlocks | None = None,
    interpret: bool = False,
) -> Any:
    """Return causal attention of T queries a row over that row's pages, [B, T, N, H].

    Args:
        q: queries.
        k_pages: key pool in a format of `infer.pallas.kv_formats`; the queries' own keys are
            already written.
        v_pages: value pool.
        page_table: pages of each row, P (or any number outside the pool) where there is none; such
            a page is not read, and its keys are seen by nobody.
        positions: of each query in its sequence; negative for a query that is padding (output 0).
        scale: factor on q·k.
        window: visible keys, the query's own included; None for all.
        softcap: bound of scores by tanh, or None.
        sinks: a logit a head that joins the denominator only, or None.
        k_scales: of 8- and 4-bit keys.
        v_scales: of 8- and 4-bit values.
        tree: which drafted tokens each query sees, its own included (`tree[b, t, t]`).  Token t of
            row b then stands in slot positions[b, 0] + t, whatever its position (its depth in the
            tree counted from the root), and a query sees every key before positions[b, 0] besides.
        bounds: first key and one past the last key that a row may see, at most; None for all.
        return_lse: return (o, lse), lse [B, T, N] the natural logarithm of the softmax's
            denominator, the sink's term included; -inf where that is 0.  For merges of parts of the
            keys (`infer.pallas.cascade_attention`): give the sinks to one part.
        out_dtype: of o; q's by default.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: shapes that do not fit each other, or numbers that fit no attention.
        NotImplementedError: a dtype or a head width that kernels do not serve.
    """
    scale, window, softcap = check_numbers("paged_attention", scale, window, softcap)
    check_arguments(
        "paged_attention",
        q,
        k_pages,
        v_pages,
        page_table,
        positions,
        k_scales=k_scales,
        v_scales=v_scales,
        sinks=sinks,
        bounds=bounds,
        tree=tree,
    )
    page_table, positions = as_int32(page_table), as_int32(positions)
    bounds = None if bounds is None else as_int32(bounds)
    batch, num_tokens, num_heads, width = q.shape
    num_kv, page_size = k_pages.shape[1:3]
    blocks = blocks or PagedAttentionBlocks.for_shape(
        batch, 0, num_kv=num_kv, width=width, pool_dtype=k_pages.dtype, q_dtype=q.dtype
    )
    flat = num_tokens * num_heads // num_kv
    most = most_rows(k_pages.dtype, q.dtype, width)
    rows = blocks.block_rows or min(most, power_of_two(flat, 16))
    check_tiles("paged_attention", q, k_pages, rows, blocks)
    tiles, splits = -(-flat // rows), -(-page_table.shape[1] * page_size // blocks.split_keys)
    given = {
        "q": q,
        "k": k_pages,
        "v": v_pages,
        "table": page_table,
        "positions": positions,
        "k_scales": k_scales,
        "v_scales": v_scales,
        "bounds": bounds,
        "tree": None if tree is None else pack_tree(tree, positions, window),
    }
    inputs = {name: array for name, array in given.items() if array is not None}
    shape = (batch, num_kv, flat, splits)
    f32 = jnp.float32
    spec = TileSpec(
        rows=rows,
        block_keys=blocks.block_keys,
        group=num_heads // num_kv,
        capacity=page_table.shape[1] * page_size,
        drafted=0 if tree is None else num_tokens,
        scale=scale,
        window=window,
        softcap=softcap,
    )
    acc, m, total = triton_call(
        functools.partial(
            _split_kernel,
            names=(*inputs, "acc", "m", "l"),
            spec=spec,
            tiles=tiles,
            split_keys=blocks.split_keys,
        ),
        *inputs.values(),
        name="paged_attention_split",
        grid=(tiles * batch, num_kv, splits),
        out_shape=(
            jax.ShapeDtypeStruct((*shape, width), f32),
            jax.ShapeDtypeStruct(shape, f32),
            jax.ShapeDtypeStruct(shape, f32),
        ),
        num_warps=blocks.num_warps or (8 if rows >= most else 4),
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
        sinks=sinks,
        split_keys=blocks.split_keys,
        out_dtype=jnp.dtype(out_dtype or q.dtype),
        return_lse=return_lse,
        num_warps=blocks.merge_warps,
        interpret=interpret,
    )


def most_rows(pool_dtype: Any, q_dtype: Any = jnp.bfloat16, width: int = 128) -> int:
    """Return the rows of the largest tile that spills no registers on any chip of the gate."""
    if in_float32(pool_dtype, q_dtype):
        return 32 if width <= 128 else 16
    return 32 if pool_dtype == jnp.uint8 else 64


def in_float32(pool_dtype: Any, q_dtype: Any) -> bool:
    """Return whether tiles hold float32: without instructions of matrices, they must be small."""
    return max(jnp.dtype(dtype).itemsize for dtype in (pool_dtype, q_dtype)) == 4


def check_tiles(op: str, q: Array, k_pages: Array, rows: int, blocks: Any) -> None:
    """Check that tiles of float32, which pass through shared memory, fit that of every chip.

    Raises:
        NotImplementedError: they do not.
    """
    if not in_float32(k_pages.dtype, q.dtype):
        return
    keys = (blocks.num_stages + 1) * blocks.block_keys
    num_bytes = 4 * power_of_two(q.shape[3], 16) * (rows + keys)
    if num_bytes > SHARED_BYTES:
        raise NotImplementedError(
            f"{op} in Triton: q {list(q.shape)} of {q.dtype}, pools {list(k_pages.shape)} of "
            f"{k_pages.dtype}: {blocks} with {rows} rows needs {num_bytes} bytes of shared memory, "
            f"more than {SHARED_BYTES}; choose sizes with q_dtype={q.dtype}, or none"
        )


def check_arguments(
    op: str,
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    positions: Array,
    *,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    sinks: Array | None = None,
    bounds: Array | None = None,
    tree: Array | None = None,
) -> None:
    """Check what the paged ops ask of their arrays.

    Raises:
        ValueError: shapes that do not fit each other, or dtypes of the wrong kind.
        NotImplementedError: a dtype or a head width that kernels do not serve.
    """
    check_shapes(
        op,
        q=(q, "B T N H"),
        k_pages=(k_pages, "P K U W"),
        v_pages=(v_pages, "P K U W"),
        page_table=(page_table, "B M"),
        positions=(positions, "B T"),
        k_scales=(k_scales, "P K U"),
        v_scales=(v_scales, "P K U"),
        sinks=(sinks, "N"),
        bounds=(bounds, "B 2"),
        tree=(tree, "B T T"),
    )
    check_dtypes(
        op,
        q=q,
        integers={"page_table": page_table, "positions": positions, "bounds": bounds},
        floats={"k_scales": k_scales, "v_scales": v_scales, "sinks": sinks},
    )
    if tree is not None and tree.dtype != jnp.bool_:
        raise ValueError(f"{op}: tree is {tree.dtype}; give booleans, True where a token is seen")
    num_heads, num_kv = q.shape[2], k_pages.shape[1]
    if num_heads % num_kv:
        raise ValueError(
            f"{op}: q has {num_heads} heads, not a multiple of the {num_kv} key/value "
            "heads; every key/value head serves equally many"
        )
    kv_formats.check_pools(op, k_pages, v_pages, k_scales, v_scales, q.shape[3])
    if q.shape[3] > MAX_WIDTH:
        raise NotImplementedError(
            f"{op} in Triton: q {list(q.shape)} of {q.dtype}, pools {list(k_pages.shape)} of "
            f"{k_pages.dtype}; it takes head widths up to {MAX_WIDTH}; use implementation='xla'"
        )


def pack_tree(
    tree: Bool[Array, "B T T"], positions: Int[Array, "B T"], window: int | None
) -> Int[Array, "B T words"]:
    """Return the tree with 32 drafted tokens a word, those outside a query's window left out."""
    batch, num_tokens, _ = tree.shape
    if window is not None:
        tree = tree & (positions[:, None, :] > positions[:, :, None] - window)
    words = -(-num_tokens // 32)
    tree = jnp.pad(tree, ((0, 0), (0, 0), (0, 32 * words - num_tokens)))
    bits = tree.reshape(batch, num_tokens, words, 32).astype(jnp.uint32)
    place = jnp.arange(32, dtype=jnp.uint32)[None, None, None, :]
    # Distinct powers of two: their sum is their union.
    return lax.bitcast_convert_type(jnp.sum(bits << place, axis=-1, dtype=jnp.uint32), jnp.int32)


def paged_attention_reference(
    q: Float[Array, "B T N H"],
    k_pages: Shaped[Array, "P K U W"],
    v_pages: Shaped[Array, "P K U W"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scales: Float[Array, "P K U"] | None = None,
    v_scales: Float[Array, "P K U"] | None = None,
    tree: Bool[Array, "B T T"] | None = None,
    bounds: Int[Array, "B 2"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Return (o, lse) in float32, all scores of a row at once."""
    f32 = jnp.float32
    num_pages, num_kv, page_size, _ = k_pages.shape
    batch, num_tokens, num_heads, _ = q.shape
    here = (page_table >= 0) & (page_table < num_pages)

    def keys(pool: Array, scales: Array | None) -> Array:
        """Return a row's keys or values [B, S, N, H], dequantised, a head for each query head."""
        rows = jnp.take(pool, jnp.where(here, page_table, 0), axis=0)
        if pool.dtype == jnp.uint8:
            rows = jnp.concatenate([rows % 16, rows // 16], axis=-1).astype(f32) - 8.0
        rows = rows.astype(f32)
        if scales is not None:
            rows = rows * jnp.take(scales, jnp.where(here, page_table, 0), axis=0)[
                ..., None
            ].astype(f32)
        rows = rows.transpose(0, 1, 3, 2, 4).reshape(batch, -1, num_kv, rows.shape[-1])
        return jnp.repeat(rows, num_heads // num_kv, axis=2)

    k, v = keys(k_pages, k_scales), keys(v_pages, v_scales)
    i = positions[:, :, None]
    j = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, :]
    if tree is None:
        at, seen = j, j <= i
    else:
        root = positions[:, :1, None]
        drafted = jnp.clip(jnp.broadcast_to(j - root, (batch, 1, k.shape[1])), 0, num_tokens - 1)
        at = jnp.where(j < root, j, jnp.take_along_axis(positions[:, None, :], drafted, axis=2))
        ancestors = jnp.take_along_axis(
            tree, jnp.broadcast_to(drafted, (batch, num_tokens, k.shape[1])), axis=2
        )
        seen = (j < root) | (ancestors & (j < root + num_tokens))
    seen = seen & (i >= 0) & jnp.repeat(here, page_size, axis=1)[:, None, :]
    if window is not None:
        seen = seen & (at > i - window)
    if bounds is not None:
        seen = seen & (j >= bounds[:, :1, None]) & (j < bounds[:, 1:, None])
    x = jnp.einsum("btnh,bsnh->btns", q.astype(f32), k, precision="highest") * scale
    if softcap is not None:
        x = jnp.tanh(x / softcap) * softcap
    x = jnp.where(seen[:, :, None, :], x, -jnp.inf)
    sink = jnp.full((num_heads,), -jnp.inf, f32) if sinks is None else sinks.astype(f32)
    column = jnp.broadcast_to(sink[None, None, :, None], (*x.shape[:3], 1))
    lse = jax.nn.logsumexp(jnp.concatenate([x, column], axis=-1), axis=-1)
    finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
    p = jnp.exp(x - finite[..., None])
    # Memory that no query of the row sees may hold anything.
    v = jnp.where(jnp.any(seen, axis=1)[:, :, None, None], v, 0.0)
    return jnp.einsum("btns,bsnh->btnh", p, v, precision="highest"), lse
