"""Suffix decoding: the likeliest continuation, by count, of the longest suffix seen before.

The earlier occurrences of the longest suffix (at most `max_depth` tokens), the latest 64 of them,
vote for the next token; those that agree with the most frequent one vote for the token after it,
and so on.  The share of votes is the estimated probability of a draft, their product that of all
drafts up to it.  Drafting ends when the product falls below `min_token_prob`, or after
`spec_factor` times as many drafts as tokens matched: a longer match earns longer drafts.

Source: Oliaro et al., SuffixDecoding, section 3, arXiv:2411.04975.  There the counts come from a
suffix tree, of earlier requests too, and shorter matches compete by score; here from a scan of the
sequence itself, which needs no state.  Of equally frequent tokens the one that stood there latest
is taken.
"""

import math

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from infer.spec.context import Context, Drafts
from infer.spec.ngram import MOST_MATCH, check_drafts, match_lengths

MOST_VOTERS = 64


def suffix_drafts(
    context: Context,
    *,
    k: int,
    max_depth: int = 24,
    min_match: int = 1,
    spec_factor: float = 1.0,
    min_token_prob: float = 0.1,
) -> Drafts:
    """Return up to k drafts for each sequence.

    Args:
        context: the sequences.
        k: drafts at most; at least 1.
        max_depth: tokens of the suffix that are compared at most; `min_match` to 256.
        min_match: tokens that must match; at least 1.
        spec_factor: drafts a matched token; above 0.
        min_token_prob: least estimated probability that all drafts up to one stand; 0 to 1.

    Raises:
        ValueError: a parameter out of range.
    """
    check_drafts(k)
    check_options(max_depth, min_match, spec_factor, min_token_prob)
    matched = match_lengths(context, max_depth)
    longest = jnp.max(matched, axis=1)
    # At most k, before a large factor leaves the integers.
    most = jnp.minimum(jnp.floor(spec_factor * longest.astype(jnp.float32)), k).astype(jnp.int32)
    going = longest >= min_match
    at, voters = _latest(matched == longest[:, None], MOST_VOTERS)
    chance = jnp.ones(longest.shape, jnp.float32)
    tokens, count = [], jnp.zeros_like(longest)
    for i in range(k):
        voters = voters & (at + (i + 1) < context.lengths[:, None])
        following = jnp.take_along_axis(context.tokens, at + (i + 1), axis=1, mode="clip")
        token, share = _most_frequent(following, voters)
        chance = chance * share
        going = going & (i < most) & (share > 0) & (chance >= min_token_prob)
        tokens.append(jnp.where(going, token, 0))
        count = count + going.astype(jnp.int32)
        voters = voters & (following == token[:, None])
    return Drafts(tokens=jnp.stack(tokens, axis=1), count=count)


def _latest(marked: Bool[Array, "B S"], most: int) -> tuple[Int[Array, "B C"], Bool[Array, "B C"]]:
    """Return the last `most` marked positions, the latest first, and which of them there are."""
    num_rows, size = marked.shape
    most = min(most, size)
    rank = jnp.cumsum(marked[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1] - 1
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    place = jnp.where(marked & (rank < most), rank, most)
    position = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None, :], marked.shape)
    at = jnp.zeros((num_rows, most), jnp.int32).at[rows, place].set(position, mode="drop")
    total = jnp.sum(marked, axis=1, dtype=jnp.int32)[:, None]
    return at, jnp.arange(most, dtype=jnp.int32)[None, :] < total


def _most_frequent(
    tokens: Int[Array, "B C"], voters: Bool[Array, "B C"]
) -> tuple[Int[Array, " B"], Array]:
    """Return the token that most voters have, the first of equals, and its share of the votes;
    share 0 where there is no voter.
    """
    same = (tokens[:, :, None] == tokens[:, None, :]) & voters[:, None, :]
    votes = jnp.where(voters, jnp.sum(same, axis=2, dtype=jnp.int32), 0)
    best = jnp.argmax(votes, axis=1).astype(jnp.int32)[:, None]
    pick = lambda values: jnp.take_along_axis(values, best, axis=1)[:, 0]
    total = jnp.sum(voters, axis=1, dtype=jnp.int32)
    share = pick(votes).astype(jnp.float32) / jnp.maximum(total, 1).astype(jnp.float32)
    return pick(tokens), share


def check_options(
    max_depth: int, min_match: int, spec_factor: float, min_token_prob: float
) -> None:
    """Raise ValueError for a parameter of `suffix_drafts` that is out of range."""
    if not 1 <= min_match <= max_depth <= MOST_MATCH:
        raise ValueError(
            f"min_match is {min_match} and max_depth {max_depth}; 1 <= min_match <= max_depth <= "
            f"{MOST_MATCH}: the shortest and the longest suffix that is looked for"
        )
    if not 0 < spec_factor < math.inf:
        raise ValueError(
            f"spec_factor is {spec_factor}; it must be above 0 and finite: drafts a matched token"
        )
    if not 0 <= min_token_prob <= 1:
        raise ValueError(f"min_token_prob is {min_token_prob}; it is a probability, 0 to 1")
