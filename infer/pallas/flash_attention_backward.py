"""Gradients of flash attention, by recomputing the weights from the saved lse.  Pallas-Triton.

    p_ij = exp(x_ij - lse_i),   dp_ij = do_i·v_j,   delta_i = do_i·o_i - dlse_i
    ds_ij = p_ij (dp_ij - delta_i) (1 - tanh^2)                         (the last with a softcap)
    dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i,   dv_j = sum_i p_ij do_i
    dsink = -sum_i exp(sink - lse_i) delta_i

with x_ij as in `flash_attention`.  Source: Dao 2023, arXiv 2307.08691, algorithm 2, in two kernels
instead of one with atomic additions: the same inputs give the same bits.

dq, delta: grid (blocks of queries, N); a program owns a block of queries of one head and walks over
its visible keys.  dk, dv: grid (blocks of keys, K); a program owns a block of keys of one key/value
head and walks over the queries that see it, of all heads of the group in turn.

Bytes: q, k, v, o, do, dq, dk, dv once, and what a program walks over once more a block (from L2).
FLOPs: 2 T S N (3 H + 2 Hv) for dq and dk, dv with the scores computed twice: 7/5 of the least;
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
from infer.pallas import flash_attention as forward_
from infer.pallas.argument_checks import check_numbers
from infer.pallas.attention_rows import LOG2E, Rows, Span
from infer.pallas.flash_attention import FlashAttentionBlocks, Sizes, sum_dots
from infer.pallas.triton_call import MASKED, load, store, triton_call

# As in flash_attention.  In dk, dv it is the keys of which each warp has 16; k, v and the two sums
# are all in registers there, hence the few queries at a time.
_DQ_SIZES: dict[str, Sizes] = {
    "mma": (
        (128, (128, 64, 8, 2)),
        (256, (128, 32, 8, 2)),
        (320, (64, 16, 4, 2)),
        (512, (32, 32, 4, 2)),
    ),
    "wgmma": ((320, (128, 64, 8, 2)), (512, (128, 32, 8, 2))),
    "tcgen05": ((320, (128, 64, 8, 2)), (512, (128, 32, 8, 2))),
    "f32": ((512, (16, 16, 8, 1)),),  # spills at 256 + 256
}
_DKV_SIZES: dict[str, Sizes] = {
    "mma": (
        (128, (32, 128, 8, 2)),
        (256, (16, 128, 8, 2)),
        (512, (16, 32, 4, 2)),
    ),
    "wgmma": (
        (128, (64, 128, 8, 2)),
        (256, (32, 128, 8, 2)),
        (320, (16, 128, 8, 2)),
        (512, (16, 32, 4, 2)),
    ),
    "tcgen05": ((320, (64, 128, 8, 1)), (512, (32, 64, 8, 1))),
    "f32": ((256, (16, 32, 4, 1)), (512, (16, 16, 8, 1))),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttentionBackwardBlocks:
    """Sizes of the two kernels, FlashAttentionBlocks; given as dicts of its fields, they become
    that.
    """

    dq: Any
    dkv: Any

    def __post_init__(self) -> None:
        """Read sizes as `dataclasses.asdict` and a tuned file write them."""
        for name in ("dq", "dkv"):
            sizes = getattr(self, name)
            if isinstance(sizes, dict):
                object.__setattr__(self, name, FlashAttentionBlocks(**sizes))

    @classmethod
    def for_shape(
        cls, width: int, value_width: int, dtype: Any, capability: tuple[int, int] | None = None
    ) -> "FlashAttentionBackwardBlocks":
        """Return sizes that fit the shared memory and the registers of a chip.

        Args:
            width: of a query and key head.
            value_width: of a value head.
            dtype: of q, k and v.
            capability: the chip's compute capability; None for sizes that fit every chip.
        """
        which = forward_.family(dtype, capability)
        return cls(
            dq=FlashAttentionBlocks.of(_DQ_SIZES[which], width + value_width),
            dkv=FlashAttentionBlocks.of(_DKV_SIZES[which], width + value_width),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """What changes the program."""

    scale: float
    window: int | None
    softcap: float | None
    blocks: FlashAttentionBlocks
    backward_blocks: FlashAttentionBackwardBlocks
    interpret: bool


def _weights(
    dots: Array, lse: Array, mask: Array | None, scale: float, softcap: float | None
) -> tuple[Array, Array | None]:
    """Return p of dot products, and the softcap's derivative; lse is in powers of 2 and has the
    axis of 1 that dots have not.
    """
    if softcap is None:
        slope, power = None, dots * (scale * LOG2E)
    else:
        t = rows_.tanh(dots * (scale / softcap))
        slope, power = 1.0 - t * t, t * (softcap * LOG2E)
    p = jnp.exp2(power - lse)
    return (p if mask is None else jnp.where(mask, p, 0.0)), slope


def _dq_kernel(
    # inputs
    q_ref,  # [T, N * H]
    k_ref,  # [S, K * H]
    v_ref,  # [S, K * Hv]
    do_ref,  # [T, N * Hv]
    o_ref,  # [T, N * Hv]
    lse_ref,  # [N, T]
    dlse_ref,  # [N, T]
    table_ref,  # [6, blocks]
    # outputs
    dq_ref,  # [T, N * H]
    delta_ref,  # [N, T]
    *,
    width: int,
    value_width: int,
    options: _Options,
) -> None:
    blocks, window = options.backward_blocks.dq, options.window
    head = pl.program_id(1)
    group = q_ref.shape[1] // width // (k_ref.shape[1] // width)
    kv_head = rows_.floor_div(head, group)
    block = rows_.read_block(table_ref, pl.program_id(0))
    i = block.position + jnp.arange(blocks.block_queries, dtype=jnp.int32)
    real, tokens = i < block.real, block.first + i
    q_tiles = rows_.load_heads(q_ref, tokens, head, width, real)
    do_tiles = rows_.load_heads(do_ref, tokens, head, value_width, real)
    o_tiles = rows_.load_heads(o_ref, tokens, head, value_width, real)
    lse = load(lse_ref, head, tokens, mask=real, other=0.0) * LOG2E
    f32 = lambda x: x.astype(jnp.float32)
    # Here rather than in XLA, whose order of additions may depend on the shape.
    sums = [jnp.sum(f32(a) * f32(b), axis=1) for a, b in zip(do_tiles, o_tiles, strict=True)]
    dlse = load(dlse_ref, head, tokens, mask=real, other=0.0)
    delta = functools.reduce(jnp.add, sums) - dlse
    store(delta_ref, head, tokens, value=delta, mask=i < block.stored)

    def body(step: Array, dq: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        j = step * blocks.block_keys + jnp.arange(blocks.block_keys, dtype=jnp.int32)
        inside = j < block.other_real if masked else None
        k_tiles = rows_.load_heads(k_ref, block.other_first + j, kv_head, width, inside)
        v_tiles = rows_.load_heads(v_ref, block.other_first + j, kv_head, value_width, inside)
        mask = rows_.visible(i, j, block.other_real, window) if masked else None
        p, slope = _weights(
            sum_dots(q_tiles, k_tiles), lse[:, None], mask, options.scale, options.softcap
        )
        ds = p * (sum_dots(do_tiles, v_tiles) - delta[:, None])
        ds = (ds if slope is None else ds * slope).astype(k_ref.dtype)
        return tuple(
            a + triton.dot(ds, k, allow_tf32=False) for a, k in zip(dq, k_tiles, strict=True)
        )

    spans = forward_.key_spans(block, window, blocks)
    dq = rows_.walk(body, _zeros(blocks.block_queries, width), spans)
    dq = [jnp.where(real[:, None], a * options.scale, 0.0) for a in dq]
    rows_.store_heads(dq_ref, tokens, head, width, dq, i < block.stored)


def _dkv_kernel(
    # inputs
    q_ref,  # [T, N * H]
    k_ref,  # [S, K * H]
    v_ref,  # [S, K * Hv]
    do_ref,  # [T, N * Hv]
    lse_ref,  # [N, T]
    delta_ref,  # [N, T]
    table_ref,  # [6, blocks]
    # outputs
    dk_ref,  # [S, K * H]
    dv_ref,  # [S, K * Hv]
    *,
    width: int,
    value_width: int,
    options: _Options,
) -> None:
    blocks, window = options.backward_blocks.dkv, options.window
    kv_head = pl.program_id(1)
    group = q_ref.shape[1] // width // (k_ref.shape[1] // width)
    block = rows_.read_block(table_ref, pl.program_id(0))
    j = block.position + jnp.arange(blocks.block_keys, dtype=jnp.int32)
    real, tokens = j < block.real, block.first + j
    k_tiles = rows_.load_heads(k_ref, tokens, kv_head, width, real)
    v_tiles = rows_.load_heads(v_ref, tokens, kv_head, value_width, real)
    spans = _query_spans(block, window, blocks)

    def one_head(member: Array, carry: Any) -> Any:
        head = kv_head * group + member

        def body(step: Array, carry: Any, masked: bool) -> Any:
            dk, dv = carry
            i = step * blocks.block_queries + jnp.arange(blocks.block_queries, dtype=jnp.int32)
            inside, mine = i < block.other_real, block.other_first + i
            q_tiles = rows_.load_heads(q_ref, mine, head, width, inside)
            do_tiles = rows_.load_heads(do_ref, mine, head, value_width, inside)
            # With so high an lse the weights of queries that are not there are 0, mask or not.
            lse = load(lse_ref, head, mine, mask=inside, other=-MASKED) * LOG2E
            delta = load(delta_ref, head, mine, mask=inside, other=0.0)
            # All transposed: [keys, queries].
            mask = rows_.visible(i, j, block.real, window, transposed=True) if masked else None
            p, slope = _weights(
                sum_dots(k_tiles, q_tiles), lse[None, :], mask, options.scale, options.softcap
            )
            p_low = p.astype(do_ref.dtype)
            dv = tuple(
                a + triton.dot(p_low, x, allow_tf32=False)
                for a, x in zip(dv, do_tiles, strict=True)
            )
            ds = p * (sum_dots(v_tiles, do_tiles) - delta[None, :])
            ds = (ds if slope is None else ds * slope).astype(q_ref.dtype)
            dk = tuple(
                a + triton.dot(ds, x, allow_tf32=False) for a, x in zip(dk, q_tiles, strict=True)
            )
            return dk, dv

        return rows_.walk(body, carry, spans)

    carry = _zeros(blocks.block_keys, width), _zeros(blocks.block_keys, value_width)
    dk, dv = (
        one_head(jnp.int32(0), carry) if group == 1 else lax.fori_loop(0, group, one_head, carry)
    )
    dk = [jnp.where(real[:, None], a * options.scale, 0.0) for a in dk]
    dv = [jnp.where(real[:, None], a, 0.0) for a in dv]
    rows_.store_heads(dk_ref, tokens, kv_head, width, dk, j < block.stored)
    rows_.store_heads(dv_ref, tokens, kv_head, value_width, dv, j < block.stored)


def _zeros(num_tokens: int, width: int) -> tuple[Array, ...]:
    return tuple(jnp.zeros((num_tokens, size), jnp.float32) for _, size in rows_.tiles_of(width))


def _query_spans(
    block: rows_.Block, window: int | None, blocks: FlashAttentionBlocks
) -> list[Span]:
    """Return the blocks of queries that see a block of keys."""
    start, size = block.position, blocks.block_queries
    end = jnp.where(start < block.real, block.other_real, 0)
    first = rows_.floor_div(start, size)
    if window is not None:
        # Masks all the way: a third loop costs more registers than the masks cost time.
        end = jnp.minimum(end, start + (blocks.block_keys - 1 + window))
        return [Span(first, rows_.ceil_div(end, size), True)]
    last = rows_.ceil_div(end, size)
    inner = jnp.minimum(rows_.ceil_div(start + (blocks.block_keys - 1), size), last)
    return [Span(first, inner, True), Span(inner, last, False)]


def backward(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K Hv"],
    do: Float[Array, "T N Hv"],
    o: Float[Array, "T N Hv"],
    lse: Float[Array, "N T"],
    dlse: Float[Array, "N T"],
    rows: Rows,
    options: _Options,
) -> tuple[
    Float[Array, "T N H"], Float[Array, "S K H"], Float[Array, "S K Hv"], Float[Array, "N T"]
]:
    """Run the two kernels on flat token axes; return dq, dk, dv and delta, 0 for padding."""
    width, value_width = q.shape[2], v.shape[2]
    flat = [x.reshape(x.shape[0], -1) for x in (q, k, v, do)]
    like = lambda x: jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * x.shape[2]), x.dtype)

    def call(
        kernel: Any,
        name: str,
        sizes: FlashAttentionBlocks,
        operands: list[Array],
        heads: int,
        outputs: Any,
    ) -> Any:
        return triton_call(
            functools.partial(kernel, width=width, value_width=value_width, options=options),
            *operands,
            name=name,
            grid=(operands[-1].shape[1], heads),
            out_shape=outputs,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
            interpret=options.interpret,
        )

    sizes = options.backward_blocks.dq
    table = rows_.block_table(rows.queries, rows.keys, sizes.block_queries, last_first=True)
    operands = [*flat, o.reshape(o.shape[0], -1), lse, dlse, table]
    outputs = (like(q), jax.ShapeDtypeStruct(lse.shape, jnp.float32))
    dq, delta = call(_dq_kernel, "flash_attention_dq", sizes, operands, q.shape[1], outputs)
    sizes = options.backward_blocks.dkv
    table = rows_.block_table(rows.keys, rows.queries, sizes.block_keys, last_first=False)
    operands, outputs = [*flat, lse, delta, table], (like(k), like(v))
    dk, dv = call(_dkv_kernel, "flash_attention_dkv", sizes, operands, k.shape[1], outputs)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), delta


def _attention(
    q: Array, k: Array, v: Array, sinks: Array, rows: Rows, options: _Options
) -> tuple[Array, Array]:
    return forward_.forward(
        q,
        k,
        v,
        sinks,
        rows,
        scale=options.scale,
        window=options.window,
        softcap=options.softcap,
        blocks=options.blocks,
        interpret=options.interpret,
    )


def _attention_forward(
    q: Array, k: Array, v: Array, sinks: Array, rows: Rows, options: _Options
) -> Any:
    o, lse = _attention(q, k, v, sinks, rows, options)
    return (o, lse), (q, k, v, sinks, rows, o, lse)


def _attention_backward(options: _Options, saved: Any, gradients: Any) -> Any:
    q, k, v, sinks, rows, o, lse = saved
    do, dlse = gradients
    dq, dk, dv, delta = backward(q, k, v, do, o, lse, dlse, rows, options)
    # Only of queries that see something: elsewhere lse is no logarithm.
    p_sink = jnp.exp(sinks.astype(jnp.float32)[:, None] - jnp.maximum(lse, 0.5 * MASKED))
    dsinks = jnp.sum(jnp.where(lse > 0.5 * MASKED, -p_sink * delta, 0.0), axis=1)
    return dq, dk, dv, dsinks.astype(sinks.dtype), None


_differentiable: Any = jax.custom_vjp(_attention, nondiff_argnums=(5,))
_differentiable.defvjp(_attention_forward, _attention_backward)


def _options(
    q: Any,
    v: Array,
    scale: float,
    window: int | None,
    softcap: float | None,
    blocks: FlashAttentionBlocks | None,
    backward_blocks: FlashAttentionBackwardBlocks | None,
    interpret: bool,
) -> _Options:
    shape = (q.shape[-1], v.shape[-1], q.dtype)
    return _Options(
        scale=scale,
        window=window,
        softcap=softcap,
        blocks=blocks or FlashAttentionBlocks.for_shape(*shape),
        backward_blocks=backward_blocks or FlashAttentionBackwardBlocks.for_shape(*shape),
        interpret=interpret,
    )


def attention(
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
    backward_blocks: FlashAttentionBackwardBlocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Return what `flash_attention` returns, o and lse, differentiable in q, k, v and sinks.

    Args and errors are those of `flash_attention`; besides, `backward_blocks` are the sizes of the
    gradients' kernels.
    """
    scale, window, softcap = check_numbers("flash_attention", scale, window, softcap)
    flat, sinks = forward_.flatten_and_check(q, k, v, sinks, lengths=lengths)
    batch, num_queries, num_heads = q.shape[:3]
    rows = rows_.dense_rows(batch, num_queries, k.shape[1], lengths)
    options = _options(q, v, scale, window, softcap, blocks, backward_blocks, interpret)
    o, lse = _differentiable(*flat, sinks, rows, options)
    lse_BNT = lse.reshape(num_heads, batch, num_queries).swapaxes(0, 1)
    return o.reshape(batch, num_queries, num_heads, -1), lse_BNT


def attention_ragged(
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
    backward_blocks: FlashAttentionBackwardBlocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "N T"]]:
    """Return what `flash_attention_ragged` returns, o and lse, differentiable in q, k, v and
    sinks.
    """
    scale, window, softcap = check_numbers("flash_attention", scale, window, softcap)
    flat, sinks = forward_.flatten_and_check(q, k, v, sinks, starts=starts)
    rows = rows_.ragged_rows(starts, q.shape[0])
    options = _options(q, v, scale, window, softcap, blocks, backward_blocks, interpret)
    return _differentiable(*flat, sinks, rows, options)
