"""The sampling parameters of many requests as arrays."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from infer.pytree import Leaf, pytree_dataclass


@pytree_dataclass
class SamplingState:
    """Sampling parameters of R requests: features switch by value, never by structure.

    V, one past the end of the vocabulary, marks what is unused.  Word and stop sequences are padded
    with V on the left.  The numbers of columns (E, C, A, W, L) are static caps from short lists.
    """

    temperature: Leaf  # f32 [R], 0 = greedy
    top_k: Leaf  # int32 [R], below 1 or V or more = off
    top_p: Leaf  # f32 [R], 1 = off
    min_p: Leaf  # f32 [R], 0 = off
    presence: Leaf  # f32 [R], 0 = off
    frequency: Leaf  # f32 [R], 0 = off
    repetition: Leaf  # f32 [R], 1 = off
    max_tokens: Leaf  # int32 [R]
    min_tokens: Leaf  # int32 [R]
    stop_ids: Leaf  # int32 [R, E]
    bias_ids: Leaf  # int32 [R, C]
    bias: Leaf  # f32 [R, C]
    allowed: Leaf  # bool [R, A], A = V, or 0 where no request has a list
    bad_words: Leaf  # int32 [R, W, L]
    key: Leaf  # typed threefry keys [R]

    @property
    def num_requests(self) -> int:
        """R."""
        return self.temperature.shape[0]


def take(state: SamplingState, rows: Int[Array, " B"]) -> SamplingState:
    """Return the parameters of the given requests; past the end, those of the last request."""
    rows = jnp.minimum(rows, state.num_requests - 1)
    return jax.tree.map(lambda leaf: leaf[rows], state)


def is_stop(tokens: Int[Array, " B"], state: SamplingState) -> Bool[Array, " B"]:
    """Return whether each token is among its request's stop ids."""
    return jnp.any(tokens[:, None] == state.stop_ids, axis=1)
