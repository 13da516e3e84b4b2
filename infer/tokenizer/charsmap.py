"""SentencePiece's precompiled map of characters: a double-array trie and what its keys become."""

import re
import struct
from functools import lru_cache

import numpy as np

from infer.errors import WeightFormatError

_MAX_KEY_BYTES = 64  # longest in the maps that SentencePiece ships: 20
_MAX_TEXT_BYTES = 256  # longest there: 33
_MAX_NODES = 1 << 17
_CACHED_KEYS = 1 << 14
_NEVER = re.compile(r"(?!)")


class CharsMap:
    """Finds the longest key at a place in a text.

    The trie's branches are shared (it is a graph), so its keys are never listed.

    Source: SentencePiece, `Normalizer::DecodePrecompiledCharsMap`; darts-clone, `DoubleArrayUnit`.

    Raises:
        WeightFormatError: sizes that do not fit, or texts that are too long or do not end.
    """

    def __init__(self, data: bytes = b""):
        self._units: list[int] = []
        self._texts = b""
        self.starts = _NEVER  # matches wherever a key may begin
        if not data:
            return
        trie_bytes = struct.unpack("<I", data[:4])[0] if len(data) >= 4 else 0
        if not trie_bytes or trie_bytes % 4 or trie_bytes > len(data) - 4:
            raise WeightFormatError(
                f"the precompiled charsmap has {len(data)} bytes and says that {trie_bytes} of "
                "them are a trie"
            )
        self._units = np.frombuffer(data, np.uint32, trie_bytes // 4, 4).tolist()
        self._texts = data[4 + trie_bytes :]
        ends = np.flatnonzero(np.frombuffer(self._texts, np.uint8) == 0)
        longest = np.diff(ends, prepend=-1).max(initial=1) - 1
        if not self._texts.endswith(b"\0") or longest > _MAX_TEXT_BYTES:
            raise WeightFormatError(
                f"the precompiled charsmap has a text of {longest} bytes, or one that does not end"
            )
        self.starts = self._starting()
        self._walk_cached = lru_cache(_CACHED_KEYS)(self._walk)

    def longest(self, text: str, at: int) -> tuple[int, str]:
        """The length of the longest key at a place, 0 for none, and what it becomes."""
        return self._walk_cached(text[at : at + _MAX_KEY_BYTES // 4])

    def _walk(self, text: str) -> tuple[int, str]:
        length, value, node = 0, 0, self._child(0, None)
        for i, character in enumerate(text):
            for byte in character.encode():
                node = self._child(node, byte)
                if node < 0:
                    return length, self._text(value) if length else ""
            leaf = self._leaf(node)
            if leaf >= 0:
                length, value = i + 1, leaf
        return length, self._text(value) if length else ""

    def _child(self, node: int, byte: int | None) -> int:
        """The child of a node; a node is packed as (base, has a value). -1: there is none."""
        at = 0 if byte is None else (node >> 1) ^ byte
        if at >= len(self._units):
            return -1
        unit = self._units[at]
        if byte is not None and unit & 0x800000FF != byte:
            return -1
        base = at ^ ((unit >> 10) << ((unit & 512) >> 6))
        return base << 1 | (unit >> 8 & 1)

    def _leaf(self, node: int) -> int:
        if not node & 1 or node >> 1 >= len(self._units):
            return -1
        return self._units[node >> 1] & 0x7FFFFFFF

    def _text(self, value: int) -> str:
        end = self._texts.find(b"\0", value)
        return self._texts[value : max(end, value)].decode(errors="replace")

    def _starting(self) -> re.Pattern[str]:
        """One set for the characters that are keys, one for those that only begin longer ones."""
        keys, prefixes = [], []
        level = [(b"", self._child(0, None))]
        nodes = 0
        while level:
            following = []
            for key, node in level:
                for byte in range(1, 256) if not key else range(0x80, 0xC0):
                    child = self._child(node, byte)
                    if child < 0:
                        continue
                    longer = key + bytes([byte])
                    if len(longer) == _utf8_len(longer[0]):
                        (keys if self._leaf(child) >= 0 else prefixes).append((longer, child))
                    elif len(longer) < _utf8_len(longer[0]):
                        following.append((longer, child))
            nodes += len(following) + len(keys) + len(prefixes)
            if nodes > _MAX_NODES:
                raise WeightFormatError(
                    f"the precompiled charsmap's trie has more than {_MAX_NODES} characters"
                )
            level = following
        single, firsts = (
            "".join(re.escape(key.decode(errors="ignore")) for key, _ in found)
            for found in (keys, prefixes)
        )
        # An ordinary letter begins a key only with a mark after it.
        marks_only = not any(
            self._child(node, byte) >= 0 for _, node in prefixes for byte in range(1, 0x80)
        )
        branches = [f"[{single}]"] if single else []
        if firsts:
            branches.append(f"[{firsts}]" + (r"(?=[^\x00-\x7f])" if marks_only else ""))
        return re.compile("|".join(branches)) if branches else _NEVER


def _utf8_len(first: int) -> int:
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
