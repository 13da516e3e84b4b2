"""Causal attention of whole sequences, for prefill and scoring: FlashAttention-2 in Pallas-Triton.

    x_ij = softcap(scale q_i·k_j),   j <= i,  j > i - window
    m_i = max_j x_ij,  l_i = exp(sink - m_i) + sum_j exp(x_ij - m_i)
    o_i = sum_j exp(x_ij - m_i) v_j / l_i,   lse_i = m_i + log l_i

over blocks of keys, m, l and o rescaled when the maximum grows.  Powers are of 2, with log2(e) in
the scale.  Source: Dao 2023, arXiv 2307.08691; sinks as in `infer.ops.attention`.

Grid (blocks of queries, N).  A program owns `block_queries` queries of one head of one row and
walks over the row's visible keys, in blocks aligned to multiples of `block_keys` of the row's own
positions: first those with masks (the window's edge), then those that all its queries see, with no
mask at all, then those with masks again (the diagonal).

Bytes: q, o once, k and v once a block of queries (mostly from L2).  FLOPs: 2 T S N (H + Hv) a row,
half of it where T = S.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Int

from infer.pallas import attention_rows as rows_
from infer.pallas.argument_checks import check_blocks, check_numbers, check_shapes
from infer.pallas.attention_rows import LOG2E, Rows, Span
from infer.pallas.triton_call import MASKED, load, store, triton_call

# Where the running maximum starts: far below every score, far above MASKED times any scale, so
# that exp2 of a masked score is 0 even before a query has seen a key.
_FLOOR = -1e15
_TINY = 1e-37  # of a sum: a query that sees nothing gives 0 / tiny
_MAX_WIDTH = 256
DTYPES = ("bfloat16", "float16", "float32")


# block_queries, block_keys, num_warps, num_stages, by the sum of both head widths: the largest that
# the compiler keeps without spills (scripts/gpu_gate.py).  Not timed yet.  With mma.sync, Triton
# gives each warp 16 queries of its own; fewer queries than that and warps repeat each other.
Sizes = tuple[tuple[int, tuple[int, int, int, int]], ...]
_SIZES: dict[str, Sizes] = {
    "mma": ((320, (128, 64, 8, 2)), (512, (64, 32, 8, 2))),
    "wgmma": ((320, (128, 128, 8, 2)), (512, (128, 64, 8, 2))),
    "tcgen05": (
        (128, (128, 64, 8, 2)),
        (192, (128, 128, 8, 2)),
        (320, (128, 64, 8, 2)),
        (512, (64, 64, 8, 2)),
    ),
    "f32": ((128, (32, 32, 4, 1)), (256, (16, 32, 4, 1)), (512, (16, 32, 8, 1))),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttentionBlocks:
    """Queries that a program owns, keys that it reads at a time, and how Triton compiles it."""

    block_queries: int
    block_keys: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        """Check what Triton's tiles ask for."""
        check_blocks(self, "block_queries", "block_keys")

    @classmethod
    def for_shape(
        cls, width: int, value_width: int, dtype: Any, capability: tuple[int, int] | None = None
    ) -> "FlashAttentionBlocks":
        """Return sizes that fit the shared memory and the registers of a chip.

        They do not depend on the number of tokens: a row's bits must not.

        Args:
            width: of a query and key head.
            value_width: of a value head.
            dtype: of q, k and v.
            capability: the chip's compute capability; None for sizes that run on every chip.
        """
        return cls.of(_SIZES[family(dtype, capability)], width + value_width)

    @classmethod
    def of(cls, sizes: Sizes, widths: int) -> "FlashAttentionBlocks":
        """Return the first sizes of the list that serve head widths of this sum."""
        chosen = next((numbers for most, numbers in sizes if widths <= most), sizes[-1][1])
        queries, keys, warps, stages = chosen
        return cls(block_queries=queries, block_keys=keys, num_warps=warps, num_stages=stages)


def family(dtype: Any, capability: tuple[int, int] | None) -> str:
    """Return which matrix instruction Triton uses: "mma", "wgmma", "tcgen05", or "f32" for none."""
    if jnp.dtype(dtype) == jnp.float32:
        return "f32"
    major = capability[0] if capability else 8
    return {9: "wgmma", 10: "tcgen05"}.get(major, "mma")  # 12, consumer Blackwell, has mma.sync


def _kernel(
    # inputs
    q_ref,  # [T, N * H]
    k_ref,  # [S, K * H]
    v_ref,  # [S, K * Hv]
    table_ref,  # [6, blocks]
    sinks_ref,  # [N]
    # outputs
    o_ref,  # [T, N * Hv]
    lse_ref,  # [N, T]
    *,
    width: int,
    value_width: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    blocks: FlashAttentionBlocks,
) -> None:
    head = pl.program_id(1)
    group = q_ref.shape[1] // width // (k_ref.shape[1] // width)
    block = rows_.read_block(table_ref, pl.program_id(0))
    i = block.position + jnp.arange(blocks.block_queries, dtype=jnp.int32)
    kv_head = rows_.floor_div(head, group)
    q_tiles = rows_.load_heads(q_ref, block.first + i, head, width, i < block.real)
    # With a softcap, tanh already brings log2(e); without, it is part of the scale.
    factor = scale * LOG2E if softcap is None else softcap * LOG2E

    def body(step: Array, carry: Any, masked: bool) -> Any:
        m, total, acc = carry
        j = step * blocks.block_keys + jnp.arange(blocks.block_keys, dtype=jnp.int32)
        read = functools.partial(
            rows_.load_heads,
            tokens=block.other_first + j,
            head=kv_head,
            mask=j < block.other_real if masked else None,
        )
        k_tiles = read(k_ref, width=width)
        x = sum_dots(q_tiles, k_tiles)
        if softcap is not None:
            x = rows_.tanh(x * (scale / softcap))
        if masked:
            x = jnp.where(rows_.visible(i, j, block.other_real, window), x, MASKED)
        m_new = jnp.maximum(m, jnp.max(x, axis=1) * factor)
        p = jnp.exp2(x * factor - m_new[:, None])
        rescale = jnp.exp2(m - m_new)
        p_v = p.astype(v_ref.dtype)
        acc = tuple(
            a * rescale[:, None] + triton.dot(p_v, v, allow_tf32=False)
            for a, v in zip(acc, read(v_ref, width=value_width), strict=True)
        )
        return m_new, total * rescale + jnp.sum(p, axis=1), acc

    # The sum begins with the sink, counted once; a head without one has the sink -inf.
    sink = load(sinks_ref, head) * LOG2E
    m_start = jnp.maximum(sink, _FLOOR)
    full = lambda x: jnp.broadcast_to(x, (blocks.block_queries,))
    tiles = rows_.tiles_of(value_width)
    carry = (
        full(m_start),
        full(jnp.exp2(sink - m_start)),
        tuple(jnp.zeros((blocks.block_queries, size), jnp.float32) for _, size in tiles),
    )
    m, total, acc = rows_.walk(body, carry, key_spans(block, window, blocks))
    oldest = 0 if window is None else i - (window - 1)
    seen = (i < block.real) & (oldest < block.other_real)
    inverse = jnp.where(seen, 1.0 / jnp.maximum(total, _TINY), 0.0)
    lse = jnp.where(seen, m * (1 / LOG2E) + jnp.log(jnp.maximum(total, _TINY)), MASKED)
    inside, tokens = i < block.stored, block.first + i
    store(lse_ref, head, tokens, value=lse, mask=inside)
    rows_.store_heads(o_ref, tokens, head, value_width, [a * inverse[:, None] for a in acc], inside)


def sum_dots(a_tiles: tuple[Array, ...], b_tiles: tuple[Array, ...]) -> Array:
    """Return the scores [M, N] of tiles [M, size] with tiles [N, size], summed over the tiles."""
    dots = [
        triton.dot(a, b, trans_b=True, allow_tf32=False)
        for a, b in zip(a_tiles, b_tiles, strict=True)
    ]
    return functools.reduce(jnp.add, dots)


def key_spans(block: rows_.Block, window: int | None, blocks: FlashAttentionBlocks) -> list[Span]:
    """Return the blocks of keys that a block of queries sees."""
    start, size = block.position, blocks.block_keys
    num_keys = jnp.where(start < block.real, block.other_real, 0)  # a block of padding sees none
    last = rows_.ceil_div(jnp.minimum(start + blocks.block_queries, num_keys), size)
    # Up to here every key is there, and before every query.
    outer = rows_.floor_div(jnp.minimum(start + 1, num_keys), size)
    if window is None:
        return [Span(jnp.int32(0), outer, False), Span(outer, last, True)]
    first = rows_.floor_div(jnp.maximum(start - (window - 1), 0), size)
    first = jnp.minimum(first, last)
    if window < blocks.block_queries + size - 1:  # no query block sees a key block whole
        return [Span(first, last, True)]
    # From here on every key is in every query's window.
    inner = rows_.ceil_div(jnp.maximum(start + blocks.block_queries - window, 0), size)
    inner = jnp.minimum(jnp.maximum(inner, first), last)
    outer = jnp.maximum(outer, inner)
    return [Span(first, inner, True), Span(inner, outer, False), Span(outer, last, True)]


def forward(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K Hv"],
    sinks: Float[Array, " N"],
    rows: Rows,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    blocks: FlashAttentionBlocks | None,
    interpret: bool,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "N T"]]:
    """Run the kernel on flat token axes; no sink is one of -inf."""
    (num_tokens, num_heads, width), value_width = q.shape, v.shape[2]
    blocks = blocks or FlashAttentionBlocks.for_shape(width, value_width, q.dtype)
    size = blocks.block_queries
    table = rows_.block_table(rows.queries, rows.keys, size, last_first=True)
    o, lse = triton_call(
        functools.partial(
            _kernel,
            width=width,
            value_width=value_width,
            scale=scale,
            window=window,
            softcap=softcap,
            blocks=blocks,
        ),
        *(x.reshape(x.shape[0], -1) for x in (q, k, v)),
        table,
        sinks.astype(jnp.float32),
        name="flash_attention",
        grid=(table.shape[1], num_heads),
        out_shape=(
            jax.ShapeDtypeStruct((num_tokens, num_heads * value_width), q.dtype),
            jax.ShapeDtypeStruct((num_heads, num_tokens), jnp.float32),
        ),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
    )
    return o.reshape(num_tokens, num_heads, value_width), lse


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    blocks: FlashAttentionBlocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Return causal attention of T queries over S keys, both starting at position 0, and the
    logarithm of each query's sum of exponents.

    Args:
        q: queries.
        k: keys.
        v: values, whose head width may differ.
        scale: factor on q·k, above 0.
        window: visible keys, the query's own included; None for all.
        softcap: bound of scores by tanh, or None.
        sinks: a logit a head that joins the denominator (and lse) only, or None.
        lengths: tokens of each row; what lies behind is not read, and its output is 0.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Returns:
        o in q's dtype, and lse in float32, -1e30 for a query of padding or one that sees nothing.

    Raises:
        ValueError: shapes or numbers that fit no attention.
        NotImplementedError: a dtype or a head width that this form does not serve.
    """
    scale, window, softcap = check_numbers("flash_attention", scale, window, softcap)
    flat, sinks = flatten_and_check(q, k, v, sinks, lengths=lengths)
    batch, num_queries, num_heads = q.shape[:3]
    o, lse = forward(
        *flat,
        sinks,
        rows_.dense_rows(batch, num_queries, k.shape[1], lengths),
        scale=scale,
        window=window,
        softcap=softcap,
        blocks=blocks,
        interpret=interpret,
    )
    lse_BNT = lse.reshape(num_heads, batch, num_queries).swapaxes(0, 1)
    return o.reshape(batch, num_queries, num_heads, -1), lse_BNT


def flash_attention_ragged(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K Hv"],
    starts: Int[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    blocks: FlashAttentionBlocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "N T"]]:
    """Return causal attention within each of several rows that lie on one token axis.

    Args and results are those of `flash_attention`, but for:
        starts: row r is the tokens [starts[r], starts[r + 1]), from position 0 on; B + 1 numbers
            that do not fall.  Rows may be empty.  Tokens before the first number and from the last
            on are padding: not read, output 0.
    """
    scale, window, softcap = check_numbers("flash_attention", scale, window, softcap)
    flat, sinks = flatten_and_check(q, k, v, sinks, starts=starts)
    return forward(
        *flat,
        sinks,
        rows_.ragged_rows(starts, q.shape[0]),
        scale=scale,
        window=window,
        softcap=softcap,
        blocks=blocks,
        interpret=interpret,
    )


def flatten_and_check(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    *,
    lengths: Array | None = None,
    starts: Array | None = None,
) -> tuple[tuple[Array, Array, Array], Array]:
    """Return q, k and v on flat token axes, and sinks with -inf for none.

    Args:
        q: [B, T, N, H], or [T, N, H] where `starts` are given.
        k: keys.
        v: values.
        sinks: a logit a head, or None.
        lengths: of dense rows, or None.
        starts: of ragged rows, or None.

    Raises:
        ValueError: shapes that do not fit each other.
        NotImplementedError: a dtype or a head width that this form does not serve.
    """
    dense = starts is None
    check_shapes(
        "flash_attention",
        q=(q, "B T N H" if dense else "T N H"),
        k=(k, "B S K H" if dense else "T K H"),
        v=(v, "B S K Hv" if dense else "T K Hv"),
        sinks=(sinks, "N"),
        lengths=(lengths, "B"),
        starts=(starts, "R"),
    )
    for name, array in (("lengths", lengths), ("starts", starts)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"flash_attention: {name} are {array.dtype}; give integers")
    num_heads, width = q.shape[-2:]
    num_kv = k.shape[-2]
    if num_heads % num_kv:
        raise ValueError(
            f"q has {num_heads} heads, not a multiple of the {num_kv} key/value heads; "
            "repeat or drop heads so that it divides"
        )
    dtypes = {str(x.dtype) for x in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES) or max(width, v.shape[-1]) > _MAX_WIDTH:
        raise NotImplementedError(
            f"flash_attention in Triton: q {q.shape} of {q.dtype}, k {k.shape} of {k.dtype}, v "
            f"{v.shape} of {v.dtype}; it takes one dtype of {', '.join(DTYPES)} and head widths "
            f"up to {_MAX_WIDTH}; use implementation='xla'"
        )
    flat = tuple(x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    if sinks is None:
        sinks = jnp.full((num_heads,), -jnp.inf, jnp.float32)
    return (flat[0], flat[1], flat[2]), sinks


def flash_attention_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Compute `flash_attention` by its formula in float32, a head at a time."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    i, j = jnp.arange(num_queries)[:, None], jnp.arange(num_keys)[None, :]
    mask = (i >= j) if window is None else (i >= j) & (i - j < window)

    def row(b: Array) -> tuple[Array, Array]:
        length = jnp.maximum(num_queries, num_keys) if lengths is None else lengths[b]
        return _heads_by_formula(
            q[b], k[b], v[b], mask & (i < length) & (j < length), scale, softcap, sinks
        )

    return lax.map(row, jnp.arange(q.shape[0]))


def flash_attention_ragged_reference(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K Hv"],
    starts: Int[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "N T"]]:
    """Compute `flash_attention_ragged` by its formula in float32, a head at a time."""
    t = jnp.arange(q.shape[0])
    row = jnp.searchsorted(starts, t, side="right")
    i, j = t[:, None], t[None, :]
    inside = (row > 0) & (row < starts.shape[0])
    mask = (i >= j) & (row[:, None] == row[None, :]) & inside[:, None]
    if window is not None:
        mask = mask & (i - j < window)
    return _heads_by_formula(q, k, v, mask, scale, softcap, sinks)


def _heads_by_formula(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    scale: float,
    softcap: float | None,
    sinks: Array | None,
) -> tuple[Array, Array]:
    num_heads, group = q.shape[1], q.shape[1] // k.shape[1]
    unseen = ~jnp.any(mask, axis=0)  # of keys: may be stale memory, even NaN
    live = jnp.any(mask, axis=1)

    def head(n: Array) -> tuple[Array, Array]:
        f32 = lambda x: x.astype(jnp.float32)
        k_SH = jnp.where(unseen[:, None], 0.0, f32(k[:, n // group]))
        v_SH = jnp.where(unseen[:, None], 0.0, f32(v[:, n // group]))
        q_TH = jnp.where(live[:, None], f32(q[:, n]), 0.0)
        scores = jnp.einsum("th,sh->ts", q_TH, k_SH, precision="highest") * scale
        if softcap is not None:
            scores = jnp.tanh(scores / softcap) * softcap
        scores = jnp.where(mask, scores, -jnp.inf)
        top = jnp.where(live, jnp.max(scores, axis=1), 0.0)
        if sinks is not None:
            top = jnp.maximum(top, f32(sinks)[n])
        weights = jnp.exp(scores - lax.stop_gradient(top)[:, None])
        total = jnp.sum(weights, axis=1)
        if sinks is not None:
            total = total + jnp.exp(f32(sinks)[n] - lax.stop_gradient(top))
        total = jnp.where(live, total, 1.0)
        o = jnp.einsum("ts,sh->th", weights / total[:, None], v_SH, precision="highest")
        lse = jnp.where(live, lax.stop_gradient(top) + jnp.log(total), -1e30)
        return o.astype(q.dtype), lse

    # Checkpointed, so that gradients hold the scores of one head at a time, too.
    o_NTH, lse_NT = lax.map(jax.checkpoint(head), jnp.arange(num_heads))
    return o_NTH.swapaxes(0, 1), lse_NT
