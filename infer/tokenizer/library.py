"""tokenizer.json: the `tokenizers` library encodes, the bytes of a token are worked out here.

Decoding by the library knows whole texts only.  Its decoder is therefore read as a rule for one
token, which makes a stream equal to decoding at once; a decoder that no such rule can follow is
refused.  A broken file is one WeightFormatError, also where the library panics.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from infer.errors import RequestError, WeightFormatError
from infer.tokenizer.byte_level import letters_bytes
from infer.tokenizer.vocabulary import SPECIAL, TokenType, Vocabulary

# Ours: the largest vocabulary in the wild has 2^18 tokens.
MAX_TOKENS = 1 << 22
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class LibraryCodec:
    """Encoding of whole texts, and the bytes of each token."""

    def __init__(self, source: str, what: str = "tokenizer.json"):
        """Read a tokenizer.json.

        Args:
            source: the text of the file.
            what: what messages call it.

        Raises:
            WeightFormatError: it is broken, or decodes in a way that is not followed here.
        """
        self.source, self._what = source, what
        self._plain = _library(source, what, special=False)
        with _guarded(WeightFormatError, f"{what}: cannot be read"):
            texts: dict[str, int] = self._plain.get_vocab(with_added_tokens=True)
            added = self._plain.get_added_tokens_decoder()
            unk = getattr(self._plain.model, "unk_token", None)
            decoder = self._plain.decoder
            rules = None if decoder is None else json.loads(decoder.__getstate__())
        self._decode = _TokenRule(rules, what)
        size = max([*texts.values(), *added], default=-1) + 1
        if not 0 < size <= MAX_TOKENS:
            raise WeightFormatError(
                f"{what}: has ids up to {size - 1}; there must be at least one token and at most"
                f" {MAX_TOKENS}"
            )
        self.tokens = [""] * size
        self.types = bytearray([TokenType.UNUSED]) * size
        for text, i in texts.items():
            self.tokens[i] = text
            is_byte = self._decode.byte_fallback and _BYTE_TOKEN.fullmatch(text)
            self.types[i] = TokenType.BYTE if is_byte else TokenType.NORMAL
        for i, token in added.items():
            self.tokens[i] = token.content
            self.types[i] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        self.ids = {text: i for i, text in enumerate(self.tokens) if text}
        self.unk_id = self.ids.get(unk) if isinstance(unk, str) else None

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens are spelled in the letters of bytes."""
        return self._decode.byte_level

    def words(self, text: str) -> list[str]:
        """What a text is cut into before merging; normalisers and added tokens do not count."""
        with _guarded(RequestError, "the tokenizer cannot cut this text"):
            cutter = self._plain.pre_tokenizer
            return [text] if cutter is None else [w for w, _ in cutter.pre_tokenize_str(text)]

    @property
    def strips_space(self) -> bool:
        """Whether a decoded text loses the space in front that encoding put there."""
        return self._decode.strips_space

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Ids of a text, without what the file's post-processor puts around it.

        Raises:
            RequestError: the tokenizer has no ids for it.
        """
        with _guarded(RequestError, "the tokenizer cannot encode this text"):
            library = self._special if parse_special else self._plain
            return library.encode(text, add_special_tokens=False).ids

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """The ids that the file's post-processor puts in front of a text."""
        for text in ("a", *self.tokens[:8]):
            try:
                with _guarded(WeightFormatError, self._what):
                    bare = self._plain.encode(text, add_special_tokens=False).ids
                    full = self._plain.encode(text, add_special_tokens=True).ids
            except WeightFormatError:  # not every text has ids
                continue
            for start in range(len(full) - len(bare) + 1):
                if bare and full[start : start + len(bare)] == bare:
                    return tuple(full[:start])
        return ()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for."""
        text, kind = self.tokens[token_id], self.types[token_id]
        if kind in SPECIAL:
            return text.encode()
        return self._decode(text, added=kind == TokenType.USER_DEFINED)

    @cached_property
    def _special(self) -> Any:
        return _library(self.source, self._what, special=True)


class _TokenRule:
    """What the file's decoder makes of one token.

    The rules that are followed: ByteLevel; Metaspace; sequences of Replace (a text), ByteFallback,
    Fuse and Strip (one space in front); WordPiece without its cleanup; and none, which puts a space
    before each token.
    """

    def __init__(self, rules: Mapping[str, Any] | None, what: str):
        self.strips_space = False
        self.byte_fallback = False
        self.byte_level = False
        self._replaced: list[tuple[str, str]] = []
        self._continues: str | None = None  # what a token begins with that takes no space
        self._spaced = rules is None
        if rules is None:
            self.strips_space = True
            return
        for rule in rules["decoders"] if rules["type"] == "Sequence" else [rules]:
            if not self._take(rule):
                raise WeightFormatError(
                    f"{what}: its decoder {json.dumps(rule)[:120]} is not supported; known are"
                    " ByteLevel, Metaspace, WordPiece, and Replace, ByteFallback, Fuse and Strip"
                )

    def _take(self, rule: Mapping[str, Any]) -> bool:
        match rule:
            case {"type": "ByteLevel"}:
                self.byte_level = True
            case {"type": "Metaspace", "replacement": letter, "prepend_scheme": scheme}:
                self._replaced.append((letter, " "))
                self.strips_space |= scheme != "never"
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
                self._replaced.append((old, new))
            case {"type": "ByteFallback"}:
                self.byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.strips_space = True
            case {"type": "WordPiece", "prefix": prefix} if prefix:
                self._continues, self._spaced, self.strips_space = prefix, True, True
            case _:
                return False
        return True

    def __call__(self, text: str, *, added: bool) -> bytes:
        """The bytes of a token; those of an added token are its text, but for what is replaced."""
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if self.byte_level and not added:
            with contextlib.suppress(KeyError):
                return letters_bytes(text)
        for old, new in self._replaced:
            text = text.replace(old, new)
        if self._continues is not None and text.startswith(self._continues):
            return text[len(self._continues) :].encode()
        return (" " + text if self._spaced and text else text).encode()


def vocabulary_of(
    codec: LibraryCodec,
    *,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
    pad_id: int | None,
    unk_id: int | None,
    add_bos: bool,
    chat_template: str | None,
) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json with what the files beside it add."""
    return Vocabulary(
        kind="library",
        tokens=codec.tokens,
        ids=codec.ids,
        types=bytes(codec.types),
        scores=[],
        merges=[],
        pre=None,
        add_bos=add_bos,
        add_space_prefix=codec.strips_space,
        bos_id=bos_id,
        eos_ids=eos_ids,
        pad_id=pad_id,
        unk_id=codec.unk_id if unk_id is None else unk_id,
        chat_template=chat_template,
    )


def _library(source: str, what: str, *, special: bool) -> Any:
    """The library's object; `special`: whether the texts of special tokens are matched."""
    from tokenizers import Tokenizer

    with _guarded(WeightFormatError, f"{what}: is no tokenizer"):
        library = Tokenizer.from_str(source)
        # A file may ask for either, and would cut prompts short without a word.
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = not special
    return library


@contextlib.contextmanager
def _guarded(kind: type[Exception], message: str) -> Iterator[None]:
    """Turn what the library raises into one line.  Its panics derive from BaseException."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{message} ({' '.join(str(error).split())[:200]})") from None
