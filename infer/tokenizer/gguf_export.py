"""A tokenizer.json as the `tokenizer.*` keys of a GGUF file.

GGUF names how text is cut into words instead of saying it, so the name is found by trying: the
first one that cuts all probes as the file does.  BPE over SentencePiece's pieces has merges where
GGUF has scores: a token's score is the rank of its first merge.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from infer.errors import WeightFormatError
from infer.tokenizer import probes
from infer.tokenizer.folder import Parts
from infer.tokenizer.library import LibraryCodec
from infer.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from infer.tokenizer.vocabulary import TokenType

_PREFIX = "tokenizer.ggml."
# What llama.cpp's converter writes, where several names stand for the same expressions.
_PREFERRED = (
    *("llama-bpe", "gpt-2", "smollm", "qwen2", "tekken", "gpt-4o", "glm4", "deepseek-v3"),
    *("deepseek-llm", "deepseek-coder", "falcon", "default"),
)
# Normalisers that GGUF has no key for and that llama.cpp's converter leaves out as well.
_LEFT_OUT = ("NFC",)


def gguf_keys(parts: Parts, vocab_size: int) -> dict[str, Any]:
    """Return the `tokenizer.*` keys.

    Args:
        parts: Of a folder, as `parts_of_folder` reads it.
        vocab_size: Rows of the embedding; missing tokens become unused ones, further ones are left
            out, since llama.cpp wants one for each row.

    Raises:
        WeightFormatError: GGUF cannot say what this tokenizer does.
    """
    source = json.loads(parts.codec.source)
    model, codec = source["model"], parts.codec
    if model.get("type") != "BPE":
        raise _refused(f"its model is {model.get('type')}, and BPE is written")
    kind = _kind(codec, source)
    tokens, types = _padded(codec, vocab_size)
    keys: dict[str, Any] = {"model": kind}
    if kind == "gpt2":
        merges = [_merge(pair) for pair in model["merges"]]
        keys |= {"pre": _pre_name(codec, bool(model.get("ignore_merges")))}
        keys |= {"tokens": tokens, "token_type": types}
        keys["merges"] = merges if merges else np.array([], "U")
    else:
        if codec.unk_id is not None and codec.unk_id < len(types):
            types[codec.unk_id] = TokenType.UNKNOWN
        scores = _scores(codec, model["merges"], len(tokens))
        keys |= {"pre": "default", "tokens": tokens, "scores": scores, "token_type": types}
        keys["add_space_prefix"] = _adds_space(source)
    keys = {_PREFIX + key: value for key, value in keys.items()}
    return keys | _special(parts, vocab_size)


def _special(parts: Parts, vocab_size: int) -> dict[str, Any]:
    v = parts.vocabulary
    if parts.prefix not in ((), (v.bos_id,)):
        raise _refused("it puts more than one token in front of a text")
    ends = dict(zip(("eos", "eot", "eom"), v.eos_ids, strict=False))
    named = {"bos": v.bos_id, **ends, "unknown": v.unk_id, "padding": v.pad_id}
    keys: dict[str, Any] = {
        f"{_PREFIX}{name}_token_id": i
        for name, i in named.items()
        if i is not None and i < vocab_size
    }
    keys[f"{_PREFIX}add_bos_token"] = v.add_bos
    if v.chat_template is not None:
        keys["tokenizer.chat_template"] = v.chat_template
    return keys


def strips_right(parts: Parts) -> bool:
    """Return whether a token takes the whitespace after it, which GGUF says by the model's name
    only.
    """
    added = json.loads(parts.codec.source).get("added_tokens") or []
    return any(token.get("rstrip") for token in added)


def _kind(codec: LibraryCodec, source: Mapping[str, Any]) -> str:
    """Return GGUF's name of the kind; refuse steps that it has no key for."""
    normalizers = _steps(source.get("normalizer"), "normalizers")
    if codec.is_byte_level:
        for step in normalizers:
            if step["type"] not in _LEFT_OUT:
                raise _refused(f"its normalizer {step['type']} has no key")
        return "gpt2"
    known = [step for step in normalizers if step["type"] in ("Prepend", "Replace")]
    if not source["model"].get("byte_fallback") or known != normalizers:
        raise _refused("it is neither byte-level BPE nor SentencePiece BPE with byte tokens")
    return "llama"


def _steps(part: Mapping[str, Any] | None, of: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return list(part[of]) if part["type"] == "Sequence" else [part]


def _adds_space(source: Mapping[str, Any]) -> bool:
    steps = _steps(source.get("normalizer"), "normalizers")
    steps += _steps(source.get("pre_tokenizer"), "pretokenizers")
    return any(
        step["type"] == "Prepend"
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _padded(codec: LibraryCodec, size: int) -> tuple[list[str], np.ndarray]:
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(codec.tokens[:size])]
    types = np.frombuffer(bytes(codec.types), np.uint8)[:size].astype(np.int32)
    missing = range(len(tokens), size)
    tokens += [f"[PAD{i}]" for i in missing]
    return tokens, np.append(types, np.full(len(missing), TokenType.UNUSED, np.int32))


def _merge(pair: str | list[str]) -> str:
    if isinstance(pair, str):
        return pair
    if any(" " in part for part in pair):
        raise _refused(f"its merge {pair!r:.80} holds a space, at which GGUF cuts")
    return " ".join(pair)


def _scores(codec: LibraryCodec, merges: list[Any], size: int) -> np.ndarray:
    scores = np.full(size, -float(len(merges)), np.float32)
    for rank, pair in reversed(list(enumerate(merges))):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        i = codec.ids.get(left + right)
        if i is not None and i < size:
            scores[i] = -rank
    return scores


def _pre_name(codec: LibraryCodec, ignore_merges: bool) -> str:
    wanted = [codec.words(text) for text in probes.TEXTS]
    for name in (*_PREFERRED, *PRE_TOKENIZERS):
        pre = PRE_TOKENIZERS[name]
        if pre.ignore_merges == ignore_merges and _cuts_like(pre, wanted):
            return name
    raise _refused("no pre-tokenizer that GGUF has a name for cuts text into the same words")


def _cuts_like(pre: PreTokenizer, wanted: list[list[str]]) -> bool:
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cutter = pre_tokenizers.Sequence([*steps, level])
    return all(
        [word for word, _ in cutter.pre_tokenize_str(text)] == words
        for text, words in zip(probes.TEXTS, wanted, strict=True)
    )


def _refused(why: str) -> WeightFormatError:
    return WeightFormatError(
        f"the tokenizer cannot be written as GGUF: {why}; convert without tokenizer.json, or keep"
        " the folder"
    )
