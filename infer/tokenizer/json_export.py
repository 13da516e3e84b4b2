"""A tokenizer of a GGUF file as tokenizer.json, and as what stands beside it.

Byte-level BPE goes over as it is.  SentencePiece BPE has scores where tokenizer.json has merges:
every way to put a token together from two others is a merge, the best score first, as transformers
converts it.
"""

import json
from collections.abc import Mapping
from typing import Any

from infer.errors import WeightFormatError
from infer.tokenizer.normalizing import SPACE
from infer.tokenizer.vocabulary import SPECIAL, TokenType, Vocabulary

_WHOLE = (*SPECIAL, TokenType.USER_DEFINED)
_NEVER_MERGED = (*_WHOLE, TokenType.BYTE, TokenType.UNUSED)


def folder_files(
    vocabulary: Vocabulary, source: str | None, templates: Mapping[str, str], max_context: int
) -> dict[str, str]:
    """Return tokenizer.json and tokenizer_config.json by name, as text.

    Args:
        vocabulary: of the tokenizer.
        source: its tokenizer.json, if it was made from one; it is kept as it is.
        templates: chat templates by name.
        max_context: of the model.

    Raises:
        WeightFormatError: there is no `source`, and the kind of vocabulary has no form there.
    """
    if source is None:
        source = json.dumps(tokenizer_json(vocabulary), ensure_ascii=False) + "\n"
    values = tokenizer_config(vocabulary, max_context)
    values.pop("chat_template", None)
    if list(templates) == ["default"]:
        values["chat_template"] = templates["default"]
    elif templates:
        values["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    return {"tokenizer.json": source, "tokenizer_config.json": text}


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the object of a tokenizer.json.

    Args:
        vocabulary: Of a GGUF file, of the kind "gpt2" or "llama".

    Raises:
        WeightFormatError: It is of another kind.
    """
    if vocabulary.kind not in _MODELS:
        raise WeightFormatError(
            f"a tokenizer of the kind {vocabulary.kind!r} has no form in tokenizer.json here; known"
            f" are {', '.join(_MODELS)}"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        **_MODELS[vocabulary.kind](vocabulary),
    }


def tokenizer_config(vocabulary: Vocabulary, max_context: int) -> dict[str, Any]:
    """Return the object of a tokenizer_config.json, chat template included."""
    eos = vocabulary.eos_ids[0] if vocabulary.eos_ids else None
    named = {
        "bos_token": vocabulary.bos_id,
        "eos_token": eos,
        "unk_token": vocabulary.unk_id,
        "pad_token": vocabulary.pad_id,
    }
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
    }
    values |= {key: vocabulary.tokens[i] for key, i in named.items() if i is not None}
    if vocabulary.chat_template is not None:
        values["chat_template"] = vocabulary.chat_template
    return values


def _added_tokens(v: Vocabulary) -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "content": v.tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": i in v.strips_right,
            "normalized": False,
            "special": v.types[i] in SPECIAL,
        }
        for i in v.ids_of(*_WHOLE)
    ]


def _byte_level(v: Vocabulary) -> dict[str, Any]:
    assert v.pre is not None
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in v.pre.patterns
    ]
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, level | {"use_regex": False}],
        },
        "post_processor": _bos(v),
        "decoder": level | {"use_regex": True},
        "model": _bpe(
            v, [list(pair) for pair in v.merges], ignore_merges=v.pre.ignore_merges, unk_token=None
        ),
    }


def _sentencepiece(v: Vocabulary) -> dict[str, Any]:
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    front: dict[str, Any] = {"type": "Prepend", "prepend": SPACE}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if v.add_space_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    has_bytes = bool(v.ids_of(TokenType.BYTE))
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [front, spaces] if v.add_space_prefix else [spaces],
        },
        "pre_tokenizer": None,
        "post_processor": _bos(v),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            v,
            _merges_by_score(v),
            byte_fallback=has_bytes,
            fuse_unk=True,
            unk_token=None if v.unk_id is None else v.tokens[v.unk_id],
        ),
    }


_MODELS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _bpe(v: Vocabulary, merges: list[list[str]], **options: Any) -> dict[str, Any]:
    defaults = dict(
        dropout=None,
        continuing_subword_prefix=None,
        end_of_word_suffix=None,
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=False,
    )
    return {"type": "BPE", **(defaults | options), "vocab": v.ids, "merges": merges}


def _merges_by_score(v: Vocabulary) -> list[list[str]]:
    never = set(v.ids_of(*_NEVER_MERGED))
    ids = {text: i for text, i in v.ids.items() if i not in never}
    found = [
        (-v.scores[i], ids[left], ids[right])
        for text, i in ids.items()
        for at in range(1, len(text))
        if (left := text[:at]) in ids and (right := text[at:]) in ids
    ]
    return [[v.tokens[left], v.tokens[right]] for _, left, right in sorted(found)]


def _bos(v: Vocabulary) -> dict[str, Any] | None:
    if not v.add_bos or v.bos_id is None:
        return None
    text = v.tokens[v.bos_id]
    special = {"SpecialToken": {"id": text, "type_id": 0}}
    sequence = lambda name: {"Sequence": {"id": name, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, sequence("A")],
        "pair": [special, sequence("A"), special, sequence("B")],
        "special_tokens": {text: {"id": text, "ids": [v.bos_id], "tokens": [text]}},
    }
