"""The target's distributions at the k + 1 positions of a round, as plain sampling would have them.

Position i is judged after drafts 0..i-1: penalties, bad words and `min_tokens` see the drafts
before it as if they had been emitted.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt32

from infer.sampling import GREEDY_BELOW, History, SamplingState, filtered_logits
from infer.sampling import process_logits as plain_process_logits

Process = Callable[[Array, SamplingState, History], Array]


def target_logits(
    raw: Float[Array, "B k1 V"],
    state: SamplingState,
    history: History,
    draft_tokens: Int[Array, "B k"],
    *,
    masks: Bool[Array, "B k1 V"] | None = None,
    process_logits: Process = plain_process_logits,
) -> Float[Array, "B k1 V"]:
    """Return float32 logits whose softmax is what plain sampling would draw from at each position.

    Masks and bias -> penalties -> temperature -> top_k -> top_p -> min_p; -inf outside the kept
    set.  Greedy rows have their logits after penalties, whose argmax is the token.  Arguments as
    those of `processed_logits`.
    """
    x = processed_logits(
        raw, state, history, draft_tokens, masks=masks, process_logits=process_logits
    )
    return filtered(x, state)


def processed_logits(
    raw: Float[Array, "B k1 V"],
    state: SamplingState,
    history: History,
    draft_tokens: Int[Array, "B k"],
    *,
    masks: Bool[Array, "B k1 V"] | UInt32[Array, "B k1 W"] | None = None,
    process_logits: Process = plain_process_logits,
) -> Float[Array, "B k1 V"]:
    """Return float32 logits after masks, bias and penalties at each position.

    Args:
        raw: the model's logits, position 0 after the last token of `history`, position i after
            draft i - 1.
        state: B rows.
        history: the sequences before the round.  Drafts that `generated` has no room for are past
            `max_tokens` and are not counted.
        draft_tokens: k of them a row; what is past a row's number of drafts only reaches positions
            that no rule looks at.
        masks: tokens that may be drawn at each position, beside those of `state`; as booleans, or
            packed in uint32 words, token t in bit t mod 32 of word t // 32.
        process_logits: the implementation of masks and penalties, over rows.

    Raises:
        ValueError: `raw` has not one position more than there are drafts.
    """
    check_positions("raw", raw.shape, draft_tokens.shape)
    num_rows, num_positions, vocab = raw.shape
    x = raw.astype(jnp.float32)
    if masks is not None:
        x = jnp.where(_unpacked(masks, vocab), x, -jnp.inf)
    x = x.reshape(num_rows * num_positions, vocab)
    x = process_logits(x, at_positions(state, num_positions), _histories(history, draft_tokens))
    return x.reshape(raw.shape)


def filtered(x: Float[Array, "B k1 V"], state: SamplingState) -> Float[Array, "B k1 V"]:
    """Return processed logits after temperature and filters; greedy rows as they are."""

    def by_filters(x: Array) -> Array:
        flat, states = x.reshape(-1, x.shape[2]), at_positions(state, x.shape[1])
        y = filtered_logits(flat, states).reshape(x.shape)
        return jnp.where(is_greedy(state)[:, None, None], x, y)

    return lax.cond(jnp.all(is_greedy(state)), lambda x: x, by_filters, x)


def at_positions(state: SamplingState, num_positions: int) -> SamplingState:
    """Return the parameters of B rows for each of their positions: B x `num_positions` rows."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, num_positions, axis=0), state)


def _unpacked(masks: Array, vocab: int) -> Bool[Array, "B k1 V"]:
    """Return masks as booleans."""
    if masks.dtype == jnp.bool_:
        return masks
    if masks.dtype != jnp.uint32 or masks.shape[-1] != -(-vocab // 32):
        raise ValueError(
            f"masks is {masks.dtype}{list(masks.shape)} for {vocab} tokens; pass booleans "
            f"[B, k + 1, {vocab}] or uint32 words [B, k + 1, {-(-vocab // 32)}]"
        )
    token = jnp.arange(vocab, dtype=jnp.uint32)
    words = masks[..., token // 32]
    return (words >> jnp.broadcast_to(token % 32, words.shape)) & 1 == 1


def is_greedy(state: SamplingState) -> Bool[Array, " B"]:
    """Return the rows whose token is an argmax."""
    return state.temperature < GREEDY_BELOW


def check_positions(name: str, positions: tuple[int, ...], drafts: tuple[int, ...]) -> None:
    """Raise ValueError unless there is at least one draft a row and one position more than drafts.

    Args:
        name: of the argument with the positions.
        positions: its shape, [B, k + 1, ...].
        drafts: the shape of the draft tokens, [B, k].
    """
    if drafts[1] < 1:
        raise ValueError(
            f"draft_tokens is {list(drafts)}, k = {drafts[1]} drafts a row; k must be at least 1: "
            "a row without drafts has num_drafts 0, and no speculation at all needs no round"
        )
    if positions[0] != drafts[0] or positions[1] != drafts[1] + 1:
        raise ValueError(
            f"{name} is {list(positions)} for draft_tokens {list(drafts)}; it must be "
            f"[{drafts[0]}, {drafts[1] + 1}, V]: one position before each draft and one after all"
        )


def _histories(history: History, draft_tokens: Int[Array, "B k"]) -> History:
    """Return B (k + 1) histories, row-major: each row's with its first 0, 1, .. k drafts."""
    num_rows, num_drafts = draft_tokens.shape
    num_positions = num_drafts + 1
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    at = history.num_generated[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
    # All drafts are written for all positions: `num_generated` says how many of them count.
    generated = history.generated.at[rows, at].set(draft_tokens, mode="drop")
    repeat = lambda leaf: jnp.repeat(leaf, num_positions, axis=0)
    more = jnp.tile(jnp.arange(num_positions, dtype=jnp.int32), num_rows)
    return History(
        prompts=repeat(history.prompts),
        prompt_lens=repeat(history.prompt_lens),
        generated=repeat(generated),
        num_generated=repeat(history.num_generated) + more,
    )
