"""Which drafts stand, and the token after them: exactly the target's distribution.

p_i and q_i are the target's and the drafter's distributions of token i of a round, given the drafts
before it; x_i is the draft, u_i a uniform number in [0, 1).

Token rule: x_i stands if all before it stand and u_i q_i(x_i) < p_i(x_i).  At the first that does
not, the token is drawn from (p_i - q_i)+, normalised.  Source: Leviathan et al., Fast Inference
from Transformers via Speculative Decoding, algorithm 1, arXiv:2211.17192; Chen et al.,
arXiv:2302.01318.

Block verification: with w_0 = 1, w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1),
Z_i = sum_x (w_i p_{i+1}(x) - q_{i+1}(x))+, h_i = Z_i / (Z_i + 1 - w_i) and h_n = w_n for n drafts,
the drafts up to the largest i with u_i < h_i stand, and the token after them is drawn from
(w_i p_{i+1} - q_{i+1})+, normalised.  On average it accepts at least as many drafts as the token
rule.  Source: Sun et al., Block Verification Accelerates Speculative Decoding, arXiv:2403.10444.

In both, after all n drafts the token is drawn from p_{n+1}.

Coupled: every position draws the token that plain sampling would draw there, from the same key; a
draft stands if it is that token.  The output equals plain seeded sampling token for token, and a
drafter that draws with the same noise agrees with it often.  Greedy rows do this with the argmax,
whatever the rule.

All arithmetic is float32.  A uniform number is a multiple of 2^-23, so each probability of
acceptance is off by at most 1.2e-7.
"""

import enum

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from infer.pytree import Leaf, pytree_dataclass
from infer.sampling import Role, draw_keys
from infer.spec.rounds import Round, plain_keys, round_keys
from infer.spec.target import check_positions


class Rule(enum.Enum):
    """How drafts are judged."""

    TOKEN = "token"
    BLOCK = "block"
    COUPLED = "coupled"


@pytree_dataclass
class Verified:
    """What a round emits."""

    num_accepted: Leaf  # int32 [B], drafts that stand
    tokens: Leaf  # int32 [B, k + 1], those drafts and the token after them; V where there is none
    count: Leaf  # int32 [B], num_accepted + 1


def verify(
    logits: Float[Array, "B k1 V"],
    draft_tokens: Int[Array, "B k"],
    draft_probs: Float[Array, "B k V"] | None,
    num_drafts: Int[Array, " B"],
    *,
    greedy: Bool[Array, " B"],
    round: Round,
    rule: Rule = Rule.BLOCK,
) -> Verified:
    """Return the drafts of each row that stand and the token after them.

    A position without a distribution (NaN, or -inf throughout) gives what `infer.sampling.sample`
    gives there, id 0 or the argmax; the caller, who sees the logits, ends such a row.

    Args:
        logits: of the target, as `target_logits` gives them: position i is after i drafts.
        draft_tokens: what is past a row's number of drafts is not looked at; an id that is no token
            falls.
        draft_probs: the distribution that each draft was drawn from, with `round_keys(round, k,
            Role.DRAFT)` or anything else that is independent of the round's other keys.  None: the
            drafts are a function of the tokens before the round, not drawn (one-hot q).
        num_drafts: 0 to k; more is taken as k.  It may depend on the drafts that it counts, never
            on one that it leaves out: to drop a draft for what it is would change the output.
        greedy: rows that are judged by the argmax.
        round: where the round begins.
        rule: how the other rows are judged.

    Raises:
        ValueError: k < 1; positions that do not fit the drafts; drafts of another vocabulary.
    """
    check_positions("logits", logits.shape, draft_tokens.shape)
    _check_vocabulary(logits.shape, None if draft_probs is None else draft_probs.shape)
    logits = logits.astype(jnp.float32)
    count = jnp.clip(num_drafts, 0, draft_tokens.shape[1]).astype(jnp.int32)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    by_argmax = lambda: _first_difference(draft_tokens, best, count)

    def by_rule() -> tuple[Array, Array]:
        if rule is Rule.COUPLED:
            offset = jnp.broadcast_to(jnp.arange(best.shape[1], dtype=jnp.int32), best.shape)
            drawn = _draw(logits, plain_keys(round, offset))
            accepted, token = _first_difference(draft_tokens, drawn, count)
        else:
            accepted, token = _judge(logits, draft_tokens, draft_probs, count, round, rule)
        exact, certain = by_argmax()
        return jnp.where(greedy, exact, accepted), jnp.where(greedy, certain, token)

    accepted, token = lax.cond(jnp.all(greedy), by_argmax, by_rule)
    return _emitted(draft_tokens, accepted, token, logits.shape[2])


def verify_equal(
    draft_tokens: Int[Array, "B k"],
    drawn: Int[Array, "B k1"],
    num_drafts: Int[Array, " B"],
    *,
    vocab_size: int,
) -> Verified:
    """Return the drafts that equal what was drawn at their positions, and the next of those drawn.

    The coupled mode and greedy decoding for a caller that draws itself: `drawn[:, i]` is the token
    of the plain draw after i drafts.  Arguments as those of `verify`.
    """
    check_positions("drawn", drawn.shape, draft_tokens.shape)
    count = jnp.clip(num_drafts, 0, draft_tokens.shape[1]).astype(jnp.int32)
    accepted, token = _first_difference(draft_tokens, drawn.astype(jnp.int32), count)
    return _emitted(draft_tokens, accepted, token, vocab_size)


def _check_vocabulary(logits: tuple[int, ...], probs: tuple[int, ...] | None) -> None:
    if probs is None:
        return
    if probs[-1] != logits[-1]:
        raise ValueError(
            f"the drafter's distributions are over {probs[-1]} tokens and the target's over "
            f"{logits[-1]}; both must be over the target's: map them with "
            "infer.spec.vocabulary.probs_on_target"
        )
    if probs[0] != logits[0] or probs[1] != logits[1] - 1:
        raise ValueError(
            f"draft_probs is {list(probs)} for logits {list(logits)}; it must be "
            f"[{logits[0]}, {logits[1] - 1}, {logits[2]}]: one distribution a draft"
        )


def _first_difference(
    draft_tokens: Array, drawn: Array, count: Array
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Return how many leading drafts equal what was drawn, and what was drawn after them."""
    same = (draft_tokens == drawn[:, :-1]) & _drafted(draft_tokens, count)
    accepted = _leading(same)
    return accepted, _pick(drawn, accepted)


def _judge(
    logits: Array,
    draft_tokens: Array,
    draft_probs: Array | None,
    count: Array,
    round: Round,
    rule: Rule,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Return how many drafts the token rule or block verification accepts, and the next token."""
    num_drafts, vocab = draft_tokens.shape[1], logits.shape[2]
    p = _probabilities(logits)
    # An id that is no token has no probability: it falls, and nothing reads past the end for it.
    is_token = (draft_tokens >= 0) & (draft_tokens < vocab)
    ours = jnp.where(is_token, _at(p[:, :-1], draft_tokens), 0.0)
    if draft_probs is None:
        q, theirs = jax.nn.one_hot(draft_tokens, vocab, dtype=jnp.float32), jnp.ones_like(ours)
    else:
        q = draft_probs.astype(jnp.float32)
        theirs = _at(q, draft_tokens)
    uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))
    u = uniform(round_keys(round, num_drafts, Role.ACCEPT))
    if rule is Rule.TOKEN:
        stands = (u * theirs < ours) & _drafted(draft_tokens, count)
        accepted = _leading(stands)
        weight = jnp.ones_like(u[:, 0])
    else:
        accepted, weight = _accepted_by_block(p, q, u, ours, theirs, count)
    left = residual(_pick(p, accepted), _pick(q, jnp.minimum(accepted, num_drafts - 1)), weight)
    all_stand = accepted == count
    bonus_keys = plain_keys(round, accepted[:, None])[:, 0]
    keys = jnp.where(all_stand, bonus_keys, recovery_keys(round, accepted))
    choice = jnp.where(all_stand[:, None], _pick(logits, accepted), jnp.log(left))
    return accepted, _draw(choice, keys)


def _accepted_by_block(
    p: Array, q: Array, u: Array, ours: Array, theirs: Array, count: Array
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Return the number of drafts that stand, and w at that number."""
    num_drafts = u.shape[1]
    # A draft that float32 gives no probability was drawn all the same: p / q is large.
    drawn = theirs >= jnp.finfo(jnp.float32).tiny
    ratio = jnp.where(drawn, ours / jnp.where(drawn, theirs, 1.0), jnp.where(ours > 0, 1e30, 0.0))
    w = jnp.ones_like(u[:, 0])
    accepted, weight = jnp.zeros_like(count), w
    for i in range(1, num_drafts + 1):
        w = jnp.minimum(w * ratio[:, i - 1], 1.0)
        h = w
        if i < num_drafts:
            mass = jnp.sum(jnp.maximum(w[:, None] * p[:, i] - q[:, i], 0.0), axis=1)
            rest = mass + 1.0 - w
            # Nothing left and w = 1: p and q agree at the next position, which accepts for certain.
            inner = jnp.where(rest > 0, mass / jnp.where(rest > 0, rest, 1.0), 1.0)
            # A position without a distribution ends the sequence: this draft is the last there is.
            ends = (count == i) | ~jnp.any(p[:, i] > 0, axis=1)
            h = jnp.where(ends, w, inner)
        stands = (u[:, i - 1] < h) & (i <= count)
        accepted, weight = jnp.where(stands, i, accepted), jnp.where(stands, w, weight)
    return accepted, weight


def residual(
    p: Float[Array, "B V"], q: Float[Array, "B V"], weight: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Return (weight p - q)+, not normalised; p where nothing is left, as where p equals q."""
    left = jnp.maximum(weight[:, None] * p - q, 0.0)
    return jnp.where(jnp.any(left > 0, axis=1, keepdims=True), left, p)


def recovery_keys(round: Round, accepted: Int[Array, " B"]) -> Array:
    """Return the key [B] of the draw from the residual after `accepted` drafts; its noise is not
    that of the draft that fell.
    """
    keys = draw_keys(round.key, round.choice, round.position, Role.RECOVER)
    return jax.vmap(jax.random.fold_in)(keys, accepted)


def _probabilities(logits: Array) -> Array:
    """Return the softmax, and zeros where logits have no largest number."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    sane = jnp.isfinite(top)
    weights = jnp.exp(jnp.where(sane, logits - jnp.where(sane, top, 0.0), -jnp.inf))
    # The largest weight is 1: the sum is below that only where there is none.
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1.0)


def _draw(logits: Float[Array, "*rows V"], keys: Array) -> Int[Array, "*rows"]:
    """Return one token a row: the argmax of logits and Gumbel noise, as in `infer.sampling`."""
    gumbel = lambda key: jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)
    for _ in keys.shape:
        gumbel = jax.vmap(gumbel)
    # NaN is no answer here, and must not win.
    clean = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    return jnp.argmax(clean + gumbel(keys), axis=-1).astype(jnp.int32)


def _leading(stands: Bool[Array, "B k"]) -> Int[Array, " B"]:
    """Return how many drafts stand before the first that does not."""
    through = jnp.cumprod(stands.astype(jnp.int32), axis=1, dtype=jnp.int32)
    return jnp.sum(through, axis=1, dtype=jnp.int32)


def _drafted(draft_tokens: Array, count: Array) -> Bool[Array, "B k"]:
    return jnp.arange(draft_tokens.shape[1], dtype=jnp.int32)[None, :] < count[:, None]


def _at(values: Float[Array, "B k V"], tokens: Int[Array, "B k"]) -> Float[Array, "B k"]:
    return jnp.take_along_axis(values, tokens[:, :, None], axis=2, mode="clip")[:, :, 0]


def _pick(values: Array, index: Int[Array, " B"]) -> Array:
    """Return values[b, index[b]] of each row."""
    return values[jnp.arange(values.shape[0], dtype=jnp.int32), index]


def _emitted(draft_tokens: Array, accepted: Array, token: Array, vocab: int) -> Verified:
    num_rows, num_drafts = draft_tokens.shape
    column = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None, :]
    last = jnp.full((num_rows, 1), vocab, jnp.int32)
    drafts = jnp.concatenate([draft_tokens.astype(jnp.int32), last], axis=1)
    at = accepted[:, None]
    tokens = jnp.where(column < at, drafts, jnp.where(column == at, token[:, None], vocab))
    return Verified(num_accepted=accepted, tokens=tokens, count=accepted + 1)
