"""Lookahead decoding as a drafter: Jacobi iteration over a chain of guesses, and the n-grams that
it leaves behind.

The guesses for the next k tokens go through the model in the pass that verifies them.  Its argmax
after each fed token is the next guess for the position after it: that is a Jacobi iteration.  With
f_t(p) the token fed at position p in round t and y_t(p) the guess that came out for it,

    f_{t-N+2}(p), f_{t-N+3}(p + 1), ..., f_t(p + N - 2), y_t(p + N - 1)

is an n-gram of the trajectory: each token is what the model answered to the one before it.  The
latest go into a pool; one that begins with the sequence's last token replaces the guesses of the
next N - 1 positions.

Source: Fu et al., Break the Sequential Dependency of LLM Inference Using Lookahead Decoding,
sections 3.1 and 3.2, arXiv:2402.02057; Santilli et al., Accelerating Transformer Inference for
Translation via Parallel Decoding, arXiv:2305.10427.  There a window of N - 1 guesses a position
goes through the model, each seeing its own column, and several n-grams are verified side by side;
here there is one chain, which a causal pass over pages can verify, and the older rows of the window
are those of earlier rounds.

A guess depends on what earlier rounds fed and emitted, never on this round's random numbers, so
that q is one-hot.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from infer.cache.paged import PagedCache
from infer.errors import RequestError
from infer.models.params import Params
from infer.pytree import Leaf, pytree_dataclass, static
from infer.spec.drafters import Asked, Drafter, Proposal, Seen
from infer.spec.lookahead import Pool, empty_pool, pool_drafts, put

_NONE = -1  # no token is known there


@pytree_dataclass
class Trajectory:
    """What is carried for B slots."""

    pool: Pool
    fed: Leaf  # int32 [B, N - 2, k + 1], of earlier rounds, at the last token's position and after
    guesses: Leaf  # int32 [B, k], for the positions after the last token


@pytree_dataclass
class Lookahead(Drafter):
    """Drafts by Jacobi iteration and a pool of its n-grams; see `infer.spec.jacobi`.

    Attributes:
        n: tokens of an n-gram, 2 to k + 1.
        pool: n-grams kept a slot; at least 1.
    """

    n: int = static(default=3, kw_only=True)
    pool: int = static(default=64, kw_only=True)

    def __post_init__(self) -> None:
        Drafter.__post_init__(self)
        for name, least, most in (("n", 2, self.k + 1), ("pool", 1, 4096)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise RequestError(
                    f"{name} is {value!r}; it must be an integer from {least} to {most}"
                )

    def create(self, target: Params, num_slots: int) -> Trajectory:
        """Return empty pools, and no guesses."""
        return self._nothing(num_slots)

    def _nothing(self, num_slots: int) -> Trajectory:
        return Trajectory(
            pool=empty_pool(num_slots, capacity=self.pool, n=self.n),
            fed=jnp.full((num_slots, self.n - 2, self.k + 1), _NONE, jnp.int32),
            guesses=jnp.full((num_slots, self.k), _NONE, jnp.int32),
        )

    def reset(self, carry: Trajectory, slots: Array) -> Trajectory:
        """Empty the marked slots."""
        return _where(slots, self._nothing(slots.shape[0]), carry)

    def propose(
        self,
        target: Params,
        cache: PagedCache,
        carry: Trajectory,
        asked: Asked,
        implementation: str | None,
    ) -> tuple[Proposal, PagedCache, Trajectory]:
        """Return the pool's continuation of the last token, and guesses after it; where nothing is
        guessed the token before is repeated.
        """
        found = pool_drafts(carry.pool, asked.last_token)
        token, tokens = asked.last_token, []
        for i in range(self.k):
            guess = carry.guesses[:, i]
            token = jnp.where(guess == _NONE, token, guess)
            if i < self.n - 1:
                token = jnp.where(i < found.count, found.tokens[:, i], token)
            tokens.append(token)
        proposal = Proposal(tokens=jnp.stack(tokens, axis=1), probs=None, count=asked.most)
        return proposal, cache, carry

    def observe(
        self, target: Params, carry: Trajectory, seen: Seen, implementation: str | None
    ) -> Trajectory:
        """Take the round's guesses into the pool, and move on by the tokens that came out."""
        width = self.k + 1
        pad = lambda rows: jnp.pad(
            rows, ((0, 0), (0, width - rows.shape[1])), constant_values=_NONE
        )
        took_part = jnp.arange(seen.tokens.shape[1], dtype=jnp.int32)[None, :] < seen.fed[:, None]
        tokens = jnp.where(took_part, seen.tokens, _NONE)
        fed = jnp.concatenate([carry.fed, pad(tokens)[:, None]], axis=1)
        pool, guesses = carry.pool, pad(carry.guesses)
        if seen.logits is not None:
            answers = jnp.argmax(seen.logits, axis=-1).astype(jnp.int32)
            answers = jnp.where(took_part, answers, _NONE)
            ngrams = self._ngrams(fed, answers)
            valid = seen.rows[:, None] & jnp.all(ngrams != _NONE, axis=2)
            pool = put(pool, ngrams, valid)
            # Answer i is to fed token i: the guess for the token after it.
            guesses = pad(answers)
        new = Trajectory(
            pool=pool,
            fed=_shifted(fed[:, 1:], seen.count),
            guesses=_shifted(guesses[:, None], seen.count)[:, 0, : self.k],
        )
        return _where(seen.rows, new, carry)

    def _ngrams(self, fed: Int[Array, "B M W"], answers: Int[Array, "B T"]) -> Array:
        """Return the n-grams [B, T - M + 1, N] that end in an answer."""
        rows = self.n - 1
        columns = answers.shape[1] - rows + 1
        if columns < 1:
            return jnp.zeros((answers.shape[0], 0, self.n), jnp.int32)
        diagonal = [fed[:, m, m : m + columns] for m in range(rows)]
        return jnp.stack([*diagonal, answers[:, rows - 1 :]], axis=2)


def _shifted(rows: Int[Array, "B M W"], count: Int[Array, " B"]) -> Int[Array, "B M W"]:
    """Return each row's tokens `count` places to the left."""
    width = rows.shape[2]
    at = jnp.arange(width, dtype=jnp.int32)[None, None, :] + count[:, None, None]
    at = jnp.broadcast_to(at, rows.shape)
    moved = jnp.take_along_axis(rows, at, axis=2, mode="clip")
    return jnp.where(at < width, moved, _NONE)


def _where(slots: Array, new: Any, old: Any) -> Any:
    """Return `new` in the marked slots."""
    pick = lambda a, b: jnp.where(slots.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
    return jax.tree.map(pick, new, old)
