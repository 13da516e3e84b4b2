"""How many drafts a round may have: what rounds have brought, over what they cost.

The number of drafts has a few values, the tiers 0 = t_0 < t_1 < ... < t_n = k; a round runs in the
smallest tier that holds its drafts.  Once a turn has its drafts, c_b of them in row b, it keeps as
many as pay:

    tier = argmax_t (R + sum_b sum_{j <= min(c_b, t)} S_j) / seconds(tier that holds them)

where R rows generate and S_j is the probability that the first j drafts stand: one row's drafts do
not pay for a pass over k + 1 tokens of all rows; those of most rows may.  S_j is a_1 ... a_j, with
a_j the share of j-th drafts that stood of those before which all had.  A turn whose drafts are left
aside still tells a_1: whether its first drafts are the tokens that came out.

A batch ends with its last row, which rounds for the others would only delay.  So where nothing
waits for a slot, a round must also pay for the row with least drafts among those that have most to
do: for G_b, the larger of 1 + sum_{j <= c_b} S_j in row b and its running mean,

    min_b G_b / seconds(tier) > 1 / seconds(0)

Whether to ask for drafts at all follows from the tokens N of a row and turn with them, and the
seconds C = sum_w share(w) seconds(w) of such a turn, how often it ran in tier w being observed:

    ask if max(N / C, 1 / seconds(in vain)) > 1 / seconds(0)

with a margin of 2% for what is in force.  Where that says no, drafts are tried from time to time:
after 16 turns, and each time that they do not pay, after twice as many, up to 256.

The choice looks at earlier rounds, and at how many drafts there are.  One that depended on which
tokens they are would change the output (see `verify`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from infer.pytree import Leaf, pytree_dataclass

MARGIN = 0.02  # by which another limit must be faster, or a round than a plain turn
MEMORY = 16  # turns over which what was observed is forgotten
FIRST_WAIT, LONGEST_WAIT = 16, 256  # turns
GAIN_MEMORY = 4  # turns of a row's running means
MOST_TRUST = 2.0
FADING = 128  # turns over which a share that is not observed goes back to what is believed
# What is believed of a_1 and of a_2, ..., as if seen of so many drafts.
FIRST_STANDS, NEXT_STANDS, BELIEVED = 0.5, 0.9, 2.0
NOT_FORCED = -1


@pytree_dataclass
class Policy:
    """What is known of n + 1 tiers."""

    seconds: Leaf  # f32 [n + 2], of a turn in each tier, and of one that drafted in vain
    tokens: Leaf  # f32 [], N, a running mean
    share: Leaf  # f32 [n + 2], share(w), a running mean
    judged: Leaf  # f32 [k], drafts at each position before which all stood, fading
    stood: Leaf  # f32 [k], those of them that stood
    limit: Leaf  # int32 [], index of the largest tier in force: n, or 0 where none are asked for
    idle: Leaf  # int32 [], turns since drafts were asked for
    wait: Leaf  # int32 [], turns after which they are again
    forced: Leaf  # int32 [2], limit and tier of every turn, to time them; NOT_FORCED = neither


def fresh(tiers: tuple[int, ...], seconds: Float[Array, " n2"], adaptive: bool) -> Policy:
    """Return what is believed before the first round: that half of the drafts stand."""
    largest = len(tiers) - 1
    return Policy(
        seconds=seconds,
        tokens=jnp.asarray(1.0 + 0.5 * tiers[-1], jnp.float32),
        share=jnp.zeros(len(tiers) + 1, jnp.float32).at[largest].set(1.0),
        judged=jnp.zeros(tiers[-1], jnp.float32),
        stood=jnp.zeros(tiers[-1], jnp.float32),
        limit=jnp.asarray(largest, jnp.int32),
        idle=jnp.zeros((), jnp.int32),
        wait=jnp.asarray(FIRST_WAIT if adaptive else 0, jnp.int32),
        forced=jnp.full(2, NOT_FORCED, jnp.int32),
    )


def limit_now(policy: Policy) -> Int[Array, ""]:
    """Return the index of the tier that bounds the drafts of this turn."""
    largest = policy.seconds.shape[0] - 2
    limit = jnp.where(policy.idle >= policy.wait, largest, policy.limit)
    return jnp.where(policy.forced[0] == NOT_FORCED, limit, policy.forced[0]).astype(jnp.int32)


def width_for(
    policy: Policy,
    tiers: tuple[int, ...],
    rows: Bool[Array, " B"],
    count: Int[Array, " B"],
    least: Float[Array, ""],
    *,
    adaptive: bool,
) -> tuple[Int[Array, ""], Int[Array, " B"]]:
    """Return the index of the tier that a turn runs in, and the drafts of each row that it keeps.

    Args:
        policy: what is known.
        tiers: t_0 to t_n.
        rows: sequences that generate.
        count: their drafts.
        least: min_b G_b, infinity where requests wait for slots.
        adaptive: False keeps all drafts.
    """
    sizes = jnp.asarray(tiers, jnp.int32)
    largest = len(tiers) - 1
    count = jnp.where(rows, count, 0)
    choice = jnp.asarray(largest, jnp.int32)
    if adaptive:
        kept = jnp.minimum(count[None, :], sizes[:, None])
        width = jnp.stack([_smallest(tiers, jnp.max(c)) for c in kept])
        tokens = jnp.where(rows[None, :], expected(policy, kept), 0)
        # The drafter's time is spent.
        cost = policy.seconds[jnp.where(width == 0, largest + 1, width)]
        last_pays = least * policy.seconds[0] > cost * (1 + MARGIN)
        rate = jnp.where((width == 0) | last_pays, jnp.sum(tokens, axis=1) / cost, 0)
        best = jnp.argmax(rate).astype(jnp.int32)
        choice = jnp.where(rate[best] > rate[0] * (1 + MARGIN), best, 0)
    forced = policy.forced[1]
    not_forced = forced == NOT_FORCED
    most = jnp.where(not_forced, sizes[choice], jnp.where(forced == 0, 0, sizes[largest]))
    count = jnp.minimum(count, most)
    width = jnp.where(not_forced, _smallest(tiers, jnp.max(count)), forced)
    return width.astype(jnp.int32), count


def expected(policy: Policy, count: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Return the tokens that a row with `count` drafts should get of a round."""
    return (1 + jnp.concatenate([jnp.zeros(1), jnp.cumsum(survival(policy))]))[count]


def survival(policy: Policy) -> Float[Array, " k"]:
    """Return the probabilities S_j that the first j drafts of a row stand."""
    believed = jnp.where(jnp.arange(policy.judged.shape[0]) == 0, FIRST_STANDS, NEXT_STANDS)
    return jnp.cumprod((policy.stood + BELIEVED * believed) / (policy.judged + BELIEVED))


def trusted(
    policy: Policy,
    trust: Float[Array, " B"],
    *,
    count: Int[Array, " B"],
    accepted: Int[Array, " B"],
    aside: Bool[Array, " B"],
    matched: Bool[Array, " B"],
) -> Float[Array, " B"]:
    """Return T after a turn; arguments as those of `learn`, `policy` as it was before."""
    first = survival(policy)[0]
    ratio = jnp.where(
        count > 0,
        accepted.astype(jnp.float32) / jnp.maximum(expected(policy, count) - 1, first),
        matched.astype(jnp.float32) / first,
    )
    new = trust + (jnp.minimum(ratio, MOST_TRUST) - trust) / GAIN_MEMORY
    return jnp.where((count > 0) | aside, new, trust)


def learn(
    policy: Policy,
    tiers: tuple[int, ...],
    *,
    limit: Int[Array, ""],
    rows: Bool[Array, " B"],
    count: Int[Array, " B"],
    accepted: Int[Array, " B"],
    aside: Bool[Array, " B"],
    matched: Bool[Array, " B"],
    adaptive: bool,
) -> Policy:
    """Return what is known after a turn.

    Args:
        policy: before it.
        tiers: t_0 to t_n.
        limit: the index of the turn's own.
        rows: sequences that generated.
        count: their drafts that were judged.
        accepted: those that stand.
        aside: rows whose drafts were left aside in a plain turn.
        matched: whose first draft was the token that came out.
        adaptive: whether to choose at all; False stays at the largest tier.
    """
    if not adaptive:
        return policy
    largest = len(tiers) - 1
    generates, tried = jnp.any(rows), limit > 0
    num_rows = jnp.maximum(jnp.sum(rows, dtype=jnp.int32), 1).astype(jnp.float32)
    stand = jnp.sum(jnp.where(rows, accepted, 0), dtype=jnp.int32)
    tokens = 1.0 + stand.astype(jnp.float32) / num_rows
    width = _smallest(tiers, jnp.max(jnp.where(rows, count, 0)))
    ran = jnp.where(width == 0, largest + 1, width)
    share = (jnp.arange(largest + 2, dtype=jnp.int32) == ran).astype(jnp.float32)
    mix = lambda old, new: jnp.where(tried & generates, old + (new - old) / MEMORY, old)
    judged, stood = _seen(policy.judged.shape[0], rows, count, accepted, aside, matched)
    keeps = 1 - jnp.where(judged > 0, 1 / MEMORY, jnp.where(generates, 1 / FADING, 0))
    known = dataclasses.replace(
        policy,
        judged=policy.judged * keeps + judged,
        stood=policy.stood * keeps + stood,
        tokens=mix(policy.tokens, tokens),
        share=mix(policy.share, share),
    )
    with_drafts, without = rates(known)
    asks = policy.limit > 0
    asks = jnp.where(
        asks, without <= with_drafts * (1 + MARGIN), with_drafts > without * (1 + MARGIN)
    )
    longer = jnp.minimum(policy.wait * 2, LONGEST_WAIT)
    wait = jnp.where(tried & ~asks & (policy.limit == 0), longer, policy.wait)
    learnt = dataclasses.replace(
        known,
        limit=jnp.where(asks, largest, 0).astype(jnp.int32),
        idle=jnp.where(tried, 0, policy.idle + generates.astype(jnp.int32)),
        wait=jnp.where(asks, FIRST_WAIT, wait),
    )
    # A turn that is timed may throw drafts away.
    timed = policy.forced[0] != NOT_FORCED
    return jax.tree.map(lambda new, old: jnp.where(timed, old, new), learnt, policy)


def _seen(
    k: int, rows: Array, count: Array, accepted: Array, aside: Array, matched: Array
) -> tuple[Float[Array, " k"], Float[Array, " k"]]:
    """Return how many drafts were judged at each position after all before them had stood, and how
    many stood; of what was left aside, the first.
    """
    position = jnp.arange(k, dtype=jnp.int32)[:, None]
    rows, count, accepted, aside, matched = (
        x[None, :] for x in (rows, count, accepted, aside, matched)
    )
    number = lambda mask: jnp.sum(rows & mask, axis=1).astype(jnp.float32)
    judged = number((position < count) & (position <= accepted))
    stood = number((position < count) & (position < accepted))
    first = (position == 0) & aside
    return judged + number(first), stood + number(first & matched)


def rates(policy: Policy) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the tokens a row and second where drafts are asked for, and where they are not.

    Those that are asked for need not be judged.
    """
    observed = policy.tokens / jnp.sum(policy.share * policy.seconds)
    return jnp.maximum(observed, 1 / policy.seconds[-1]), 1 / policy.seconds[0]


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
