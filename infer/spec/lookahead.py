"""Lookahead decoding's state: the Jacobi window, and the pool of n-grams it has produced.

The window is N - 1 rows of W tokens, guesses for the W positions after the next; each step the
model gives a new row from it, and column j of the rows together is an n-gram of N tokens.  The pool
keeps the latest C different n-grams of each sequence; those that begin with the sequence's last
token are candidates for the tokens after it.

Source: Fu et al., Break the Sequential Dependency of LLM Inference Using Lookahead Decoding,
section 3, arXiv:2402.02057.

These are the data alone: the step that computes a new row needs the model and its mask.  Candidates
are functions of the tokens before the round, so that q is one-hot.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from infer.pytree import Leaf, pytree_dataclass
from infer.spec.context import Drafts


@pytree_dataclass
class Pool:
    """The latest n-grams of B sequences, in no order.  Time 0 marks a place that is empty."""

    ngrams: Leaf  # int32 [B, C, N]
    times: Leaf  # int32 [B, C], when each was put in, counted in n-grams
    clock: Leaf  # int32 [B], n-grams put in so far


@pytree_dataclass
class Candidates:
    """Continuations of B sequences, latest first."""

    tokens: Leaf  # int32 [B, G, N - 1], 0 where there is none
    count: Leaf  # int32 [B], 0 to G


def empty_pool(num_sequences: int, *, capacity: int, n: int) -> Pool:
    """Return a pool with room for `capacity` n-grams of `n` tokens a sequence.

    Raises:
        ValueError: capacity < 1 or n < 2.
    """
    if capacity < 1 or n < 2:
        raise ValueError(
            f"capacity is {capacity} and n {n}; room for at least 1 n-gram of at least 2 tokens: "
            "one to look up and one to draft"
        )
    return Pool(
        ngrams=jnp.zeros((num_sequences, capacity, n), jnp.int32),
        times=jnp.zeros((num_sequences, capacity), jnp.int32),
        clock=jnp.zeros(num_sequences, jnp.int32),
    )


def put(pool: Pool, ngrams: Int[Array, "B W N"], valid: Bool[Array, "B W"]) -> Pool:
    """Return the pool with the valid n-grams in it, one after the other.

    One that is there already becomes the latest; another takes an empty place or the oldest's.
    """
    rows = jnp.arange(pool.clock.shape[0], dtype=jnp.int32)
    for w in range(ngrams.shape[1]):
        new, takes = ngrams[:, w], valid[:, w]
        same = jnp.all(pool.ngrams == new[:, None, :], axis=2) & (pool.times > 0)
        # Found: the place of -1; not found: that of the smallest time, 0 where one is empty.
        place = jnp.argmin(jnp.where(same, -1, pool.times), axis=1)
        at = jnp.where(takes, place, pool.times.shape[1])
        clock = pool.clock + takes.astype(jnp.int32)
        pool = dataclasses.replace(
            pool,
            ngrams=pool.ngrams.at[rows, at].set(new, mode="drop"),
            times=pool.times.at[rows, at].set(clock, mode="drop"),
            clock=clock,
        )
    return pool


def candidates(pool: Pool, last: Int[Array, " B"], most: int) -> Candidates:
    """Return up to `most` continuations of the n-grams that begin with each `last`, latest first.

    Raises:
        ValueError: `most` is below 1 or above the pool's capacity.
    """
    capacity = pool.times.shape[1]
    if not 1 <= most <= capacity:
        raise ValueError(
            f"{most} candidates of a pool of {capacity} n-grams a sequence; ask for 1 to {capacity}"
        )
    fits = (pool.ngrams[:, :, 0] == last[:, None]) & (pool.times > 0)
    order = jnp.argsort(jnp.where(fits, -pool.times, 1), axis=1)[:, :most]
    tokens = jnp.take_along_axis(pool.ngrams, order[:, :, None], axis=1)[:, :, 1:]
    count = jnp.minimum(jnp.sum(fits, axis=1, dtype=jnp.int32), most)
    there = jnp.arange(most, dtype=jnp.int32)[None, :] < count[:, None]
    return Candidates(tokens=jnp.where(there[:, :, None], tokens, 0), count=count)


def pool_drafts(pool: Pool, last: Int[Array, " B"]) -> Drafts:
    """Return the latest continuation of each `last`: N - 1 drafts in a chain, or none."""
    found = candidates(pool, last, 1)
    tokens = found.tokens[:, 0]
    return Drafts(tokens=tokens, count=found.count * tokens.shape[1])


def window_ngrams(window: Int[Array, "B M W"], new: Int[Array, "B W"]) -> Int[Array, "B W N"]:
    """Return the n-gram of each column: the window's M = N - 1 tokens and the new one."""
    return jnp.concatenate([window, new[:, None, :]], axis=1).transpose(0, 2, 1)


def slide(window: Int[Array, "B M W"], new: Int[Array, "B W"]) -> Int[Array, "B M W"]:
    """Return the window of the next step: without its oldest row, with the new one."""
    return jnp.concatenate([window[:, 1:], new[:, None, :]], axis=1)
