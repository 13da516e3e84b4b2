"""The tokenizer that the rest of the package uses, built from any of the files that hold one."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import index
from pathlib import Path
from types import MappingProxyType
from typing import Any, SupportsIndex

from infer.errors import ConfigError, RequestError
from infer.model_files import ModelFolder
from infer.tokenizer import json_export
from infer.tokenizer.byte_level import ByteLevelCodec
from infer.tokenizer.decoding import DecodeStream
from infer.tokenizer.folder import Parts, parts_of, parts_of_folder
from infer.tokenizer.library import LibraryCodec
from infer.tokenizer.normalizing import TextNormalizer
from infer.tokenizer.rank_merge import RankMergeCodec
from infer.tokenizer.score_merge import ScoreMergeCodec
from infer.tokenizer.sentencepiece_files import read_sentencepiece
from infer.tokenizer.splitting import TokenSplitter
from infer.tokenizer.tiktoken_files import read_tekken, read_tiktoken
from infer.tokenizer.unigram import UnigramCodec
from infer.tokenizer.vocabulary import SPECIAL, TokenType, Vocabulary

_CODECS = {
    "gpt2": ByteLevelCodec,
    "llama": ScoreMergeCodec,
    "tiktoken": RankMergeCodec,
    "unigram": UnigramCodec,
}
_Codec = ByteLevelCodec | ScoreMergeCodec | RankMergeCodec | UnigramCodec


class Tokenizer:
    """Text to ids and back. Immutable, and safe to use from several threads.

    For every id, `token_bytes` is the whole truth: decoding joins them and reads UTF-8, a byte that
    fits nowhere becomes U+FFFD. Nothing is cleaned up (llama.cpp takes spaces before punctuation
    away for some vocabularies), so that the text of a stream never changes afterwards.
    """

    def __init__(self, parts: Vocabulary | Parts, *, chat_template: str | None = None):
        if isinstance(parts, Vocabulary):
            vocabulary, self._prefix = parts, () if parts.bos_id is None else (parts.bos_id,)
            self._codec = _CODECS[vocabulary.kind](vocabulary)
            templates: Mapping[str, str] = {}
            if vocabulary.chat_template:
                templates = {"default": vocabulary.chat_template}
        else:
            vocabulary, self._codec, templates = parts.vocabulary, parts.codec, parts.templates
            bos = () if vocabulary.bos_id is None else (vocabulary.bos_id,)
            self._prefix = parts.prefix or bos
        self._vocabulary = vocabulary
        self._templates = dict(templates)
        if chat_template:
            self._templates["default"] = chat_template
        self._compiled: dict[str, Any] = {}

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, chat_template: str | None = None
    ) -> "Tokenizer":
        """Build the tokenizer that a GGUF file describes.

        Args:
            metadata: the file's key-value pairs: Python scalars, str, list[str], and numpy arrays.
            chat_template: used in place of the file's own.

        Raises:
            WeightFormatError: a key is missing or broken, or the kind of tokenizer is not known.
        """
        return cls(Vocabulary.from_gguf(metadata), chat_template=chat_template)

    @classmethod
    def from_folder(
        cls, path: str | os.PathLike[str], *, chat_template: str | None = None
    ) -> "Tokenizer":
        """Build the tokenizer of a folder in transformers' layout.

        Args:
            path: of a folder with tokenizer.json; the files beside it name special tokens, the ids
                that end a generation, and chat templates.
            chat_template: used in place of the folder's own.

        Raises:
            WeightFormatError: a file is missing, broken, or decodes in a way that is not followed.
        """
        return cls(parts_of_folder(ModelFolder(path)), chat_template=chat_template)

    @classmethod
    def from_tokenizer_json(
        cls,
        source: str,
        *,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> "Tokenizer":
        """Build the tokenizer that the text of a tokenizer.json describes.

        Args:
            source: the text.
            config: what tokenizer_config.json says.
            chat_template: the source of a template.

        Raises:
            WeightFormatError: it is broken, or decodes in a way that is not followed.
        """
        parts = parts_of(source, config=config or {}, ids=[], templates={})
        return cls(parts, chat_template=chat_template)

    @classmethod
    def from_sentencepiece(
        cls, path: str | os.PathLike[str], *, chat_template: str | None = None
    ) -> "Tokenizer":
        """Read a SentencePiece `.model` file, BPE or unigram, with its normaliser.

        A prompt starts with BOS where the model has one; such a file has no rule of its own.

        Raises:
            WeightFormatError: the file is broken, or of a kind that is not read.
        """
        return cls(read_sentencepiece(Path(path).read_bytes()), chat_template=chat_template)

    @classmethod
    def from_tiktoken(
        cls,
        path: str | os.PathLike[str],
        *,
        pattern: str,
        special_tokens: Mapping[str, int] = MappingProxyType({}),
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_template: str | None = None,
    ) -> "Tokenizer":
        """Read a tiktoken file: a token in base64 and its rank on each line.

        Args:
            path: the file.
            pattern: the expression that cuts text into words, which the file does not hold.
            special_tokens: texts of control tokens and their ids.
            bos_token: the one of them that starts a prompt; None for no BOS.
            eos_token: the one of them that ends a generation, beside those with a known text.
            chat_template: used by `apply_chat_template`.

        Raises:
            WeightFormatError: the file is broken, ids collide, or the pattern does not compile.
        """
        vocabulary = read_tiktoken(
            Path(path).read_bytes(),
            pattern=pattern,
            special_tokens=special_tokens,
            bos_token=bos_token,
            eos_token=eos_token,
        )
        return cls(vocabulary, chat_template=chat_template)

    @classmethod
    def from_tekken(
        cls, path: str | os.PathLike[str], *, chat_template: str | None = None
    ) -> "Tokenizer":
        """Read Mistral's `tekken.json`; a prompt starts with `<s>`.

        Raises:
            WeightFormatError: the file is broken, or of a kind that is not read.
        """
        return cls(read_tekken(Path(path).read_bytes()), chat_template=chat_template)

    @property
    def vocab_size(self) -> int:
        """Number of ids; a model's logits may be wider."""
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a sequence."""
        return self._vocabulary.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends a generation; the file's own EOS first."""
        return self._vocabulary.eos_ids

    @property
    def pad_id(self) -> int | None:
        """The file's padding token."""
        return self._vocabulary.pad_id

    @property
    def unk_id(self) -> int | None:
        """The token for what cannot be encoded."""
        return self._vocabulary.unk_id

    @property
    def add_bos(self) -> bool:
        """The file's rule: whether a prompt starts with BOS."""
        return self._vocabulary.add_bos

    @property
    def add_space_prefix(self) -> bool:
        """Whether a text gets a space in front before it is encoded."""
        return self._vocabulary.add_space_prefix

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template: the one given, else the file's."""
        return self._templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The sources of all chat templates by name; the one that is used unless told otherwise is
        "default".
        """
        return dict(self._templates)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Control and unknown tokens: matched in text only on request, and not shown."""
        return frozenset(self._vocabulary.ids_of(*SPECIAL))

    def encode(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = False
    ) -> list[int]:
        """Turn text into ids.

        BOS stands in front at most once: where the parsed text begins with it, none is added. A
        tokenizer.json may put several tokens there, which then count as one. EOS
        is never added, whatever the file says: a prompt goes on. The empty text is `[bos]` or,
        without BOS, `[]`, which `generate` refuses.

        Args:
            text: any text without lone surrogates.
            add_bos: put BOS in front; None follows the file's rule.
            parse_special: match the texts of control tokens. Leave it off for what users wrote.

        Raises:
            RequestError: not a string, a lone surrogate, or BOS was asked for and there is none.
        """
        _check_text(text)
        if isinstance(self._codec, LibraryCodec):
            ids = self._codec.encode(text, parse_special)
        else:
            splitter = self._special_splitter if parse_special else self._plain_splitter
            ids = self._encode_parts(text, self._codec, splitter)
        if self.add_bos if add_bos is None else add_bos:
            prefix = list(self._prefix)
            if not prefix:
                raise RequestError("add_bos=True, but this tokenizer has no BOS token; use False")
            if ids[: len(prefix)] != prefix:
                ids = prefix + ids
        return ids

    def decode(
        self,
        ids: Iterable[SupportsIndex],
        *,
        skip_special_tokens: bool = True,
        continuation: bool = False,
    ) -> str:
        """Turn ids into text; the options are those of DecodeStream.

        Raises:
            RequestError: an id is not one of the vocabulary.
        """
        stream = self.stream(skip_special_tokens=skip_special_tokens, continuation=continuation)
        return b"".join(map(stream.visible_bytes, ids)).decode(errors="replace")

    def stream(
        self, *, skip_special_tokens: bool = True, continuation: bool = False
    ) -> DecodeStream:
        """Start decoding a sequence token by token."""
        return DecodeStream(
            self, skip_special_tokens=skip_special_tokens, continuation=continuation
        )

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """The bytes a token stands for; for a special token, its text.

        Raises:
            RequestError: the id is not one of the vocabulary.
        """
        try:
            token = index(token_id)
        except TypeError:
            raise RequestError(f"token id {token_id!r:.40} is not an integer") from None
        if not 0 <= token < self.vocab_size:
            raise RequestError(
                f"token id {token} is not in the vocabulary, 0 to {self.vocab_size - 1}"
            )
        return self._codec.token_bytes(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """Render a conversation with the chat template and, unless told otherwise, encode it.

        Control tokens are matched in the rendered text, those in a message's content included, as
        the model's own tokenizer does. BOS by the file's rule, once: a template that writes it gets
        no second one.

        Args:
            messages: mappings with a `role` and what the template reads beside it.
            add_generation_prompt: end where the assistant's answer begins.
            tokenize: return ids; False returns the text.
            tools: descriptions of functions, as the template expects them.
            chat_template: the name of one of `chat_templates`, or the source of another.  None:
                "tool_use" where there are tools and a template of that name, else "default".
            variables: further variables of the template, such as enable_thinking.

        Raises:
            ConfigError: there is no chat template, or it does not compile.
            RequestError: the template refused the messages, failed, or did what it may not.
        """
        text = self._chat(chat_template, tools).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **self._token_texts(),
            **variables,
        )
        return self.encode(text, parse_special=True) if tokenize else text

    def folder_files(self, max_context: int) -> dict[str, str]:
        """Return the files by name that hold this tokenizer in a folder in transformers' layout.

        Args:
            max_context: the model's, which tokenizer_config.json says.

        Raises:
            WeightFormatError: it has no form in tokenizer.json.
        """
        source = self._codec.source if isinstance(self._codec, LibraryCodec) else None
        return json_export.folder_files(self._vocabulary, source, self._templates, max_context)

    def _chat(self, wanted: str | None, tools: Sequence[Any] | None) -> Any:
        from infer.tokenizer.chat import ChatTemplate

        if wanted is None:
            wanted = "tool_use" if tools and "tool_use" in self._templates else "default"
            if wanted not in self._templates:
                others = ", ".join(self._templates)
                raise ConfigError(
                    f"this model has no default chat template; choose one of {others}"
                    if others
                    else "this model has no chat template (a base model?); "
                    "pass chat_template=... or use completion"
                )
        source = self._templates.get(wanted, wanted)
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source)
        return self._compiled[source]

    def _token_texts(self) -> dict[str, str]:
        tokens = self._vocabulary.tokens
        named = {
            "bos_token": self.bos_id,
            "eos_token": self.eos_ids[0] if self.eos_ids else None,
            "unk_token": self.unk_id,
            "pad_token": self.pad_id,
        }
        return {name: "" if i is None else tokens[i] for name, i in named.items()}

    @cached_property
    def _plain_splitter(self) -> TokenSplitter:
        return self._splitter(*self._whole_texts)

    @cached_property
    def _special_splitter(self) -> TokenSplitter:
        return self._splitter(*self._whole_texts, *SPECIAL)

    @property
    def _whole_texts(self) -> tuple[TokenType, ...]:
        """The type that is matched before anything else, unless a normaliser comes first."""
        return () if self._vocabulary.normalizer is not None else (TokenType.USER_DEFINED,)

    def _splitter(self, *kinds: TokenType) -> TokenSplitter:
        tokens = self._vocabulary.tokens
        return TokenSplitter({tokens[i]: i for i in self._vocabulary.ids_of(*kinds)})

    def _encode_parts(self, text: str, codec: _Codec, splitter: TokenSplitter) -> list[int]:
        """Ids of a text; the space prefix, where it is the rule, begins each stretch of plain text.

        llama.cpp begins another stretch after a user-defined token; SentencePiece, and we, do not.
        """
        normalizer = self._vocabulary.normalizer
        if normalizer is not None:
            return self._encode_normalized(text, codec, splitter, normalizer)
        ids: list[int] = []
        stretch_start = self.add_space_prefix
        strips_right, stripping = self._vocabulary.strips_right, False
        for part in splitter.split(text):
            if isinstance(part, str) and stripping:
                part = part.lstrip(" \t\n\v\f\r")
                if not part:
                    continue
            stripping = part in strips_right
            if isinstance(part, str):
                ids.extend(codec.encode(" " + part if stretch_start else part))
            elif part in self.special_ids:
                ids.append(part)
                stretch_start = self.add_space_prefix
                continue
            else:
                ids.extend(codec.encode(" ") if stretch_start else [])
                ids.append(part)
            stretch_start = False
        return ids

    def _encode_normalized(
        self, text: str, codec: _Codec, splitter: TokenSplitter, normalizer: TextNormalizer
    ) -> list[int]:
        """Ids where a SentencePiece model says how each stretch of text is normalised.

        User-defined symbols are found in the normalised text; a unigram model weighs them itself.
        """
        ids: list[int] = []
        inner = None if self._vocabulary.kind == "unigram" else self._normalized_splitter
        for part in splitter.split(text):
            if not isinstance(part, str):
                ids.append(part)
                continue
            stretch = normalizer(part)
            for piece in [stretch] if inner is None else inner.split(stretch):
                ids.extend(codec.encode(piece) if isinstance(piece, str) else [piece])
        return ids

    @cached_property
    def _normalized_splitter(self) -> TokenSplitter:
        return self._splitter(TokenType.USER_DEFINED)


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"text is {type(text).__name__}, not str; decode bytes first")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text has a lone surrogate, U+{ord(text[error.start]):04X} at {error.start}, which is "
            "no character; replace it, as text.encode('utf-8', 'replace').decode() does"
        ) from None
