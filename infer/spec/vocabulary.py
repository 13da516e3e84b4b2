"""A drafter of another vocabulary: the tokens that both have.

The drafter draws only among common tokens: its logits for the others are -inf, which renormalises
the rest.  What it then draws from is q; over the target's ids, with 0 for what it cannot say, q
goes through the same rules, and the output is the target's exactly.

Source: Timor et al., Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies, section 4 (token-level intersection), arXiv:2502.05202.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from infer.errors import ConfigError
from infer.pytree import Leaf, pytree_dataclass


@pytree_dataclass
class VocabularyMap:
    """Which ids of two vocabularies, X of the drafter's and V of the target's, mean the same."""

    to_target: Leaf  # int32 [X], V where the target has no such token
    to_draft: Leaf  # int32 [V], X where the drafter has no such token


def intersect(draft: Sequence[bytes | None], target: Sequence[bytes | None]) -> VocabularyMap:
    """Return the map between tokens of equal bytes.

    Args:
        draft: what each id of the drafter adds to a text, as `Tokenizer.token_bytes` says; None for
            an id that must not be mapped, such as a control token of another meaning.  An
            end-of-sequence token that both have under different names is mapped by giving it the
            same bytes in both lists.
        target: the same of the target.

    Of several ids with equal bytes in one vocabulary the first is taken.

    Raises:
        ConfigError: no token in common.
    """
    target_ids = _first_ids(target)
    to_target = np.full(len(draft), len(target), np.int32)
    to_draft = np.full(len(target), len(draft), np.int32)
    for content, draft_id in _first_ids(draft).items():
        target_id = target_ids.get(content)
        if target_id is not None:
            to_target[draft_id], to_draft[target_id] = target_id, draft_id
    if (to_target == len(target)).all():
        raise ConfigError(
            f"the drafter's {len(draft)} tokens and the target's {len(target)} have none in "
            "common; take a drafter whose tokenizer shares tokens with the target's"
        )
    return VocabularyMap(to_target=jnp.asarray(to_target), to_draft=jnp.asarray(to_draft))


def _first_ids(tokens: Sequence[bytes | None]) -> dict[bytes, int]:
    ids: dict[bytes, int] = {}
    for token_id, content in enumerate(tokens):
        if content:
            ids.setdefault(content, token_id)
    return ids


def is_common(mapping: VocabularyMap) -> Bool[Array, " X"]:
    """Return the drafter's ids that the target has too."""
    return mapping.to_target < mapping.to_draft.shape[0]


def common_logits(
    mapping: VocabularyMap, logits: Float[Array, "*rows X"]
) -> Float[Array, "*rows X"]:
    """Return the drafter's logits with -inf for tokens that the target has not: draw from these.

    Temperature and filters of the drafter come after, over the common tokens.
    """
    _check_width("logits", logits.shape[-1], mapping)
    common = is_common(mapping).reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.where(common, logits, -jnp.inf)


def probs_on_target(
    mapping: VocabularyMap, probs: Float[Array, "*rows X"]
) -> Float[Array, "*rows V"]:
    """Return the drafter's distribution over the target's ids; 0 for those that it has not.

    `probs` are those of the draw, 0 outside the common tokens, as `common_logits` makes them.
    """
    _check_width("probs", probs.shape[-1], mapping)
    # A gather: the target's id V' reads the drafter's id, and one past the end where there is none.
    return jnp.take(probs, mapping.to_draft, axis=-1, mode="fill", fill_value=0.0)


def tokens_on_target(mapping: VocabularyMap, tokens: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Return the target's ids of the drafter's tokens; V for one that the target has not."""
    size = mapping.to_draft.shape[0]
    return jnp.take(mapping.to_target, tokens, mode="fill", fill_value=size)


def tokens_on_draft(
    mapping: VocabularyMap, tokens: Int[Array, "*rows"], *, missing: int
) -> Int[Array, "*rows"]:
    """Return the drafter's ids of the target's tokens, `missing` for one that it has not.

    A token that the drafter does not see as it is costs acceptance, never exactness.
    """
    size = mapping.to_target.shape[0]
    if not 0 <= missing < size:
        raise ValueError(
            f"missing is {missing}; it must be an id of the drafter's, 0 to {size - 1}, such as "
            "its unknown or a padding token"
        )
    found = jnp.take(mapping.to_draft, tokens, mode="fill", fill_value=size)
    return jnp.where(found < size, found, missing)


def _check_width(name: str, width: int, mapping: VocabularyMap) -> None:
    size = mapping.to_target.shape[0]
    if width != size:
        raise ValueError(
            f"{name} are over {width} tokens and the map's drafter has {size}; pass what the "
            "drafter gives, before it is mapped"
        )
