"""Byte-level BPE, the kind `gpt2`: words by regular expression, then merges of bytes by rank."""

from typing import Any

from infer.errors import WeightFormatError
from infer.tokenizer.vocabulary import SPECIAL, TokenType, Vocabulary


def _letters() -> dict[int, str]:
    """The letter that stands for each byte: itself where it prints, else the next from U+0100.

    Source: GPT-2, `encoder.py`, bytes_to_unicode.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printing)
    return {byte: chr(byte) for byte in printing} | {
        byte: chr(0x100 + i) for i, byte in enumerate(others)
    }


_BYTE_OF_LETTER = {letter: byte for byte, letter in _letters().items()}
_LETTER_OF_LATIN = str.maketrans({chr(byte): letter for byte, letter in _letters().items()})


def bytes_letters(data: bytes) -> str:
    """Bytes, each as its letter."""
    return data.decode("latin-1").translate(_LETTER_OF_LATIN)


def letters_bytes(text: str) -> bytes:
    """The bytes that letters stand for; KeyError where one stands for none."""
    return bytes(map(_BYTE_OF_LETTER.__getitem__, text))


class ByteLevelCodec:
    """Encoding by the `tokenizers` library, decoding by the letters' bytes.

    A byte that the vocabulary lacks is left out, as the original tokenizer and llama.cpp do;
    SmolLM2 has none for 04, 06, 13, 14, 16, 1D, F1 and F2. The original, and so we, then merge
    across the gap, which llama.cpp does not: `!`, 04, `!` becomes the token `!!`.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._library = _library(vocabulary)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""
        return self._library.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; its text where that is not made of the bytes' letters."""
        text = self._vocabulary.tokens[token_id]
        token_type = self._vocabulary.types[token_id]
        if token_type not in SPECIAL and token_type != TokenType.USER_DEFINED:
            try:
                return letters_bytes(text)
            except KeyError:
                pass
        return text.encode()


def _library(vocabulary: Vocabulary) -> Any:
    """The `tokenizers` object for a vocabulary.

    Raises:
        WeightFormatError: a merge's parts or its result are not tokens.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    assert vocabulary.pre is not None, vocabulary.kind
    # A special token must never come out of plain text, not even by `ignore_merges`.
    mergeable = dict(vocabulary.ids)
    for i in vocabulary.ids_of(*SPECIAL):
        del mergeable[vocabulary.tokens[i]]
    for i, (left, right) in enumerate(vocabulary.merges):  # the library would panic
        if not (left in mergeable and right in mergeable and left + right in mergeable):
            raise WeightFormatError(
                f"tokenizer.ggml.merges[{i}] joins {left!r} and {right!r} to {left + right!r}; "
                "all three must be tokens that are not special"
            )
    model = models.BPE(mergeable, vocabulary.merges, ignore_merges=vocabulary.pre.ignore_merges)
    library = Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(p), "isolated") for p in vocabulary.pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return library
