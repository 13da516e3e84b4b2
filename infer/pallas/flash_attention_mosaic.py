"""Causal attention of whole sequences on Hopper: TMA, wgmma, a fetching warpgroup and two that
compute.  Pallas Mosaic GPU.

    o[i] = sum_j softmax_j(cap(scale q[i]·k[j])) v[j]  over  max(0, i - window + 1) <= j <= i

The maths, its sources and the pipeline stand in `hopper_attention`.

Grid (N, B, ceil(T / 128)): a block owns 128 queries of one head of one sequence.  Heads are the
fastest axis, so that the N / K heads of one key head run together and share its keys in L2; the
last queries, which see most keys, come first, so that the short blocks fill the end of the wave.
FLOPs: 4 B N H (visible pairs), about 2 B N H T^2 causal.  Bytes: q, k, v once in, o once out.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from infer.pallas.hopper_attention import (
    BLOCK_Q,
    NUM_CONSUMERS,
    PRODUCER,
    HopperBlocks,
    KeyRange,
    Scores,
    Shared,
    check_attention,
    columns_of,
    consume,
    produce,
    shared_memory,
    whole_tiles,
)
from infer.pallas.mosaic_call import WARPGROUP, WARPGROUP_ROWS, mosaic_call


def _kernel(
    *refs: Any, scores: Scores, group: int, num_keys: int, with_sinks: bool, interpret: bool
) -> None:
    # inputs: [B, T, N H], [B, S, K H], [B, S, K H of values], sinks [N] or none
    q_ref, k_ref, v_ref, *rest = refs
    sinks_ref, *rest = rest if with_sinks else (None, *rest)
    # outputs: [B, T, N H of values], [B, N, T]
    o_ref, lse_ref, *scratch = rest
    shared = Shared(*scratch)
    head, batch = lax.axis_index("heads"), lax.axis_index("batch")
    first = (lax.axis_size("tiles") - 1 - lax.axis_index("tiles")) * BLOCK_Q
    end = jnp.int32(num_keys)
    block_k = shared.k.shape[1]
    keys = KeyRange.of(first, end, scores.window, block_k)
    warpgroup = lax.axis_index(WARPGROUP)

    def producer() -> None:
        kv_head = lax.div(head, jnp.int32(group))

        def fetch(source: Any, target: Any, loaded: Any, block: Array, slot: Array) -> None:
            rows = pl.ds(block * block_k, block_k)
            source = source.at[batch, rows, columns_of(kv_head, target.shape[2])]
            plgpu.copy_gmem_to_smem(source, target.at[slot], loaded.at[slot])

        produce(
            keys,
            shared,
            functools.partial(fetch, k_ref, shared.k, shared.k_loaded),
            functools.partial(fetch, v_ref, shared.v, shared.v_loaded),
        )

    def consumer() -> None:
        me = warpgroup
        rows = pl.ds(first + me * WARPGROUP_ROWS, WARPGROUP_ROWS)
        source = q_ref.at[batch, rows, columns_of(head, shared.q.shape[2])]
        plgpu.copy_gmem_to_smem(source, shared.q.at[me], shared.q_loaded.at[me])
        sink = None if sinks_ref is None else sinks_ref[head]
        o, lse = consume(keys, first, end, scores, sink, shared, interpret=interpret)
        # q is not read any more: its memory takes an output of the same width.
        out = (shared.q if shared.o is None else shared.o).at[me]
        out[...] = o.astype(out.dtype)
        shared.lse.at[me][...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, o_ref.at[batch, rows, columns_of(head, o.shape[1])])
        plgpu.copy_smem_to_gmem(
            shared.lse.at[me], lse_ref.at[batch * lax.axis_size("heads") + head, rows]
        )
        plgpu.wait_smem_to_gmem(0)

    # One branch: what only one side needs is not held in registers through the other.
    lax.cond(warpgroup == PRODUCER, producer, consumer)


def flash_attention_mosaic(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    blocks: HopperBlocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Return causal attention, and the log-sum-exp of each query's logits (the sink's included).

    Queries and keys start at position 0.  Scores, softmax and sums are float32; weights are rounded
    to v's dtype for the product.  With a softcap the GPU's tanh is approximate (2^-11 relative). A
    query that sees no key gives 0 and a log-sum-exp of -inf.

    Args:
        q: queries, bfloat16 or float16; H a multiple of 16, up to 256.
        k: keys.
        v: values, of the same or a smaller width.
        scale: factor on q·k.
        window: visible keys, the query's own included; None for all.
        softcap: bound of scores by tanh, or None.
        sinks: a logit a head that joins the denominator only, or None.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: shapes that do not belong together.
        NotImplementedError: a dtype or a width that this form does not serve.
    """
    batch, num_queries, num_heads, width = q.shape
    num_keys = k.shape[1]
    blocks = blocks or HopperBlocks.for_shape(width)
    check_attention("flash_attention", q, k, v, k.shape[2], blocks)
    value_width = v.shape[-1]
    q_BTX, k_BSX, v_BSX = (whole_tiles(x) for x in (q, k, v))
    num_tiles = -(-num_queries // BLOCK_Q)
    kernel = functools.partial(
        _kernel,
        scores=Scores(scale=scale, window=window, softcap=softcap),
        group=num_heads // k.shape[2],
        num_keys=num_keys,
        with_sinks=sinks is not None,
        interpret=interpret,
    )
    o, lse = mosaic_call(
        kernel,
        *(q_BTX, k_BSX, v_BSX),
        *() if sinks is None else (sinks.astype(jnp.float32),),
        name="flash_attention_mosaic",
        grid={"heads": num_heads, "batch": batch, "tiles": num_tiles},
        out_shape=[
            jax.ShapeDtypeStruct((*q_BTX.shape[:2], num_heads * value_width), q.dtype),
            # Whole tiles: TMA needs strides of 16 bytes.
            jax.ShapeDtypeStruct((batch * num_heads, num_tiles * BLOCK_Q), jnp.float32),
        ],
        scratch=shared_memory(blocks, width, value_width, q.dtype),
        num_warpgroups=NUM_CONSUMERS + 1,
        interpret=interpret,
    )
    o = o[:, :num_queries].reshape(batch, num_queries, num_heads, value_width)
    return o, lse.reshape(batch, num_heads, -1)[:, :, :num_queries]


def flash_attention_mosaic_reference(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """Compute the same in float32 with the whole score matrix, from the formula."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    behind = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    weights = jnp.where(seen[None, None], jnp.exp(logits), 0.0)
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32))[None, :, None]
    o = jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")
    o = o / jnp.where(total > 0, total, 1.0).transpose(0, 2, 1)[..., None]
    return o, jnp.log(total)
