"""The tokens of B sequences, prompt and output in one row, as drafters without a model see them."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from infer.pytree import Leaf, pytree_dataclass
from infer.sampling import History


@pytree_dataclass
class Context:
    """B sequences; what is past a length is never looked at."""

    tokens: Leaf  # int32 [B, S]
    lengths: Leaf  # int32 [B]


@pytree_dataclass
class Drafts:
    """Tokens proposed after B sequences: functions of the context, so that q is one-hot."""

    tokens: Leaf  # int32 [B, k], 0 where there is none
    count: Leaf  # int32 [B], 0 to k


def context_of(history: History) -> Context:
    """Return the prompts and what was generated, one behind the other."""
    prompt_cap, new_cap = history.prompts.shape[1], history.generated.shape[1]
    column = jnp.arange(prompt_cap + new_cap, dtype=jnp.int32)[None, :]
    after = column - history.prompt_lens[:, None]
    prompt = jnp.take_along_axis(
        history.prompts, jnp.broadcast_to(column, after.shape), axis=1, mode="clip"
    )
    new = jnp.take_along_axis(history.generated, jnp.maximum(after, 0), axis=1, mode="clip")
    return Context(
        tokens=jnp.where(after < 0, prompt, new),
        lengths=history.prompt_lens + history.num_generated,
    )


def append(context: Context, tokens: Int[Array, "B C"], count: Int[Array, " B"]) -> Context:
    """Return the sequences with the first `count` of `tokens` behind them.

    What has no room is dropped, and the length is then the room there is: a length never counts
    what is not in `tokens`.
    """
    num_rows, room = context.tokens.shape
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    at = jnp.where(column < count[:, None], context.lengths[:, None] + column, room)
    return dataclasses.replace(
        context,
        tokens=context.tokens.at[rows, at].set(tokens, mode="drop"),
        lengths=jnp.minimum(context.lengths + count, room),
    )
