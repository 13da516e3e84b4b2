"""Masks and penalties: from a model's logits to the logits that are sampled.

Order, fixed: allowed ids, bad words, stop ids before min_tokens, logit bias -> repetition,
frequency and presence penalties.  Everything a row needs of its past are the tokens themselves:
there are no counts to carry, roll back or fork.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from infer.pytree import Leaf, pytree_dataclass
from infer.sampling.state import SamplingState


@pytree_dataclass
class History:
    """The tokens of B sequences so far."""

    prompts: Leaf  # int32 [B, T]
    prompt_lens: Leaf  # int32 [B]
    generated: Leaf  # int32 [B, N]
    num_generated: Leaf  # int32 [B]


def process_logits(
    logits: Float[Array, "B V"], state: SamplingState, history: History
) -> Float[Array, "B V"]:
    """Return the logits after masks and penalties; `state` has B rows."""
    x = logits
    if state.allowed.shape[1]:
        x = jnp.where(state.allowed, x, -jnp.inf)
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    banned = banned_ids(state, history, logits.shape[1])
    x = x.at[rows, banned].set(-jnp.inf, mode="drop")
    if state.bias_ids.shape[1]:
        x = x.at[rows, state.bias_ids].add(state.bias, mode="drop")
    uses = (state.repetition != 1) | (state.frequency != 0) | (state.presence != 0)
    return lax.cond(jnp.any(uses), lambda x: penalise(x, state, history), lambda x: x, x)


def mask_early_stops(
    logits: Float[Array, "B V"], state: SamplingState, num_generated: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Set the stop ids of rows that have not reached `min_tokens` to -inf."""
    ids = _early_stops(state, num_generated, logits.shape[-1])
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def banned_ids(state: SamplingState, history: History, vocab: int) -> Int[Array, "B X"]:
    """Return ids that must not be drawn now, `vocab` where there is none: stop ids before
    `min_tokens`, and the last id of every bad word whose other ids were just generated.
    """
    stops = _early_stops(state, history.num_generated, vocab)
    words = state.bad_words
    if not words.shape[1]:
        return stops
    matched = ends_with(history, words[:, :, :-1], vocab) if words.shape[2] > 1 else True
    return jnp.concatenate([stops, jnp.where(matched, words[:, :, -1], vocab)], axis=1)


def _early_stops(state: SamplingState, num_generated: Array, vocab: int) -> Array:
    early = (num_generated < state.min_tokens)[:, None]
    return jnp.where(early, state.stop_ids, vocab)


def token_counts(history: History, vocab: int) -> Int[Array, "B V"]:
    """Return 2 x (how often each id was generated) + (1 if it is in the prompt)."""
    rows = jnp.arange(history.prompts.shape[0], dtype=jnp.int32)[:, None]
    in_prompt = _filled(history.prompts, history.prompt_lens)
    in_output = _filled(history.generated, history.num_generated)
    prompt_ids = jnp.where(in_prompt, history.prompts, vocab)
    output_ids = jnp.where(in_output, history.generated, vocab)
    seen = jnp.zeros((rows.shape[0], vocab), jnp.int32).at[rows, prompt_ids].set(1, mode="drop")
    return seen.at[rows, output_ids].add(2, mode="drop")


def penalise(
    logits: Float[Array, "B V"], state: SamplingState, history: History
) -> Float[Array, "B V"]:
    """Return logits after the three penalties.

    repetition r, on tokens of the prompt and generated: x / r where x > 0, else x r.  Source:
    Keskar et al. 2019, arXiv 1909.05858, section 4.1, with the sign rule of transformers.
    frequency f and presence p, on generated tokens only: x - f count - p [count > 0].  Source: the
    OpenAI API reference.
    """
    packed = token_counts(history, logits.shape[1])
    counts, seen = (packed >> 1).astype(jnp.float32), packed > 0
    r = state.repetition[:, None]
    x = jnp.where(seen, jnp.where(logits > 0, logits / r, logits * r), logits)
    x = x - state.frequency[:, None] * counts
    return x - jnp.where(counts > 0, state.presence[:, None], 0.0)


def _filled(tokens: Int[Array, "B S"], lens: Int[Array, " B"]) -> Bool[Array, "B S"]:
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < lens[:, None]


def ends_with(history: History, sequences: Int[Array, "B W L"], vocab: int) -> Bool[Array, "B W"]:
    """Return whether the generated tokens of each row end with each sequence.

    `vocab` at the left of a sequence is padding; a sequence of nothing but padding matches.
    """
    length = sequences.shape[2]
    back = jnp.arange(length, dtype=jnp.int32) - length
    at = history.num_generated[:, None] + back[None, :]
    last = jnp.take_along_axis(history.generated, jnp.maximum(at, 0), axis=1, mode="clip")
    last = jnp.where(at >= 0, last, -1)[:, None, :]
    return jnp.all((sequences == vocab) | (sequences == last), axis=2)
