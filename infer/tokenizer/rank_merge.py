"""Byte-level BPE by the ranks of the tokens themselves, the kind `tiktoken`."""

from functools import lru_cache
from typing import Any

from infer.errors import WeightFormatError
from infer.tokenizer.byte_level import bytes_letters, letters_bytes
from infer.tokenizer.pair_merge import merge_pairs
from infer.tokenizer.vocabulary import SPECIAL, TokenType, Vocabulary

_CACHED_WORDS = 1 << 16
_CACHED_LEN = 64


class RankMergeCodec:
    """Of all neighbours in a word, those whose joined bytes are the lowest token merge first.

    A word that is a token is taken whole.

    Source: openai/tiktoken, `byte_pair_merge`.
    """

    def __init__(self, vocabulary: Vocabulary):
        assert vocabulary.pre is not None
        self._vocabulary = vocabulary
        normal = vocabulary.ids_of(TokenType.NORMAL)
        self._ids = {vocabulary.tokens[i]: i for i in normal}
        self._ranks = {text: float(i) for text, i in self._ids.items()}
        self._cut = _word_cutter(vocabulary.pre.patterns)
        self._encode_cached = lru_cache(_CACHED_WORDS)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""
        ids: list[int] = []
        for word, _ in self._cut.pre_tokenize_str(text):
            encode = self._encode_cached if len(word) <= _CACHED_LEN else self._encode_word
            ids.extend(encode(word))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for."""
        text = self._vocabulary.tokens[token_id]
        if self._vocabulary.types[token_id] in (*SPECIAL, TokenType.UNUSED):
            return text.encode()
        return letters_bytes(text)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        letters = bytes_letters(word.encode())
        whole = self._ids.get(letters)
        if whole is not None:
            return (whole,)
        symbols, _ = merge_pairs(list(letters), self._ranks)
        return tuple(map(self._ids.__getitem__, symbols))


def _word_cutter(patterns: tuple[str, ...]) -> Any:
    """Cuts a text into words.

    Raises:
        WeightFormatError: an expression does not compile.
    """
    from tokenizers import Regex, pre_tokenizers

    try:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    except Exception as error:  # the library raises plain Exception
        raise WeightFormatError(
            f"the word pattern {patterns!r:.80} does not compile: {error}"
        ) from error
    return pre_tokenizers.Sequence(splits)
