"""From processed logits to tokens: temperature, the filters, the draw, and log-probabilities.

Order, fixed: temperature -> top_k -> top_p on the renormalised row -> min_p -> draw.  Greedy
(temperature 0) is an argmax, the lowest id on ties.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from infer.sampling.state import SamplingState

# Below this a temperature is greedy: logits / T would overflow float32 (vLLM uses the same bound).
GREEDY_BELOW = 1e-5


def sample(logits: Float[Array, "B V"], state: SamplingState, keys: Array) -> Int[Array, " B"]:
    """Return one token a row, drawn with that row's parameters (`state` has B rows) and draw key.

    Exact at any vocabulary: the sets of top_k and top_p are found by a search over float32 bit
    patterns, not by a truncated sort.  Ties at the edge of a set are kept from the lowest id up.

    Rows that have no answer get one all the same, the same on every CPU path: a NaN counts as the
    largest logit.  A greedy row gives the first id of its largest; a draw whose largest logit is
    NaN or infinite, or whose logits are all -inf, gives id 0.  (`generate` ends such a row.)
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    random = state.temperature >= GREEDY_BELOW

    def draw(_: None) -> Array:
        scaled = filtered_logits(logits, state)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (logits.shape[-1],), jnp.float32))(keys)
        drawn = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
        return jnp.where(random, drawn, greedy)

    return lax.cond(jnp.any(random), draw, lambda _: greedy, None)


def filtered_logits(logits: Float[Array, "B V"], state: SamplingState) -> Float[Array, "B V"]:
    """Return logits after temperature, top_k, top_p and min_p: -inf outside the kept set.

    Greedy rows (temperature below 1e-5) are scaled by 1, so that nothing overflows; `sample` does
    not use them.
    """
    temperature = jnp.where(state.temperature >= GREEDY_BELOW, state.temperature, 1.0)
    # Shifted so that the maximum is 0: logits / T cannot overflow, and softmax does not change.
    top = jnp.max(logits, axis=-1, keepdims=True)
    scaled = (logits - top) / temperature[:, None]
    vocab = logits.shape[-1]
    uses_k = (state.top_k > 0) & (state.top_k < vocab)
    uses_p = state.top_p < 1.0

    def by_k(x: Array) -> Array:
        k = jnp.where(uses_k, state.top_k, vocab)
        return jnp.where(top_k_mask(x, k), x, -jnp.inf)

    def by_p(x: Array) -> Array:
        # A value that float32 flushes to 0 would keep nothing.
        top_p = jnp.maximum(state.top_p, jnp.finfo(jnp.float32).tiny)
        return jnp.where(top_p_mask(x, top_p) | ~uses_p[:, None], x, -jnp.inf)

    scaled = lax.cond(jnp.any(uses_k), by_k, lambda x: x, scaled)
    scaled = lax.cond(jnp.any(uses_p), by_p, lambda x: x, scaled)
    # p >= min_p * p_max, in logits; log 0 = -inf keeps everything.
    floor = jnp.log(state.min_p)[:, None]
    return jnp.where(scaled >= floor, scaled, -jnp.inf)


def _ordered_bits(x: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Map float32 to int32 so that order is kept: a search over thresholds becomes a search over
    integers.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # -0.0 and 0.0 must tie; they differ in bits.
    bits = jnp.where(x == 0, 0, bits)
    return jnp.where(bits < 0, jnp.int32(-(2**31)) - bits, bits)


def _largest_threshold(
    bits: Int[Array, "B V"], holds: Callable[[Array], Array]
) -> Int[Array, " B"]:
    """Return for each row the largest t with holds(bits >= t); `holds` is monotone: true for small
    t, false for large.

    32 halvings of the int32 range; each is one pass over the row.
    """
    low = jnp.full(bits.shape[0], jnp.iinfo(jnp.int32).min, jnp.int32)
    high = jnp.max(bits, axis=-1)

    def halve(_: Array, span: tuple[Array, Array]) -> tuple[Array, Array]:
        lo, hi = span
        # The upper middle, written without overflow.
        mid = (lo >> 1) + (hi >> 1) + ((lo | hi) & 1)
        ok = holds(bits >= mid[:, None])
        return jnp.where(ok, mid, lo), jnp.where(ok, hi, mid - 1)

    return lax.fori_loop(0, 32, halve, (low, high))[0]


def top_k_mask(x: Float[Array, "B V"], k: Int[Array, " B"]) -> Bool[Array, "B V"]:
    """Return the mask of the k largest entries of each row, ties kept from the lowest id up; k >= V
    keeps all.
    """
    bits = _ordered_bits(x)
    k = jnp.clip(k, 1, x.shape[-1])
    edge = _largest_threshold(bits, lambda keep: jnp.sum(keep, axis=-1, dtype=jnp.int32) >= k)
    above = bits > edge[:, None]
    room = k - jnp.sum(above, axis=-1, dtype=jnp.int32)
    ties = bits == edge[:, None]
    return above | (ties & (jnp.cumsum(ties, axis=-1, dtype=jnp.int32) <= room[:, None]))


def top_p_mask(x: Float[Array, "B V"], top_p: Float[Array, " B"]) -> Bool[Array, "B V"]:
    """Return the mask of the smallest set of likeliest tokens whose mass reaches `top_p`; never
    empty.

    A token is kept where the mass of strictly likelier tokens, and of equal ones with lower ids, is
    below top_p.
    """
    p = jax.nn.softmax(x, axis=-1)
    bits = _ordered_bits(x)
    mass = lambda keep: jnp.sum(jnp.where(keep, p, 0.0), axis=-1)
    edge = _largest_threshold(bits, lambda keep: mass(keep) >= top_p)
    above, ties = bits > edge[:, None], bits == edge[:, None]
    before = jnp.cumsum(jnp.where(ties, p, 0.0), axis=-1) - jnp.where(ties, p, 0.0)
    fits = mass(above)[:, None] + before < top_p[:, None]
    # Where rounding leaves the total below top_p no threshold holds: the edge is the smallest int,
    # all are above it.
    return above | (ties & fits)


def log_probabilities(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"], total: Float[Array, " B"]
) -> Float[Array, " B"]:
    """Return the log-probability of each row's token; `total` is the rows' log-sum-exp."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1, mode="clip")[:, 0]
    return chosen - total


def top_log_probabilities(
    logits: Float[Array, "B V"], count: int, total: Float[Array, " B"]
) -> tuple[Int[Array, "B C"], Float[Array, "B C"]]:
    """Return ids and log-probabilities of the `count` likeliest tokens, likeliest first; `total` is
    the rows' log-sum-exp.
    """
    values, ids = lax.top_k(logits, count)
    return ids.astype(jnp.int32), values - total[:, None]
