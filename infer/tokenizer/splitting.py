"""Finding the tokens that are matched as whole texts before anything is merged."""

import re
from collections.abc import Iterator, Mapping


class TokenSplitter:
    """Cuts a text at the tokens of a set: from the left, the longest one at each place.

    That is the rule of `tokenizers` and of SentencePiece. llama.cpp goes through the tokens,
    longest first: with `ab` and `bcd` it cuts `abcd` into `a|bcd`, we into `ab|cd`.
    """

    def __init__(self, ids: Mapping[str, int]):
        self._ids = ids
        lengths: dict[str, set[int]] = {}
        for text in ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        # A token of one character matches whatever follows it, so its lengths join every
        # longer key that begins with it.
        self._lengths = {
            key: sorted(found | lengths.get(key[:1], set()), reverse=True)
            for key, found in lengths.items()
        }
        self._start = _starts(lengths)

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the pieces of `text` in order: an id for a token, a str for what lies between."""
        done = 0
        for start, end in self.places(text):
            if done < start:
                yield text[done:start]
            yield self._ids[text[start:end]]
            done = end
        if done < len(text):
            yield text[done:]

    def places(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where the tokens of `text` begin and end, in order."""
        if self._start is None:
            return
        at = 0
        while found := self._start.search(text, at):
            at = found.start()
            for length in self._lengths_at(text, at):
                if text[at : at + length] in self._ids:
                    yield at, at + length
                    at += length
                    break
            else:
                at += 1

    def _lengths_at(self, text: str, at: int) -> list[int]:
        return self._lengths.get(text[at : at + 2]) or self._lengths[text[at]]


def _starts(lengths: Mapping[str, set[int]]) -> re.Pattern[str] | None:
    """A pattern for the first two characters of any token: ordinary text is passed quickly."""
    seconds: dict[str, str] = {}
    for key in lengths:
        seconds[key[0]] = seconds.get(key[0], "") + key[1:]
    branches = [
        re.escape(first) + ("" if first in lengths else f"[{re.escape(following)}]")
        for first, following in seconds.items()
    ]
    return re.compile("|".join(branches)) if branches else None
