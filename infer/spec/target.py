"""The target's distributions at the k + 1 positions of a round, as plain sampling would have them.

Position i is judged after drafts 0..i-1: penalties, bad words and `min_tokens` see the drafts
before it as if they had been emitted.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

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
    set.  Greedy rows have their logits after penalties, whose argmax is the token.

    Args:
        raw: the model's logits, position 0 after the last token of `history`, position i after
            draft i - 1.
        state: B rows.
        history: the sequences before the round.  Drafts that `generated` has no room for are past
            `max_tokens` and are not counted.
        draft_tokens: k of them a row; what is past a row's number of drafts only reaches positions
            that no rule looks at.
        masks: tokens that may be drawn at each position, beside those of `state`.
        process_logits: the implementation of masks and penalties, over rows.

    Raises:
        ValueError: `raw` has not one position more than there are drafts.
    """
    check_positions("raw", raw.shape, draft_tokens.shape)
    num_rows, num_positions, vocab = raw.shape
    x = raw.astype(jnp.float32)
    if masks is not None:
        x = jnp.where(masks, x, -jnp.inf)
    x = x.reshape(num_rows * num_positions, vocab)
    states = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_positions, axis=0), state)
    x = process_logits(x, states, _histories(history, draft_tokens))
    greedy = (states.temperature < GREEDY_BELOW)[:, None]
    return jnp.where(greedy, x, filtered_logits(x, states)).reshape(raw.shape)


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
