"""How many drafts a round may have: what rounds have brought, over what they cost.

The number of drafts has a few values, the tiers 0 = t_0 < t_1 < ... < t_n = k.  A limit t lets a
round have at most t drafts; it runs in the smallest tier that holds the drafts it has.  With N_t
the tokens a row and turn under limit t, and C_t the seconds of such a turn,

    limit = argmax_t N_t / C_t

unless the limit in force is within 5% of that.  C_t = sum_w share_t(w) seconds(w): how often a turn
under t ran in tier w is observed, what that costs is data.  Rounds under t show what smaller limits
would have brought.  Larger ones are tried from time to time: after 16 turns, and each time that
they do not pay, after twice as many, up to 256.

The choice looks at earlier rounds only.  A limit that depended on the drafts it is for would change
the output (see `verify`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from infer.pytree import Leaf, pytree_dataclass

MARGIN = 0.05  # by which another limit must be faster
MEMORY = 16  # turns over which what was observed is forgotten
FIRST_WAIT, LONGEST_WAIT = 16, 256  # turns
NOT_FORCED = -1


@pytree_dataclass
class Policy:
    """What is known of n + 1 tiers."""

    seconds: Leaf  # f32 [n + 2], of a turn in each tier, and of one that drafted in vain
    tokens: Leaf  # f32 [n + 1], N_t, a running mean
    share: Leaf  # f32 [n + 1, n + 2], share_t(w), a running mean
    limit: Leaf  # int32 [], index of the tier in force
    idle: Leaf  # int32 [], turns since the largest tier was allowed
    wait: Leaf  # int32 [], turns after which it is again
    forced: Leaf  # int32 [2], limit and tier of every turn, to time them; NOT_FORCED = neither


def fresh(tiers: tuple[int, ...], seconds: Float[Array, " n2"], adaptive: bool) -> Policy:
    """Return what is believed before the first round: that half of the drafts stand."""
    count = len(tiers)
    sizes = jnp.asarray(tiers, jnp.float32)
    largest = count - 1
    return Policy(
        seconds=seconds,
        tokens=1.0 + 0.5 * sizes,
        share=jnp.eye(count, count + 1, dtype=jnp.float32),
        limit=jnp.asarray(largest, jnp.int32),
        idle=jnp.zeros((), jnp.int32),
        wait=jnp.asarray(FIRST_WAIT if adaptive else 0, jnp.int32),
        forced=jnp.full(2, NOT_FORCED, jnp.int32),
    )


def limit_now(policy: Policy) -> Int[Array, ""]:
    """Return the index of the tier that bounds the drafts of this turn."""
    largest = policy.tokens.shape[0] - 1
    limit = jnp.where(policy.idle >= policy.wait, largest, policy.limit)
    return jnp.where(policy.forced[0] == NOT_FORCED, limit, policy.forced[0]).astype(jnp.int32)


def width_for(
    policy: Policy, tiers: tuple[int, ...], count: Int[Array, " B"]
) -> tuple[Int[Array, ""], Int[Array, " B"]]:
    """Return the index of the tier that a round with so many drafts runs in, and the drafts: none
    where tier 0 is forced.
    """
    forced = policy.forced[1]
    count = jnp.where(forced == 0, 0, count)
    width = _smallest(tiers, jnp.max(count))
    return jnp.where(forced == NOT_FORCED, width, forced).astype(jnp.int32), count


def learn(
    policy: Policy,
    tiers: tuple[int, ...],
    *,
    limit: Int[Array, ""],
    rows: Bool[Array, " B"],
    count: Int[Array, " B"],
    accepted: Int[Array, " B"],
    adaptive: bool,
) -> Policy:
    """Return what is known after a turn.

    Args:
        policy: before it.
        tiers: t_0 to t_n.
        limit: the index of the turn's own.
        rows: sequences that generated.
        count: their drafts.
        accepted: those that stand.
        adaptive: whether to choose at all; False stays at the largest tier.
    """
    if not adaptive:
        return policy
    num_tiers = len(tiers)
    index = jnp.arange(num_tiers, dtype=jnp.int32)
    sizes = jnp.asarray(tiers, jnp.int32)
    num_rows = jnp.maximum(jnp.sum(rows, dtype=jnp.int32), 1).astype(jnp.float32)
    stand = jnp.where(rows[None, :], jnp.minimum(accepted[None, :], sizes[:, None]), 0)
    tokens = 1.0 + jnp.sum(stand, axis=1).astype(jnp.float32) / num_rows
    most = jnp.max(jnp.where(rows, count, 0))
    width = jnp.stack([_smallest(tiers, jnp.minimum(most, t)) for t in tiers])
    # A turn that found no draft cost the drafter's time; under limit 0 nobody drafts.
    width = jnp.where((width == 0) & (index > 0), num_tiers, width)
    ran = width[:, None] == jnp.arange(num_tiers + 1, dtype=jnp.int32)[None, :]
    shown = (index <= limit) & jnp.any(rows)
    mix = lambda old, new: old + (new - old) / MEMORY
    known = dataclasses.replace(
        policy,
        tokens=jnp.where(shown, mix(policy.tokens, tokens), policy.tokens),
        share=jnp.where(shown[:, None], mix(policy.share, ran.astype(jnp.float32)), policy.share),
    )
    rate = rates(known)
    best = jnp.argmax(rate).astype(jnp.int32)
    better = rate[best] > rate[policy.limit] * (1 + MARGIN)
    chosen = jnp.where(better, best, policy.limit)
    tried = limit == num_tiers - 1
    in_vain = tried & (chosen < num_tiers - 1)
    longer = jnp.minimum(policy.wait * 2, LONGEST_WAIT)
    wait = jnp.where(in_vain & (policy.limit < num_tiers - 1), longer, policy.wait)
    learnt = dataclasses.replace(
        known,
        limit=chosen,
        idle=jnp.where(tried, 0, policy.idle + jnp.any(rows).astype(jnp.int32)),
        wait=jnp.where(chosen == num_tiers - 1, FIRST_WAIT, wait),
    )
    # A turn that is timed may throw drafts away.
    timed = policy.forced[0] != NOT_FORCED
    return jax.tree.map(lambda new, old: jnp.where(timed, old, new), learnt, policy)


def rates(policy: Policy) -> Float[Array, " n1"]:
    """Return the tokens a row and second under each limit."""
    return policy.tokens / (policy.share @ policy.seconds)


def stated_seconds(tiers: tuple[int, ...], num_slots: int, weights: int) -> list[float]:
    """Return the costs that are taken where none are measured, in plain decode turns.

    A pass over n tokens costs (weights + n) / (weights + B), where `weights` tokens take as long in
    arithmetic as the weights in reading.
    """
    passes = [(weights + num_slots * (t + 1)) / (weights + num_slots) for t in tiers]
    return [*passes, passes[0]]


def _smallest(tiers: tuple[int, ...], count: Int[Array, ""]) -> Int[Array, ""]:
    """Return the index of the smallest tier that holds so many drafts."""
    return jnp.sum(jnp.asarray(tiers, jnp.int32) < count, dtype=jnp.int32)
