"""What `generate` returns."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infer.generation.rows import Row
from infer.generation.text import RowText
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
    prompt_logprobs: Leaf  # f32 [R, T], T = 0 unless asked for; the first token's is 0
    prompt_top_tokens: Leaf  # int32 [R, T, C]
    prompt_top_logprobs: Leaf  # f32 [R, T, C]
    state: Any  # the loop's state, to look at or to continue


@dataclass(frozen=True)
class GenerationResult:
    """The host form's result: numpy arrays, words and text.

    A row per sequence, prompt-major: with n samples a prompt, row `p * n + c` is sample c of prompt
    p, if every prompt has the same n; `prompt_index` and `choice` say it in any case.
    """

    tokens: np.ndarray  # int32 [R, T_new], generated only, padded with the pad id
    lengths: np.ndarray  # int32 [R]
    logprobs: np.ndarray  # f32 [R, T_new]
    top_tokens: np.ndarray  # int32 [R, T_new, C]
    top_logprobs: np.ndarray  # f32 [R, T_new, C]
    finish_reason: list[str]  # "stop", "length", "capacity"
    stop_reason: list[int | str | None]  # the id or the stop string that ended the row
    prompt_tokens: list[list[int]]
    prompt_index: list[int]
    choice: list[int]
    text: list[str] | None = None  # with a tokenizer; the stop id is not part of it
    prompt_logprobs: list[np.ndarray | None] = field(default_factory=list)  # f32 [T], first is NaN
    prompt_top_tokens: list[np.ndarray | None] = field(default_factory=list)  # int32 [T, C]
    prompt_top_logprobs: list[np.ndarray | None] = field(default_factory=list)  # f32 [T, C]
    stats: dict[str, Any] = field(default_factory=dict)

    def token_ids(self, row: int) -> list[int]:
        """Return the generated ids of one row, without padding."""
        return self.tokens[row, : self.lengths[row]].tolist()


def host_result(
    out: Any,
    rows: list[Row],
    text: list[RowText] | None,
    vocab_size: int,
    pad_id: int,
    stats: dict[str, Any],
) -> GenerationResult:
    """Return the result of a finished run; `out` is its Output on the host."""
    count, width = len(rows), max(r.max_tokens for r in rows)
    asked = max((r.sampling.logprobs or 0) for r in rows)
    lengths = np.array(out.lengths[:count])
    reasons: list[int | str | None] = [
        int(i) if i < vocab_size else None for i in out.stop_reason[:count]
    ]
    words = [FINISH_WORDS[f] for f in out.finish[:count]]
    tokens, logprobs = np.array(out.tokens[:count, :width]), np.array(out.logprobs[:count, :width])
    top_tokens = np.array(out.top_tokens[:count, :width, :asked])
    top_logprobs = np.array(out.top_logprobs[:count, :width, :asked])
    for i, row_text in enumerate(text or []):
        if row_text.stop is not None:
            # Tokens after the one that completed the stop string were only run ahead of the text.
            lengths[i] = row_text.stop_length
            reasons[i], words[i] = row_text.stop, "stop"
            tokens[i, lengths[i] :] = pad_id
            for leaf in (logprobs, top_tokens, top_logprobs):
                leaf[i, lengths[i] :] = 0
    stats = stats | {"num_output_tokens": lengths.tolist()}
    scored = [r.sampling.prompt_logprobs for r in rows]

    def of_prompt(leaf: np.ndarray, first: float, columns: bool) -> list[np.ndarray | None]:
        found: list[np.ndarray | None] = []
        for i, (row, asked) in enumerate(zip(rows, scored, strict=True)):
            if asked is None:
                found.append(None)
                continue
            i -= row.choice  # samples of one prompt have it scored once
            part = np.array(leaf[i, : len(row.ids), :asked] if columns else leaf[i, : len(row.ids)])
            part[0] = first
            found.append(part)
        return found

    return GenerationResult(
        tokens=tokens,
        lengths=lengths,
        logprobs=logprobs,
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        finish_reason=words,
        stop_reason=reasons,
        prompt_tokens=[r.ids for r in rows],
        prompt_index=[r.prompt for r in rows],
        choice=[r.choice for r in rows],
        text=None if text is None else [t.text for t in text],
        prompt_logprobs=of_prompt(out.prompt_logprobs, np.nan, columns=False),
        prompt_top_tokens=of_prompt(out.prompt_top_tokens, -1, columns=True),
        prompt_top_logprobs=of_prompt(out.prompt_top_logprobs, np.nan, columns=True),
        stats=stats,
    )
