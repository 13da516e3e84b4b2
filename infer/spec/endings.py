"""Where a sequence ends inside the tokens that a round emits."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from infer.pytree import Leaf, pytree_dataclass
from infer.sampling import SamplingState, is_stop
from infer.spec.verify import Verified


@pytree_dataclass
class Ending:
    """What is left of a round's tokens."""

    count: Leaf  # int32 [B], tokens up to the one that ends the sequence, itself included
    stopped: Leaf  # bool [B], the last of them is a stop id
    finished: Leaf  # bool [B], it is that, or the last that max_tokens allows


def cut(verified: Verified, state: SamplingState, num_generated: Int[Array, " B"]) -> Ending:
    """Return how many of a round's tokens are output, token by token as without speculation: the
    first stop id at or past `min_tokens`, or the token that reaches `max_tokens`, is the last.

    Args:
        verified: the round's tokens.
        state: B rows.
        num_generated: output tokens before the round.
    """
    tokens = verified.tokens
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    emitted = column < verified.count[:, None]
    number = num_generated[:, None] + column + 1
    # Padding has the id that marks unused stop ids.
    is_stop_id = jax.vmap(is_stop, in_axes=(1, None), out_axes=1)(tokens, state) & emitted
    stops = is_stop_id & (number >= state.min_tokens[:, None])
    ends = stops | (emitted & (number >= state.max_tokens[:, None]))
    at = jnp.argmax(ends, axis=1).astype(jnp.int32)
    finished = jnp.any(ends, axis=1)
    stopped = jnp.any(stops & (column == at[:, None]), axis=1) & finished
    return Ending(
        count=jnp.where(finished, at + 1, verified.count), stopped=stopped, finished=finished
    )
