"""How a drafter that is a model draws: as plain sampling would, from its own logits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from infer.pytree import Leaf, pytree_dataclass
from infer.sampling import History, SamplingState, filtered_logits
from infer.sampling import process_logits as plain_process_logits
from infer.spec.target import is_greedy

Process = Callable[[Array, SamplingState, History], Array]


@pytree_dataclass
class Drawn:
    """One draft for each of B sequences."""

    tokens: Leaf  # int32 [B]
    probs: Leaf  # f32 [B, V] they were drawn from; zeros in greedy rows
    there: Leaf  # bool [B], there was something to draw


def draw(
    raw: Float[Array, "B V"],
    state: SamplingState,
    history: History,
    keys: Array,
    *,
    process_logits: Process = plain_process_logits,
) -> Drawn:
    """Draw a draft from a drafter's logits under each request's own masks, penalties, temperature
    and filters; greedy rows take the argmax.

    Args:
        raw: over the target's ids.
        state: B rows.
        history: the sequences with the drafts before this one, as if they had been emitted.
        keys: typed, [B]; of the round's drafts, or, for the coupled rule, of the plain draws.
        process_logits: the implementation of masks and penalties.
    """
    x = process_logits(raw.astype(jnp.float32), state, history)
    greedy = is_greedy(state)
    best = jnp.argmax(x, axis=-1).astype(jnp.int32)
    # A row of NaN or of -inf, as where the drafter has none of the tokens that are allowed, has
    # nothing to propose.
    there = jnp.isfinite(jnp.max(x, axis=-1))

    def by_chance() -> tuple[Array, Array]:
        scaled = filtered_logits(x, state)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, scaled.shape[1:], jnp.float32))(keys)
        token = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
        probs = jax.nn.softmax(jnp.where(there[:, None], scaled, 0.0), axis=-1)
        return jnp.where(greedy, best, token), jnp.where(greedy[:, None], 0.0, probs)

    certain = lambda: (best, jnp.zeros_like(x))
    tokens, probs = lax.cond(jnp.all(greedy), certain, by_chance)
    return Drawn(tokens=tokens, probs=probs, there=there)
