"""The vocabulary of a GGUF file, validated: texts, types, special ids, and the file's BOS rule."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer.errors import WeightFormatError
from infer.tokenizer.normalizing import TextNormalizer
from infer.tokenizer.pretokenizers import PreTokenizer, pre_tokenizer

_PREFIX = "tokenizer.ggml."
KINDS = ("gpt2", "llama")

# Texts that end a turn or a document when they are control tokens, as llama.cpp lists them.
# `end_ids` says which of llama.cpp's further rules are followed.
_END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[".split()
)


class TokenType(enum.IntEnum):
    """`tokenizer.ggml.token_type`; UNDEFINED is treated as NORMAL."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL = frozenset({TokenType.UNKNOWN, TokenType.CONTROL})


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """What a tokenizer is made of.

    Attributes:
        kind: "gpt2" (byte-level BPE with merges), "llama" (SentencePiece BPE with scores),
            "unigram" (SentencePiece's language model), "tiktoken" (byte-level BPE by rank) or
            "library" (tokenizer.json, which the `tokenizers` library reads).
        tokens: the text of each id, as the file writes it.
        ids: the inverse of `tokens`.
        types: one TokenType value per id, one byte each.
        scores: merge priority or log-probability per id, higher first ("llama", "unigram").
        merges: pairs in order of priority ("gpt2"; empty for "llama").
        pre: how text is cut into words before merging ("gpt2", "tiktoken"; else None).
        add_bos: whether a prompt starts with `bos_id` unless the caller says otherwise.
        add_space_prefix: whether a text gets a space in front ("llama").
        eos_ids: every id that ends a generation; the file's EOS first.
        normalizer: what a SentencePiece model does to text before it cuts it.
        strips_right: tokens that swallow the whitespace after them.
    """

    kind: str
    tokens: list[str]
    ids: dict[str, int]
    types: bytes
    scores: list[float]
    merges: list[tuple[str, str]]
    pre: PreTokenizer | None
    add_bos: bool
    add_space_prefix: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    unk_id: int | None
    chat_template: str | None
    normalizer: TextNormalizer | None = None
    strips_right: frozenset[int] = frozenset()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Vocabulary":
        """Read and check the `tokenizer.*` keys of a GGUF file.

        Raises:
            WeightFormatError: a key is missing, has the wrong type or length, or names a tokenizer
                or pre-tokenizer that is not known.
        """
        kind = _get(metadata, "model", str)
        if kind not in KINDS:
            raise WeightFormatError(
                f"{_PREFIX}model is {kind!r}, which is not read; known kinds: {', '.join(KINDS)}"
            )
        tokens = _tokens(metadata)
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
        if len(ids) != len(tokens):
            first = next(i for i, text in enumerate(tokens) if ids[text] != i)
            raise WeightFormatError(
                f"{_PREFIX}tokens {first} and {ids[tokens[first]]} are both {tokens[first]!r:.60}"
            )
        types = _types(metadata, len(tokens))
        is_llama = kind == "llama"
        # SentencePiece's conventional ids; llama.cpp's default of 11 for "gpt2" has no such ground.
        bos, eos, unk = (1, 2, 0) if is_llama else (None, None, None)
        bos, eos, unk, pad, eot, eom = (
            _special_id(metadata, name, default, len(tokens))
            for name, default in (
                ("bos", bos),
                ("eos", eos),
                ("unknown", unk),
                ("padding", None),
                ("eot", None),
                ("eom", None),
            )
        )
        pre = None if is_llama else _pre(metadata)
        add_bos_default = is_llama or (pre is not None and pre.add_bos)
        add_bos = _get(metadata, "add_bos_token", bool, add_bos_default)
        if add_bos and bos is None:
            raise WeightFormatError(
                f"{_PREFIX}add_bos_token is true but {_PREFIX}bos_token_id is not set"
            )
        named_ends = [i for i in (eos, eot, eom) if i is not None]
        template = metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise WeightFormatError(
                f"tokenizer.chat_template is {type(template).__name__}, not a string"
            )
        return cls(
            kind=kind,
            tokens=tokens,
            ids=ids,
            types=types,
            scores=_scores(metadata, len(tokens)) if is_llama else [],
            merges=[] if is_llama else _merges(metadata),
            pre=pre,
            add_bos=add_bos,
            add_space_prefix=_get(metadata, "add_space_prefix", bool, True) if is_llama else False,
            bos_id=bos,
            eos_ids=end_ids(named_ends, ids, types),
            pad_id=pad,
            unk_id=unk,
            chat_template=template,
            strips_right=_strips_right(metadata, tokens, types),
        )

    def ids_of(self, *kinds: TokenType) -> list[int]:
        """The ids whose type is one of `kinds`, in order."""
        return np.flatnonzero(np.isin(np.frombuffer(self.types, np.uint8), kinds)).tolist()


def _get(metadata: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """The value of a scalar key, or `default`; without a default the key is required."""
    value = metadata.get(_PREFIX + name)
    if value is None:
        if default is None:
            raise WeightFormatError(f"{_PREFIX}{name} is missing")
        return default
    if not isinstance(value, kind):
        raise WeightFormatError(
            f"{_PREFIX}{name} is {type(value).__name__} {value!r:.40}, not {kind.__name__}"
        )
    return value


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(_PREFIX + name)
    if value is None:
        raise WeightFormatError(f"{_PREFIX}{name} is missing")
    if not isinstance(value, list | tuple) or set(map(type, value)) - {str}:
        raise WeightFormatError(f"{_PREFIX}{name} is not a list of strings")
    return list(value)


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise WeightFormatError(f"{_PREFIX}tokens is empty")
    if "" in tokens:
        # An empty text could never be matched; llama.cpp gives it this name too.
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    return tokens


def _numbers(metadata: Mapping[str, Any], name: str, length: int, kinds: str) -> np.ndarray | None:
    """An array of `length` numbers whose dtype kind is one of `kinds`, or None if absent."""
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    array = np.asarray(value)
    if array.dtype.kind not in kinds:
        rule = "integers" if kinds == "iu" else "numbers"
        raise WeightFormatError(f"{_PREFIX}{name} has dtype {array.dtype}; it must hold {rule}")
    if array.shape != (length,):
        raise WeightFormatError(
            f"{_PREFIX}{name} has shape {array.shape}; there are {length} tokens"
        )
    return array


def _types(metadata: Mapping[str, Any], length: int) -> bytes:
    array = _numbers(metadata, "token_type", length, "iu")
    if array is None:
        return bytes([TokenType.NORMAL]) * length
    if array.min() < 0 or array.max() > max(TokenType):
        wrong = int(np.argmax((array < 0) | (array > max(TokenType))))
        raise WeightFormatError(
            f"{_PREFIX}token_type of token {wrong} is {array[wrong]}; "
            f"known types are 0 to {max(TokenType):d}"
        )
    return array.astype(np.uint8).tobytes()


def _scores(metadata: Mapping[str, Any], length: int) -> list[float]:
    array = _numbers(metadata, "scores", length, "fi")
    if array is None:
        raise WeightFormatError(f"{_PREFIX}scores is missing; the kind 'llama' merges by score")
    if np.isnan(array).any():
        raise WeightFormatError(
            f"{_PREFIX}scores of token {int(np.argmax(np.isnan(array)))} is nan"
        )
    return array.tolist()


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = []
    for i, merge in enumerate(_strings(metadata, "merges")):
        # The left part has at least one character, which may itself be a space.
        space = merge.find(" ", 1)
        if space < 0 or space + 1 == len(merge):
            raise WeightFormatError(
                f"{_PREFIX}merges[{i}] is {merge!r}; a merge is two texts with a space between them"
            )
        pairs.append((merge[:space], merge[space + 1 :]))
    return pairs


def _pre(metadata: Mapping[str, Any]) -> PreTokenizer:
    key = _PREFIX + "pre"
    if key not in metadata:
        raise WeightFormatError(
            f"{key} is missing, so how the text is cut into words is not known; "
            f"add it to the metadata, as in metadata | {{{key!r}: 'llama-bpe'}}"
        )
    return pre_tokenizer(_get(metadata, "pre", str))


def _special_id(
    metadata: Mapping[str, Any], name: str, default: int | None, length: int
) -> int | None:
    """An id named by the file, or its default where the vocabulary reaches that far."""
    key = f"{_PREFIX}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return default if default is not None and default < length else None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise WeightFormatError(f"{key} is {value!r:.40}, not an integer")
    if not 0 <= value < length:
        raise WeightFormatError(f"{key} is {value}; ids are 0 to {length - 1}")
    return int(value)


def end_ids(named: list[int], ids: Mapping[str, int], types: bytes) -> tuple[int, ...]:
    """Ids that end a generation: those the file names, then control tokens with a known text.

    Source: llama.cpp, `llama_vocab::impl::load`, the end-of-generation list, its exceptions for
    `<|end|>` and `</s>` included. We differ in two ways: a text counts only where its token has the
    type CONTROL (the `</s>` of Gemma 3 is an HTML tag, and llama.cpp stops at it), and the
    file and repository separators of code models end nothing.
    """
    by_text = {
        text: ids[text]
        for text in _END_TEXTS
        if text in ids and types[ids[text]] == TokenType.CONTROL
    }
    if {"<|return|>", "<|call|>"} <= by_text.keys() or {"<|calls|>", "<|flush|>"} <= by_text.keys():
        by_text.pop("<|end|>", None)
    if "<|tool_response>" in by_text:
        by_text.pop("</s>", None)
    return tuple(dict.fromkeys([*named, *sorted(by_text.values())]))


def _strips_right(metadata: Mapping[str, Any], tokens: list[str], types: bytes) -> frozenset[int]:
    """Phi-3's whole texts take the whitespace after them; no key says so, only the model's name.

    Source: llama.cpp, `llama_vocab::impl::load`, "set attributes by model/tokenizer name".
    """
    name = metadata.get("general.name")
    if not isinstance(name, str) or not re.search("phi-?3", name.lower()):
        return frozenset()
    whole = {*SPECIAL, TokenType.USER_DEFINED}
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    return frozenset(i for i, t in enumerate(types) if t in whole and tokens[i] not in kept)
