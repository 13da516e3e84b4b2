"""What a SentencePiece model does to a text before it cuts it into pieces."""

import re
import struct
from collections.abc import Iterable

import numpy as np

from infer.errors import WeightFormatError

SPACE = "\u2581"  # SentencePiece's visible space
_MAX_KEY_BYTES = 64
_NEVER = re.compile(r"(?!)")


class TextNormalizer:
    """Replaces by a map, from the left and the longest first; then sees to the spaces.

    User-defined symbols are left as they are. Spaces come out as U+2581.

    Source: SentencePiece, `normalizer.cc`, `Normalizer::Normalize`.

    Args:
        charsmap: the model's `precompiled_charsmap`; empty for none.
        user_defined: symbols that are not touched.
        dummy_prefix: put a space in front.
        remove_extra_whitespaces: no spaces at the ends, and one at a time between.
    """

    def __init__(
        self,
        *,
        charsmap: bytes = b"",
        user_defined: Iterable[str] = (),
        dummy_prefix: bool = True,
        remove_extra_whitespaces: bool = False,
    ):
        self.dummy_prefix = dummy_prefix
        self.remove_extra_whitespaces = remove_extra_whitespaces
        # Each table: the keys' replacements, and the keys' lengths by first character.
        maps = ({text: text for text in user_defined}, read_charsmap(charsmap))
        self._tables = [(texts, _lengths(texts)) for texts in maps if texts]
        self._start = _candidates(texts for texts, _ in self._tables)

    def __call__(self, text: str) -> str:
        """The normalised text."""
        if not text:
            return ""
        text = self._mapped(text)
        if self.remove_extra_whitespaces:
            text = re.sub("  +", " ", text).strip(" ")
        prefix = " " if self.dummy_prefix and (text or not self.remove_extra_whitespaces) else ""
        text = (prefix + text).replace(" ", SPACE)
        return text.rstrip(SPACE) if self.remove_extra_whitespaces else text

    def _mapped(self, text: str) -> str:
        out: list[str] = []
        done = at = 0
        while found := self._start.search(text, at):
            at = found.start()
            key, new = self._longest(text, at)
            if key:
                out += (text[done:at], new)
                done = at + len(key)
            at += len(key) or 1
        out.append(text[done:])
        return "".join(out)

    def _longest(self, text: str, at: int) -> tuple[str, str]:
        for texts, lengths in self._tables:
            for length in lengths.get(text[at], ()):
                key = text[at : at + length]
                if key in texts:
                    return key, texts[key]
        return "", ""


def _lengths(texts: Iterable[str]) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for text in texts:
        found.setdefault(text[0], set()).add(len(text))
    return {first: sorted(lengths, reverse=True) for first, lengths in found.items()}


def _candidates(tables: Iterable[Iterable[str]]) -> re.Pattern[str]:
    """Matches wherever a key may begin: one set for short keys, two for longer ones."""
    keys = [key for table in tables for key in table]
    single = {key for key in keys if len(key) == 1}
    firsts = {key[0] for key in keys if len(key) > 1}
    seconds = {key[1] for key in keys if len(key) > 1}

    def any_of(characters: set[str]) -> str:
        return f"[{''.join(map(re.escape, sorted(characters)))}]"

    branches = [any_of(single)] if single else []
    if firsts:
        branches.append(f"{any_of(firsts)}(?={any_of(seconds)})")
    return re.compile("|".join(branches)) if branches else _NEVER


def read_charsmap(data: bytes) -> dict[str, str]:
    """The replacements of a precompiled map: a double-array trie, then texts that end with NUL.

    Source: SentencePiece, `Normalizer::DecodePrecompiledCharsMap`; the units are darts-clone's.

    Raises:
        WeightFormatError: sizes that do not fit, a trie with a loop, or texts that are no UTF-8.
    """
    if not data:
        return {}
    trie_bytes = struct.unpack("<I", data[:4])[0] if len(data) >= 4 else 0
    if trie_bytes < 1024 or trie_bytes % 4 or trie_bytes > len(data) - 4:
        raise WeightFormatError(
            f"the precompiled charsmap has {len(data)} bytes and says that {trie_bytes} are a trie"
        )
    units = np.frombuffer(data, np.uint32, trie_bytes // 4, 4).astype(np.int64)
    texts = data[4 + trie_bytes :]
    try:
        return {
            key.decode(): texts[at : texts.index(b"\0", at)].decode()
            for key, at in _trie_keys(units)
        }
    except ValueError:
        raise WeightFormatError("the precompiled charsmap has a broken text") from None


def _trie_keys(units: np.ndarray) -> Iterable[tuple[bytes, int]]:
    labels = np.arange(1, 256)
    seen = np.zeros(len(units), bool)
    bases, keys = _offsets(units[:1]), [b""]
    for _ in range(_MAX_KEY_BYTES):
        if not keys:
            return
        children = bases[:, None] ^ labels
        inside = children < len(units)
        labelled = units[np.where(inside, children, 0)] & 0x800000FF
        rows, columns = np.nonzero(inside & (labelled == labels))
        at = children[rows, columns]
        if seen[at].any() or len(np.unique(at)) != len(at):
            raise WeightFormatError("the precompiled charsmap's trie has a loop")
        seen[at] = True
        keys = [keys[row] + bytes([column + 1]) for row, column in zip(rows, columns, strict=True)]
        bases = at ^ _offsets(units[at])
        has_leaf = (units[at] >> 8) & 1
        for i in np.flatnonzero(has_leaf):
            if bases[i] >= len(units):
                raise WeightFormatError("the precompiled charsmap's trie points out of itself")
            yield keys[i], int(units[bases[i]] & 0x7FFFFFFF)
    if keys:
        raise WeightFormatError(f"the precompiled charsmap has keys over {_MAX_KEY_BYTES} bytes")


def _offsets(units: np.ndarray) -> np.ndarray:
    return (units >> 10) << ((units & 512) >> 6)
