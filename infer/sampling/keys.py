"""The key of every random draw.

A request's key is `jax.random.key(seed)` where a seed is given (both 32-bit words of a larger seed
count, as with jax_enable_x64), else `fold_in(key, request index)`;
the key of one draw is `fold_in(fold_in(fold_in(request key, choice), output position), role)`.
Nothing else enters: neither slot nor batch nor chunking can change what a request draws.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int


class Role(enum.IntEnum):
    """What a random draw is for; the last number folded into its key."""

    DRAW = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def seed_words(seeds: list[int | None]) -> tuple[np.ndarray, np.ndarray]:
    """Return (uint32 [R, 2] threefry key data of each seed, bool [R] whether there is one)."""
    words = [(0, 0) if s is None else (s >> 32, s & 0xFFFFFFFF) for s in map(_int_or_none, seeds)]
    return np.asarray(words, np.uint32).reshape(-1, 2), np.asarray([s is not None for s in seeds])


def _int_or_none(seed: int | None) -> int | None:
    return None if seed is None else int(seed)


def request_keys(
    base: Array,
    words: Int[Array, "R 2"] | np.ndarray,
    seeded: Bool[Array, " R"] | np.ndarray,
    index: Int[Array, " R"],
) -> Array:
    """Return the key of each request: from its own seed, or `base` folded with its index.

    `base` of another kind than threefry is reduced to a threefry key by drawing 64 bits from it.
    """
    if jax.random.key_impl(base) != "threefry2x32":
        base = jax.random.wrap_key_data(
            jax.random.bits(base, (2,), jnp.uint32), impl="threefry2x32"
        )
    folded = jax.vmap(lambda i: jax.random.fold_in(base, i))(index)
    data = jnp.where(
        jnp.asarray(seeded)[:, None], jnp.asarray(words, jnp.uint32), jax.random.key_data(folded)
    )
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def draw_keys(
    keys: Array, choice: Int[Array, " B"], position: Int[Array, " B"], role: Role
) -> Array:
    """Return the key of one draw per row; `position` counts the request's output tokens."""

    def one(key: Array, c: Array, p: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, c), p), int(role))

    return jax.vmap(one)(keys, choice, position)
