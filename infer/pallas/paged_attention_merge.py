"""The merge of attention over splits of the keys, in the splits' order: Pallas-Triton.

    o = sum_s 2^(m_s - m) a_s / (2^(sink - m) + sum_s 2^(m_s - m) l_s),   m = max(max_s m_s, sink)

m, l and a are those of `infer.pallas.paged_attention`, in units of log2.  Grid (F, K, B): a program
owns one query of one head, and reads the splits that its query can see and no others, sixteen at
a time from a multiple of sixteen: the order of its sums depends on the query's position and window
alone, neither on the batch nor on the width of the page table.

Bytes: (S / split_keys) (H + 2) floats a query and head.  FLOPs: as many.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from infer.pallas.paged_tile import LOG2E, TileSpec, key_range
from infer.pallas.triton_call import MASKED, load, power_of_two, store, triton_call

_SPLITS = 16  # read at a time


def _merge_kernel(*refs: Any, names: tuple[str, ...], split_keys: int, spec: TileSpec) -> None:
    # inputs: acc [B, K, F, splits, H], m and l [B, K, F, splits], positions [B, T], and where used
    #   bounds [B, 2], sinks [N]
    # outputs: o [B, T, N, H], lse [B, T, N] where asked for
    ref = dict(zip(names, refs, strict=True))
    f, kv_head, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    acc_ref, o_ref = ref["acc"], ref["o"]
    group = jnp.int32(spec.group)
    token, head = lax.div(f, group), kv_head * group + lax.rem(f, group)
    width = acc_ref.shape[4]
    h = jnp.arange(power_of_two(width), dtype=jnp.int32)
    start, end = key_range(
        load(ref["positions"], b, token),
        b,
        ref,
        capacity=spec.capacity,
        window=spec.window,
        drafted=spec.drafted,
    )
    first, last = lax.div(start, jnp.int32(split_keys)), lax.div(end - 1, jnp.int32(split_keys)) + 1
    last = jnp.where(start < end, last, first)

    def splits_of(step: Array) -> tuple[Array, Array]:
        s = step * _SPLITS + jnp.arange(_SPLITS, dtype=jnp.int32)
        return s, (s >= first) & (s < last)

    def largest(step: Array, m: Array) -> Array:
        s, ok = splits_of(step)
        x = load(ref["m"], b, kv_head, f, s, mask=ok, other=jnp.float32(MASKED))
        return jnp.maximum(m, jnp.max(x))

    def add(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, acc = carry
        s, ok = splits_of(step)
        at = (b, kv_head, f, s)
        x = load(ref["m"], *at, mask=ok, other=jnp.float32(MASKED))
        weight = jnp.where(ok, jnp.exp2(x - m), 0.0)
        part = load(ref["l"], *at, mask=ok, other=jnp.float32(0))
        cells = tuple(i[:, None] if jnp.ndim(i) else i for i in at)
        mask = ok[:, None] & (h < width)[None, :]
        a = load(acc_ref, *cells, h[None, :], mask=mask, other=jnp.float32(0))
        return total + jnp.sum(weight * part), acc + jnp.sum(weight[:, None] * a, axis=0)

    steps = lax.div(first, jnp.int32(_SPLITS)), lax.div(last + (_SPLITS - 1), jnp.int32(_SPLITS))
    m, total, sink = jnp.float32(MASKED), jnp.float32(0), jnp.float32(0)
    if "sinks" in ref:
        sink = load(ref["sinks"], head).astype(jnp.float32) * LOG2E
        m = jnp.maximum(sink, MASKED)  # a sink of -inf is none, and -inf - -inf is NaN
    m = lax.fori_loop(*steps, largest, m)
    if "sinks" in ref:
        # Counted once, whatever the splits.
        total = jnp.exp2(sink - m)
    total, acc = lax.fori_loop(*steps, add, (total, jnp.zeros((h.size,), jnp.float32)))
    o = acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    store(o_ref, b, token, head, h, value=o.astype(o_ref.dtype), mask=h < width)
    if "lse" in ref:
        # Of a query that sees nothing: the logarithm of 0.
        lse = jnp.where(total > 0, (m + jnp.log2(total)) * (1 / LOG2E), -jnp.inf)
        store(ref["lse"], b, token, head, value=lse)


def merge_splits(
    acc: Float[Array, "B K F splits H"],
    m: Float[Array, "B K F splits"],
    l: Float[Array, "B K F splits"],  # noqa: E741
    positions: Int[Array, "B T"],
    spec: TileSpec,
    *,
    bounds: Int[Array, "B 2"] | None,
    sinks: Float[Array, " N"] | None,
    split_keys: int,
    out_dtype: jnp.dtype,
    return_lse: bool,
    num_warps: int,
    interpret: bool,
) -> Array | tuple[Array, Array]:
    """Return o [B, T, N, H], and the logarithm of its denominator [B, T, N] if asked for.

    Args:
        acc: sums of weighted values of each split, K N = T G rows a key/value head.
        m: largest score of each split, log2.
        l: sums of weights of each split.
        positions: of the queries.
        spec: what the split kernel computed.
        bounds: of each row, or None.
        sinks: a logit a head, or None.
        split_keys: keys a split.
        out_dtype: of o.
        return_lse: whether the second result is asked for.
        num_warps: of a program.
        interpret: run on any device, slowly.
    """
    batch, num_kv, flat, _, width = acc.shape
    num_tokens = positions.shape[1]
    num_heads = num_kv * spec.group
    operands = {"acc": acc, "m": m, "l": l, "positions": positions}
    operands |= {} if bounds is None else {"bounds": bounds}
    operands |= {} if sinks is None else {"sinks": sinks}
    shape = (batch, num_tokens, num_heads)
    out = {"o": jax.ShapeDtypeStruct((*shape, width), out_dtype)}
    if return_lse:
        out["lse"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    results = triton_call(
        functools.partial(_merge_kernel, names=(*operands, *out), split_keys=split_keys, spec=spec),
        *operands.values(),
        name="paged_attention_merge",
        grid=(flat, num_kv, batch),
        out_shape=tuple(out.values()),
        num_warps=num_warps,
        interpret=interpret,
    )
    return results if return_lse else results[0]
