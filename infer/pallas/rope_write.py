"""Rotary embedding of q and k, and the write of k and v into the page pools, in one kernel.
Pallas-Triton.

    (a, b) -> (a cos - b sin, b cos + a sin)    for the halves a, b of the first 2 R dimensions

Source: Su et al. 2021, arXiv 2104.09864; half-split pairs, as infer.ops.rope.

Grid (T,).  A program owns a token: its N + K heads are turned, and its key and value go to one slot
of one page.  The pools are outputs that alias the inputs: nothing else of them is touched.
Bytes: (2 N + 2 K + 2 K) H a token: q in and out, k and v in and into pages.  FLOPs: 6 (N + K) R.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from infer.pallas.triton_call import load, power_of_two, store, triton_call


def _turned(ref: Any, t: Array, half: int, cos: Array, sin: Array) -> list[tuple[Any, ...]]:
    """Return (heads, dimensions, mask, values) of the parts of one token's heads after turning."""
    heads, width = ref.shape[1:]
    n = jnp.arange(power_of_two(heads), dtype=jnp.int32)[:, None]
    h = jnp.arange(power_of_two(half), dtype=jnp.int32)[None, :]
    ok = (n < heads) & (h < half)
    part = lambda start: load(ref, t, n, h + start, mask=ok, other=0.0).astype(jnp.float32)
    a, b = part(0), part(half)
    parts = [(n, h, ok, a * cos - b * sin), (n, h + half, ok, b * cos + a * sin)]
    if width > 2 * half:
        rest = jnp.arange(power_of_two(width - 2 * half), dtype=jnp.int32)[None, :]
        ok = (n < heads) & (rest < width - 2 * half)
        at = rest + 2 * half
        parts.append((n, at, ok, load(ref, t, n, at, mask=ok, other=0.0)))
    return parts


def _kernel(
    # inputs
    q_ref,  # [T, N, H]
    k_ref,  # [T, K, H]
    v_ref,  # [T, K, H]
    cos_ref,  # f32 [T, R]
    sin_ref,  # f32 [T, R]
    page_ref,  # int32 [T], P for a token that is not written
    slot_ref,  # int32 [T]
    k_pool_ref,  # [P, K, U, H], aliased
    v_pool_ref,  # [P, K, U, H], aliased
    # outputs
    q_out_ref,  # [T, N, H]
    k_pages_ref,  # [P, K, U, H]
    v_pages_ref,  # [P, K, U, H]
) -> None:
    del k_pool_ref, v_pool_ref
    t = pl.program_id(0)
    half = cos_ref.shape[1]
    r = jnp.arange(power_of_two(half), dtype=jnp.int32)
    turn = lambda ref: load(ref, t, r, mask=r < half, other=0.0)[None, :]
    cos, sin = turn(cos_ref), turn(sin_ref)
    for n, h, ok, value in _turned(q_ref, t, half, cos, sin):
        store(q_out_ref, t, n, h, value=value.astype(q_out_ref.dtype), mask=ok)
    page, slot = load(page_ref, t), load(slot_ref, t)
    # A page that is none is never written: it would be another's memory.
    there = (page >= 0) & (page < k_pages_ref.shape[0])
    for n, h, ok, value in _turned(k_ref, t, half, cos, sin):
        value = value.astype(k_pages_ref.dtype)
        store(k_pages_ref, page, n, slot, h, value=value, mask=ok & there)
    heads, width = v_ref.shape[1:]
    n = jnp.arange(power_of_two(heads), dtype=jnp.int32)[:, None]
    h = jnp.arange(power_of_two(width), dtype=jnp.int32)[None, :]
    ok = (n < heads) & (h < width)
    value = load(v_ref, t, n, h, mask=ok, other=0.0).astype(v_pages_ref.dtype)
    store(v_pages_ref, page, n, slot, h, value=value, mask=ok & there)


def rope_write(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cos: Float[Array, "T R"],
    sin: Float[Array, "T R"],
    pages: Int[Array, " T"],
    slots: Int[Array, " T"],
    k_pages: Float[Array, "P K U H"],
    v_pages: Float[Array, "P K U H"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "P K U H"], Float[Array, "P K U H"]]:
    """Return q turned, and the pools with the turned k and v written at (page, slot) of each token.

    Args:
        q: queries of T tokens.
        k: their keys.
        v: their values.
        cos: of the tokens' angles, float32; the first 2 R dimensions of a head turn.
        sin: likewise.
        pages: page of each token; P, one past the end, writes nothing.
        slots: place of each token in its page, in [0, U).
        k_pages: key pool; donate it to write in place.
        v_pages: value pool.
        interpret: run on any device, slowly.

    Raises:
        ValueError: arrays do not fit each other, or more dimensions are to be turned than a head
            has.
    """
    half, width = cos.shape[1], q.shape[2]
    if 2 * half > width:
        raise ValueError(f"cos has {half} angles, a head of width {width} has at most {width // 2}")
    tokens, kv, page_size = q.shape[0], k.shape[1], k_pages.shape[2]
    want = {
        "k": (k, (tokens, kv, width)),
        "v": (v, (tokens, kv, width)),
        "cos": (cos, (tokens, half)),
        "sin": (sin, (tokens, half)),
        "pages": (pages, (tokens,)),
        "slots": (slots, (tokens,)),
        "k_pages": (k_pages, (k_pages.shape[0], kv, page_size, width)),
        "v_pages": (v_pages, (k_pages.shape[0], kv, page_size, width)),
    }
    for name, (array, shape) in want.items():
        if array.shape != shape:
            raise ValueError(f"{name} is {array.shape}; with q {q.shape} it must be {shape}")
    # Two halves of all heads are in registers: 16 values a thread of each at most.
    tile = power_of_two(q.shape[1]) * power_of_two(half)
    shaped = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triton_call(
        _kernel,
        q,
        k,
        v,
        cos,
        sin,
        pages.astype(jnp.int32),
        slots.astype(jnp.int32),
        k_pages,
        v_pages,
        name="rope_write",
        grid=(q.shape[0],),
        out_shape=(shaped(q), shaped(k_pages), shaped(v_pages)),
        num_warps=max(1, min(8, tile // 256)),
        aliases={7: 1, 8: 2},
        interpret=interpret,
    )


def rope_write_reference(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    pages: Array,
    slots: Array,
    k_pages: Array,
    v_pages: Array,
) -> tuple[Array, Array, Array]:
    """Compute the same with complex numbers and scatters, in plain jnp."""
    half = cos.shape[1]
    turn = jax.lax.complex(cos, sin)[:, None, :]

    def turned(x: Array) -> Array:
        wide = x.astype(jnp.float32)
        z = jax.lax.complex(wide[..., :half], wide[..., half : 2 * half]) * turn
        both = jnp.concatenate([z.real, z.imag, wide[..., 2 * half :]], axis=-1)
        return both.astype(x.dtype)

    heads = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
    at = pages[:, None], heads, slots[:, None]
    write = lambda pool, x: pool.at[at].set(x.astype(pool.dtype), mode="drop")
    return turned(q), write(k_pages, turned(k)), write(v_pages, v)
