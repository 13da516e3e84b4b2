"""Prompt lookup: what followed the last tokens when they stood there before.

The longest n-gram at the end of the sequence, of `min_match` to `max_match` tokens, is looked for
earlier in it; its continuation is the draft.  A continuation that reaches the end of the sequence
goes on with itself: a text that has begun to repeat is expected to go on repeating.

    draft i = tokens[s + (i mod (length - s))], s the position after the match

Source: Saxena, Prompt Lookup Decoding, 2023, github.com/apoorvumang/prompt-lookup-decoding.  There,
and in vLLM (`prompt_lookup_min`, `prompt_lookup_max`), the first occurrence is taken and the
continuation ends with the sequence; here the latest is the default.

A search compares B S max_match tokens, all at once; there is no state but the sequences themselves.
"""

import enum

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from infer.spec.context import Context, Drafts

MOST_MATCH = 256  # tokens that are compared at most: each is a step of the program


class Occurrence(enum.Enum):
    """Which of several equally long matches is taken."""

    LATEST = "latest"
    FIRST = "first"


def ngram_drafts(
    context: Context,
    *,
    k: int,
    min_match: int = 2,
    max_match: int = 5,
    occurrence: Occurrence = Occurrence.LATEST,
) -> Drafts:
    """Return k drafts for each sequence in which a match is found, none for the others.

    Args:
        context: the sequences.
        k: drafts; at least 1.
        min_match: tokens that must match; at least 1.
        max_match: tokens that are compared at most; `min_match` to 256.
        occurrence: which of the longest matches is taken.

    Raises:
        ValueError: k, min_match or max_match out of range.
    """
    check_drafts(k)
    check_matches(min_match, max_match)
    matched = match_lengths(context, max_match)
    longest = jnp.max(matched, axis=1)
    best = matched == longest[:, None]
    size = matched.shape[1]
    if occurrence is Occurrence.FIRST:
        end = jnp.argmax(best, axis=1)
    else:
        end = size - 1 - jnp.argmax(best[:, ::-1], axis=1)
    start = end.astype(jnp.int32) + 1
    period = jnp.maximum(context.lengths - start, 1)[:, None]
    at = start[:, None] + jnp.arange(k, dtype=jnp.int32)[None, :] % period
    tokens = jnp.take_along_axis(context.tokens, at, axis=1, mode="clip")
    found = longest >= min_match
    return Drafts(
        tokens=jnp.where(found[:, None], tokens, 0), count=jnp.where(found, k, 0).astype(jnp.int32)
    )


def match_lengths(context: Context, most: int) -> Int[Array, "B S"]:
    """Return how many tokens up to and including each position equal the last tokens of its
    sequence, `most` at most; 0 for the last position itself and for what is past the end.
    """
    tokens, lengths = context.tokens, context.lengths
    num_rows, size = tokens.shape
    position = jnp.arange(size, dtype=jnp.int32)[None, :]
    going = position < lengths[:, None] - 1
    matched = jnp.zeros((num_rows, size), jnp.int32)
    for back in range(min(most, size)):
        at = jnp.maximum(lengths - 1 - back, 0)[:, None]
        wanted = jnp.take_along_axis(tokens, at, axis=1, mode="clip")
        # tokens[position - back]; the first `back` columns wrap around and are masked.
        earlier = jnp.roll(tokens, back, axis=1)
        going = going & (earlier == wanted) & (position >= back)
        matched = matched + going.astype(jnp.int32)
    return matched


def check_drafts(k: int) -> None:
    """Raise ValueError for a number of drafts below 1."""
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1: drafts a round")


def check_matches(min_match: int, max_match: int) -> None:
    """Raise ValueError for lengths of n-grams that cannot be looked for."""
    if not 1 <= min_match <= max_match <= MOST_MATCH:
        raise ValueError(
            f"min_match is {min_match} and max_match {max_match}; 1 <= min_match <= max_match <= "
            f"{MOST_MATCH}: the shortest and the longest n-gram that is looked for"
        )
