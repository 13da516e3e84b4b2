"""What `generate` returns."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infer.pytree import Leaf, pytree_dataclass

FINISH_WORDS = ("running", "stop", "length", "capacity", "abort")


@pytree_dataclass
class Generation:
    """The pure form's result: arrays only.  Row r belongs to prompt r."""

    tokens: Leaf  # int32 [R, T_new], generated only, padded with the pad id
    lengths: Leaf  # int32 [R]
    logprobs: Leaf  # f32 [R, T_new], of the emitted tokens under the raw model
    top_tokens: Leaf  # int32 [R, T_new, C], C = 0 unless asked for
    top_logprobs: Leaf  # f32 [R, T_new, C]
    finish_reason: Leaf  # int8 [R]: RUNNING 0, STOP 1, LENGTH 2, CAPACITY 3, ABORT 4
    stop_reason: Leaf  # int32 [R], the id that stopped the row, V where none did
    state: Any  # the loop's state, to look at or to continue


@dataclass(frozen=True)
class GenerationResult:
    """The host form's result: numpy arrays, words and text."""

    tokens: np.ndarray  # int32 [R, T_new], generated only, padded with the pad id
    lengths: np.ndarray  # int32 [R]
    logprobs: np.ndarray  # f32 [R, T_new]
    top_tokens: np.ndarray  # int32 [R, T_new, C]
    top_logprobs: np.ndarray  # f32 [R, T_new, C]
    finish_reason: list[str]  # "stop", "length", "capacity"
    stop_reason: list[int | None]  # the id that stopped the row
    prompt_tokens: list[list[int]]
    text: list[str] | None = None  # with a tokenizer; the stop id is not part of it
    stats: dict[str, Any] = field(default_factory=dict)

    def token_ids(self, row: int) -> list[int]:
        """Return the generated ids of one row, without padding."""
        return self.tokens[row, : self.lengths[row]].tolist()
