"""SentencePiece BPE, the kind `llama`: the adjacent pair with the best score merges first."""

import re
from functools import lru_cache

from infer.errors import WeightFormatError
from infer.tokenizer.normalizing import SPACE
from infer.tokenizer.pair_merge import merge_pairs
from infer.tokenizer.vocabulary import TokenType, Vocabulary

# Types that are never the result of a merge: a byte, or a text that is matched as a whole.
_WHOLE = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE)
_CACHED_WORDS = 1 << 16
_CACHED_LEN = 64


class ScoreMergeCodec:
    """Merging over a heap of pairs, exact by construction, word by word, with a cache of words.

    A text may be cut before a space wherever no token spans that place: merges on the two sides
    then never meet, and the ids are those of the whole text.

    Source: SentencePiece, `bpe_model.cc`. As there, no control or byte token comes out of plain
    text, and a token of the type UNUSED is taken apart again; llama.cpp does neither.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._ids = dict(vocabulary.ids)
        for i in vocabulary.ids_of(*_WHOLE):
            del self._ids[vocabulary.tokens[i]]
        self._ranks = {text: -vocabulary.scores[i] for text, i in self._ids.items()}
        self._unused = {vocabulary.tokens[i] for i in vocabulary.ids_of(TokenType.UNUSED)}
        self._byte_ids = byte_ids(vocabulary)
        self._border = word_border(self._ids)
        self._encode_cached = lru_cache(_CACHED_WORDS)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens; no space is put in front."""
        ids: list[int] = []
        for word in self._border.split(text.replace(" ", SPACE)):
            encode = self._encode_cached if len(word) <= _CACHED_LEN else self._encode_word
            ids.extend(encode(word))
        return ids if self._byte_ids else join_unknown(ids, self._vocabulary.unk_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for."""
        text = self._vocabulary.tokens[token_id]
        kind = self._vocabulary.types[token_id]
        if kind == TokenType.BYTE:
            return bytes([byte_value(text)])
        if kind not in _WHOLE:
            text = text.replace(SPACE, " ")
        return text.encode()

    def _encode_word(self, word: str) -> tuple[int, ...]:
        symbols, parts = merge_pairs(list(word), self._ranks, self._unused)
        return tuple(i for symbol in symbols for i in self._symbol_ids(symbol, parts))

    def _symbol_ids(self, symbol: str, parts: dict[str, tuple[str, str]]) -> list[int]:
        """The id of a finished symbol; of its parts if UNUSED; of its bytes if it is no token."""
        if symbol in parts:
            return [i for part in parts[symbol] for i in self._symbol_ids(part, parts)]
        token_id = self._ids.get(symbol)
        if token_id is not None:
            return [token_id]
        if self._byte_ids:
            return [self._byte_ids[byte] for byte in symbol.encode()]
        assert self._vocabulary.unk_id is not None
        return [self._vocabulary.unk_id]


def join_unknown(ids: list[int], unk: int | None) -> list[int]:
    """A run of unknown characters is one UNK, as in SentencePiece."""
    return [i for at, i in enumerate(ids) if i != unk or at == 0 or ids[at - 1] != unk]


def byte_value(text: str) -> int:
    """The byte of a byte token."""
    if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
        raise WeightFormatError(f"the byte token {text!r} is not of the form <0x41>")
    return int(text[3:5], 16)


def byte_ids(vocabulary: Vocabulary) -> list[int]:
    """The id of each byte; empty where the vocabulary has no byte tokens.

    Raises:
        WeightFormatError: some bytes are missing, or there are none and no unknown token.
    """
    found = {byte_value(vocabulary.tokens[i]): i for i in vocabulary.ids_of(TokenType.BYTE)}
    missing = [byte for byte in range(256) if byte not in found]
    if len(missing) == 256 and vocabulary.unk_id is not None:
        return []
    if missing:
        raise WeightFormatError(
            f"tokenizer.ggml.tokens has no byte token <0x{missing[0]:02X}> ({len(missing)} of 256 "
            "are missing); all or none, and with none an unknown token"
        )
    return [found[byte] for byte in range(256)]


def word_border(ids: dict[str, int]) -> re.Pattern[str]:
    """Matches the empty place before a space that no token of the vocabulary reaches across."""
    crossing = set(re.findall(rf"[^{SPACE}\0](?={SPACE})", "\0".join(ids)))
    joined = "".join(map(re.escape, sorted(crossing)))
    return re.compile(rf"(?={SPACE})(?<=[^{SPACE}{joined}])")
