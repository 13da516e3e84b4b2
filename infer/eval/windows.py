"""Texts, and the windows of tokens they are cut into.

As llama.cpp's perplexity does: the ids of the whole text in pieces of the context's length, the
first id of each replaced by BOS where the tokenizer puts one, the rest at the end left out; the
second half of a window is scored, so that every scored token has half a window before it.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from infer.errors import ConfigError, RequestError
from infer.eval.statistics import ENOUGH_WINDOWS

CONTEXT = 512


class Scored(enum.StrEnum):
    """Which tokens of a window are scored."""

    second_half = "second_half"
    all = "all"

    def first(self, length: int) -> int:
        """Return the position of the first scored token in a window of `length` tokens."""
        return length // 2 + 1 if self is Scored.second_half else 1


@dataclass(frozen=True)
class Windows:
    """A text as windows of ids, and what became of the rest of it."""

    name: str
    ids: Int[np.ndarray, "W C"]
    num_tokens: int  # of the whole text, BOS not counted
    num_bytes: int | None  # of the whole text; None where only ids were given
    text: str | None = field(default=None, repr=False)  # that the windows are of

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of the text over its tokens."""
        return None if self.num_bytes is None else self.num_bytes / self.num_tokens


def cut(
    name: str, text: str, tokenizer: Any, *, context: int = CONTEXT, limit: int | None = None
) -> Windows:
    """Return the first `limit` windows of a text.

    Raises:
        RequestError: the context is below 4, or the text is shorter than one window.
    """
    check_window(context, limit)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    ids = np.asarray(tokenizer.encode(text), np.int32)
    windows = _rows(name, ids, context, limit)
    whole = windows.size + context > len(ids)
    used = text if whole else tokenizer.decode(ids[: windows.size].tolist())
    if bos is not None:
        windows[:, 0] = bos
    own = len(ids) - (bos is not None)
    return Windows(name, windows, max(own, 1), len(text.encode()), used)


def cut_ids(name: str, ids: Any, *, context: int = CONTEXT, limit: int | None = None) -> Windows:
    """Return windows of given ids: an array [W, C] as it is, or a flat one cut like a text, without
    a BOS.

    Raises:
        RequestError: it is neither, or shorter than a window.
    """
    ids = np.asarray(ids)
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        raise RequestError(
            f"{name} is {ids.dtype}{list(ids.shape)}; pass integer ids, [tokens] or [windows, "
            "tokens of a window]"
        )
    check_window(ids.shape[1] if ids.ndim == 2 else context, limit)
    if ids.ndim == 1:
        return Windows(name, _rows(name, ids.astype(np.int32), context, limit), len(ids), None)
    return Windows(name, ids.astype(np.int32)[:limit], ids.size, None)


def check_seed(seed: int) -> None:
    """Refuse a seed that NumPy's generators do not take.

    Raises:
        RequestError: it is below 0 or no integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise RequestError(f"seed is {seed!r:.60}; give an integer from 0 on")


def check_scored(scored: str) -> None:
    """Refuse what says of no tokens that they are scored.

    Raises:
        ConfigError: it is none of `Scored`.
    """
    if scored not in list(Scored):
        raise ConfigError(f"scored is {scored!r:.60}; there are {', '.join(Scored)}")


def check_window(context: int, limit: int | None) -> None:
    """Refuse windows that score nothing.

    Raises:
        RequestError: fewer than 4 tokens of a window, or fewer than one window.
    """
    if context < 4:
        raise RequestError(f"the context is {context} tokens; give at least 4")
    if limit is not None and limit < 1:
        raise RequestError(f"windows is {limit}; give at least 1, or None for all")


def _rows(name: str, ids: np.ndarray, context: int, limit: int | None) -> np.ndarray:
    count = len(ids) // context
    if not count:
        raise RequestError(
            f"{name} has {len(ids)} tokens, fewer than one window of {context}; give a longer text "
            "or a smaller context"
        )
    count = count if limit is None else min(count, limit)
    return ids[: count * context].reshape(count, context).copy()


def too_few(texts: Sequence[Windows]) -> list[str]:
    """Return a line that names the texts with too few windows for their intervals, if any."""
    few = [each for each in texts if len(each.ids) < ENOUGH_WINDOWS]
    if not few:
        return []
    named = ", ".join(f"{each.name} ({len(each.ids)})" for each in few)
    return [
        f"fewer than {ENOUGH_WINDOWS} windows, so that intervals are too narrow: {named}; give "
        "longer texts, a smaller context or more windows"
    ]


def all_windows(
    texts: Any, tokenizer: Any, *, context: int = CONTEXT, limit: int | None = None
) -> list[Windows]:
    """Return the windows of each text.

    Args:
        texts: a text, ids, or a mapping of names to either.
        tokenizer: for text.
        context, limit: as in `cut`.

    Raises:
        RequestError: there is none, one is of no known kind, or is shorter than a window.
    """
    named: Mapping[str, Any] = texts if isinstance(texts, Mapping) else {"text": texts}
    if not named:
        raise RequestError("no text was given; give at least one")
    found = []
    for name, each in named.items():
        if not isinstance(each, str):
            found.append(cut_ids(name, each, context=context, limit=limit))
            continue
        if tokenizer is None:
            raise RequestError(
                f"{name} is text and there is no tokenizer; pass a Model, or token ids"
            )
        found.append(cut(name, each, tokenizer, context=context, limit=limit))
    widths = {each.ids.shape[1] for each in found}
    if len(widths) > 1:
        raise RequestError(f"the windows have {sorted(widths)} tokens; give all the same length")
    return found
