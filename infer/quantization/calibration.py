"""Calibration text as sequences of tokens."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from infer.errors import ConfigError
from infer.tokenizer import Tokenizer

NUM_TOKENS = 65_536  # 128 sequences of 512
SEQ_LEN = 512


@dataclass(frozen=True)
class Sequences:
    """Token ids [N, S], and the text that they stand for."""

    tokens: Int[np.ndarray, "N S"]
    text: str


def sequences(
    tokenizer: Tokenizer,
    text: str,
    *,
    num_tokens: int | None = None,
    seq_len: int = SEQ_LEN,
    what: str = "the calibration text",
) -> Sequences:
    """Cut a text into sequences of `seq_len` tokens and take as many as make `num_tokens`, evenly
    spread over the text.

    Each begins with BOS where the tokenizer's rule has one: a model that was trained with it has
    other activations without.

    Args:
        tokenizer: of the model.
        text: like what the model will be used for.
        num_tokens: in all, rounded down to whole sequences; None is 65,536, or what the text has.
        seq_len: tokens of a sequence, BOS included.
        what: how messages call the text.

    Raises:
        ConfigError: a number is out of range, or the text is too short.
    """
    if seq_len < 2:
        raise ConfigError(f"sequences have {seq_len} tokens; use at least 2, 512 is usual")
    asked = NUM_TOKENS if num_tokens is None else num_tokens
    wanted = asked // seq_len
    if wanted < 1:
        raise ConfigError(
            f"{asked} calibration tokens hold no sequence of {seq_len}; take more tokens or"
            " shorter sequences"
        )
    ids = np.asarray(tokenizer.encode(text, add_bos=False), np.int32)
    front = tokenizer.bos_id if tokenizer.add_bos else None
    length = seq_len - (front is not None)
    there = len(ids) // length
    if there < (1 if num_tokens is None else wanted):
        raise ConfigError(
            f"{what} has {len(ids)} tokens, {there} sequences of {seq_len}, and at least"
            f" {1 if num_tokens is None else wanted} must be there; give more text, fewer tokens or"
            " shorter sequences"
        )
    count = min(there, wanted)
    chosen = np.arange(count) * there // count
    rows = ids[: there * length].reshape(there, length)[chosen]
    used = "\n".join(tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in rows)
    if front is not None:
        rows = np.concatenate([np.full((count, 1), front, np.int32), rows], axis=1)
    return Sequences(rows, used)
