"""A drafter of another vocabulary: the tokens that both have.

The drafter draws only among common tokens: its logits for the others are -inf, which renormalises
the rest.  What it then draws from is q; over the target's ids, with 0 for what it cannot say, q
goes through the same rules, and the output is the target's exactly.

Source: Timor et al., Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies, section 4 (token-level intersection), arXiv:2502.05202.

Text cannot be tokenised anew on the device, so the drafter reads the target's tokens one for one,
at the same positions: each as the token of equal bytes, or, where it has none, as its longest token
that ends with the same bytes.  What it reads differently costs acceptance, never exactness.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from infer.errors import ConfigError
from infer.pytree import Leaf, pytree_dataclass
from infer.tokenizer import Tokenizer


@pytree_dataclass
class VocabularyMap:
    """Which ids of two vocabularies, X of the drafter's and V of the target's, mean the same."""

    to_target: Leaf  # int32 [X], V where the target has no such token
    to_draft: Leaf  # int32 [V], X where the drafter has no such token
    reads: Leaf  # int32 [V], what the drafter reads in place of each of the target's tokens


def intersect(
    draft: Sequence[bytes | None], target: Sequence[bytes | None], *, missing: int = 0
) -> VocabularyMap:
    """Return the map between tokens of equal bytes.

    Args:
        draft: what each id of the drafter adds to a text, as `Tokenizer.token_bytes` says; None for
            an id that must not be mapped, such as a control token of another meaning.  An
            end-of-sequence token that both have under different names is mapped by giving it the
            same bytes in both lists.
        target: the same of the target.
        missing: the drafter's id that it reads for a token of which it has not even the last byte,
            such as a control token: its unknown or end-of-text token.

    Of several ids with equal bytes in one vocabulary the first is taken.

    Raises:
        ConfigError: no token in common.
        ValueError: `missing` is no id of the drafter's.
    """
    _check_missing(missing, len(draft))
    target_ids, draft_ids = _first_ids(target), _first_ids(draft)
    to_target = np.full(len(draft), len(target), np.int32)
    to_draft = np.full(len(target), len(draft), np.int32)
    for content, draft_id in draft_ids.items():
        target_id = target_ids.get(content)
        if target_id is not None:
            to_target[draft_id], to_draft[target_id] = target_id, draft_id
    if (to_target == len(target)).all():
        raise ConfigError(
            f"the drafter's {len(draft)} tokens and the target's {len(target)} have none in "
            "common; take a drafter whose tokenizer shares tokens with the target's"
        )
    reads = [_longest_end(content, draft_ids, missing) for content in target]
    return VocabularyMap(
        to_target=jnp.asarray(to_target),
        to_draft=jnp.asarray(to_draft),
        reads=jnp.asarray(np.asarray(reads, np.int32)),
    )


def of_tokenizers(
    draft: Tokenizer, target: Tokenizer, *, draft_width: int, target_width: int
) -> VocabularyMap:
    """Return the map between two tokenizers' tokens.

    Control tokens mean nothing to each other, but for beginning and end of a sequence, which are
    paired in the order in which the tokenizers list them.

    Args:
        draft: the drafter's.
        target: the target's.
        draft_width: of the drafter's logits: ids past its tokenizer's are padding.
        target_width: of the target's logits.

    Raises:
        ConfigError: no token in common.
    """
    ids = (draft.unk_id, draft.pad_id, *draft.eos_ids)
    missing = next((i for i in ids if i is not None), 0)
    return intersect(
        _contents(draft, target, draft_width),
        _contents(target, draft, target_width),
        missing=missing,
    )


def _contents(tokenizer: Tokenizer, other: Tokenizer, width: int) -> list[bytes | None]:
    special, size = tokenizer.special_ids, tokenizer.vocab_size
    contents: list[bytes | None] = [
        None if token in special or token >= size else tokenizer.token_bytes(token)
        for token in range(width)
    ]
    # Bytes that are no UTF-8 stand for what has no text.
    marks: dict[int, bytes] = {}
    if tokenizer.bos_id is not None and other.bos_id is not None:
        marks[tokenizer.bos_id] = b"\xff\xff begin"
    for number, token in enumerate(tokenizer.eos_ids[: len(other.eos_ids)]):
        marks[token] = b"\xff\xff end %d" % number
    for token, mark in marks.items():
        contents[token] = mark
    return contents


def same_tokens(draft: Tokenizer, target: Tokenizer) -> bool:
    """Return whether the tokenizers give every id that both models know the same bytes."""
    return draft.vocab_size == target.vocab_size and all(
        draft.token_bytes(token) == target.token_bytes(token) for token in range(draft.vocab_size)
    )


def _longest_end(content: bytes | None, draft_ids: dict[bytes, int], missing: int) -> int:
    """Return the drafter's longest token that ends `content`."""
    content = content or b""
    found = (draft_ids.get(content[start:]) for start in range(len(content)))
    return next((token for token in found if token is not None), missing)


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


def logits_on_target(
    mapping: VocabularyMap, logits: Float[Array, "*rows X"]
) -> Float[Array, "*rows V"]:
    """Return the drafter's logits over the target's ids, -inf for those that it has not.

    Their softmax is that of `common_logits`, moved; masks and penalties by the target's ids come
    after.
    """
    _check_width("logits", logits.shape[-1], mapping)
    return jnp.take(logits, mapping.to_draft, axis=-1, mode="fill", fill_value=-jnp.inf)


def tokens_on_target(mapping: VocabularyMap, tokens: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Return the target's ids of the drafter's tokens; V for one that the target has not."""
    size = mapping.to_draft.shape[0]
    return jnp.take(mapping.to_target, tokens, mode="fill", fill_value=size)


def tokens_on_draft(mapping: VocabularyMap, tokens: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Return the drafter's ids that it reads in place of the target's tokens."""
    return jnp.take(mapping.reads, tokens, mode="clip")


def _check_missing(missing: int, size: int) -> None:
    if not 0 <= missing < size:
        raise ValueError(
            f"missing is {missing}; it must be an id of the drafter's, 0 to {size - 1}, such as "
            "its unknown or a padding token"
        )


def _check_width(name: str, width: int, mapping: VocabularyMap) -> None:
    size = mapping.to_target.shape[0]
    if width != size:
        raise ValueError(
            f"{name} are over {width} tokens and the map's drafter has {size}; pass what the "
            "drafter gives, before it is mapped"
        )
