"""From logits to tokens: per-request sampling parameters as arrays, and the pure function that
draws.

Order, fixed: masks -> temperature -> top_k -> top_p on the renormalised row -> min_p -> draw.
Greedy (temperature 0) is an argmax of the raw row, the lowest id on ties.  Log-probabilities are
those of the raw model.

Keys.  A request's key is `jax.random.key(seed)` where a seed is given, else `fold_in(key, request
index)`; the key of one draw is `fold_in(fold_in(fold_in(request key, choice), output position),
role)`.  Nothing else enters: neither slot nor batch nor chunking can change what a request draws.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from infer.errors import RequestError
from infer.pytree import Leaf, pytree_dataclass

# Below this a temperature is greedy: logits / T would overflow float32 (vLLM uses the same bound).
GREEDY_BELOW = 1e-5


class Role(enum.IntEnum):
    """What a random draw is for; the last number folded into its key."""

    DRAW = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled; names, defaults and ranges are vLLM's.

    Attributes:
        temperature: 0 is greedy; at least 0.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p; in (0, 1].
        min_p: keep tokens at least min_p times as likely as the likeliest; in [0, 1].
        seed: makes the request reproducible by itself, whatever its batch; 0 <= seed < 2**63, None
            for the call's key.
        max_tokens: most tokens to generate; at least 1.
        min_tokens: no stop token ends the request before so many tokens; stop tokens cannot be
            drawn until then.
        stop_token_ids: ids that end the request, besides the model's own; the id is part of the
            output.
        ignore_eos: go on past the model's own end-of-sequence ids.
        logprobs: how many top log-probabilities to return per token beside the drawn token's own; 0
            to 20, None for none.
    """

    temperature: float | int = 1.0
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_number("temperature", self.temperature, 0, math.inf, "0 is greedy")
        _check_number("top_p", self.top_p, 0, 1, "1 keeps every token", open_low=True)
        _check_number("min_p", self.min_p, 0, 1, "0 keeps every token")
        _check_int("top_k", self.top_k, -1, None, "0 or -1 keeps every token")
        _check_int("max_tokens", self.max_tokens, 1, None, "ask for at least one token")
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens, "it cannot exceed max_tokens")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1, "None takes the call's key")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, 20, "None returns no alternatives")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, None, "ids are those of the tokenizer")


def _check_number(
    name: str, value: Any, low: float, high: float, hint: str, open_low: bool = False
) -> None:
    bracket = "(" if open_low else "["
    rule = f"must be a finite number in {bracket}{low}, {high}]; {hint}"
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(
        value, bool
    )
    if not is_number or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}, {rule}")
    if not (low < value if open_low else low <= value) or value > high:
        raise RequestError(f"{name} is {value!r}, {rule}")


def _check_int(name: str, value: Any, low: int, high: int | None, hint: str) -> None:
    rule = f"must be an integer of at least {low}" + (
        f" and at most {high}" if high is not None else ""
    )
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}, {rule}; {hint}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} is {value!r}, {rule}; {hint}")


@pytree_dataclass
class SamplingState:
    """Sampling parameters of R requests as arrays: features switch by value, never by structure."""

    temperature: Leaf  # f32 [R], 0 = greedy
    top_k: Leaf  # int32 [R], V or more = off
    top_p: Leaf  # f32 [R], 1 = off
    min_p: Leaf  # f32 [R], 0 = off
    max_tokens: Leaf  # int32 [R]
    min_tokens: Leaf  # int32 [R]
    stop_ids: Leaf  # int32 [R, E], V (one past the end) where unused
    key: Leaf  # typed threefry keys [R]

    @property
    def num_requests(self) -> int:
        """R."""
        return self.temperature.shape[0]


def take(state: SamplingState, rows: Int[Array, " B"]) -> SamplingState:
    """Return the parameters of the given requests; an index past the end repeats the last
    request.
    """
    rows = jnp.minimum(rows, state.num_requests - 1)
    return jax.tree.map(lambda leaf: leaf[rows], state)


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


def is_stop(tokens: Int[Array, " B"], state: SamplingState) -> Bool[Array, " B"]:
    """Return whether each token is among its request's stop ids."""
    return jnp.any(tokens[:, None] == state.stop_ids, axis=1)


def mask_early_stops(
    logits: Float[Array, "B V"], state: SamplingState, num_generated: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Set the stop ids of rows that have not reached `min_tokens` to -inf."""
    vocab = logits.shape[-1]
    early = (num_generated < state.min_tokens)[:, None]
    ids = jnp.where(early, state.stop_ids, vocab)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def sample(logits: Float[Array, "B V"], state: SamplingState, keys: Array) -> Int[Array, " B"]:
    """Return one token a row, drawn with that row's parameters (`state` has B rows) and draw key.

    Exact at any vocabulary: the sets of top_k and top_p are found by a search over float32 bit
    patterns, not by a truncated sort.  Ties at the edge of a set are kept from the lowest id up.
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
        return jnp.where(top_p_mask(x, state.top_p) | ~uses_p[:, None], x, -jnp.inf)

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


def _largest_threshold(bits: Int[Array, "B V"], holds) -> Int[Array, " B"]:
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


def log_probabilities(logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return the log-probability of each row's token under the raw distribution."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1, mode="clip")[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def top_log_probabilities(
    logits: Float[Array, "B V"], count: int
) -> tuple[Int[Array, "B C"], Float[Array, "B C"]]:
    """Return ids and raw log-probabilities of the `count` likeliest tokens, likeliest first."""
    values, ids = lax.top_k(logits, count)
    return ids.astype(jnp.int32), values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
