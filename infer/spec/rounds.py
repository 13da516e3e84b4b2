"""The random numbers of a round of speculation.

A round begins at an output position of its request, and no two rounds of a request at the same one,
since each emits a token.  The i-th number that a round draws for a role has the key

    fold_in(fold_in(fold_in(fold_in(request key, choice), first position), role), i)

The position of the token alone would not do.  Block verification looks at drafts that it then
throws away; if the next round drew at those positions from the same keys again, its drafts and its
coins would depend on why the last round ended, and the output would not be the target's.

What needs no draft (the token after the last accepted draft, and every token of the coupled mode)
has the key of a plain draw at its position, so that a row without drafts emits what it would have
emitted without speculation.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from infer.pytree import Leaf, pytree_dataclass
from infer.sampling import Role, draw_keys


@pytree_dataclass
class Round:
    """Where a round begins in each of B sequences."""

    key: Leaf  # typed threefry keys [B], of the requests
    choice: Leaf  # int32 [B], which of its prompt's parallel samples a row is
    position: Leaf  # int32 [B], output tokens before the round


def round_keys(round: Round, count: int, role: Role) -> Array:
    """Return typed keys [B, count]: of the draws that the round makes for `role`, in order."""
    keys = draw_keys(round.key, round.choice, round.position, role)
    index = jnp.arange(count, dtype=jnp.int32)
    return jax.vmap(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(index))(keys)


def plain_keys(round: Round, offset: Int[Array, "B C"]) -> Array:
    """Return typed keys [B, C]: of the plain draws at `offset` tokens after the round's first."""
    position = round.position[:, None] + offset
    one = lambda at: draw_keys(round.key, round.choice, at, Role.DRAW)
    return jax.vmap(one, in_axes=1, out_axes=1)(position)
