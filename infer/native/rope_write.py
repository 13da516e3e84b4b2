"""Rotary embedding and the write into the paged cache, on the CPU, in one operation."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from infer import native


def rope_write(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cos: Float[Array, "T H2"],
    sin: Float[Array, "T H2"],
    pages: Int[Array, " T"],
    positions: Int[Array, " T"],
    k_pages: Float[Array, "P K U H"],
    v_pages: Float[Array, "P K U H"],
) -> tuple[Float[Array, "T N H"], Float[Array, "P K U H"], Float[Array, "P K U H"]]:
    """Turn the first 2 * H2 dimensions of q and k, write k and v of each token at (page, position
    modulo U), and return q and the pools.

    The pools are written in place where the caller gives them up (donates them), and copied
    otherwise.

    Args:
        q: queries.
        k: keys.
        v: values.
        cos: of the tokens' angles.
        sin: of the tokens' angles.
        pages: of each token; an id outside [0, P) writes nothing.
        positions: of each token in its sequence.
        k_pages: key pool, float32, bfloat16 or float16.
        v_pages: value pool.
    """
    native.library()
    like = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype)
    call = jax.ffi.ffi_call(
        "infer_rope_write",
        (
            like(q, jnp.float32),
            like(k_pages, k_pages.dtype),
            like(v_pages, v_pages.dtype),
        ),
        input_output_aliases={7: 1, 8: 2},
        vmap_method="sequential",
    )
    f32 = lambda x: x.astype(jnp.float32)
    turned, k_pages, v_pages = call(
        f32(q), f32(k), f32(v), cos, sin, pages, positions, k_pages, v_pages
    )
    return turned.astype(q.dtype), k_pages, v_pages
