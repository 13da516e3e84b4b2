r"""Files of ranked tokens: tiktoken's lines of base64 and rank, and Mistral's `tekken.json`.

tiktoken's expressions are those of Rust's fancy-regex; ours are Oniguruma's, which reads `$` as the
end of a line and `{1,3}+` as a repetition, so these two are rewritten.
"""

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any

from infer.errors import WeightFormatError
from infer.tokenizer.byte_level import bytes_letters
from infer.tokenizer.pretokenizers import PreTokenizer
from infer.tokenizer.vocabulary import TokenType, Vocabulary, end_ids

_MAX_GAP = 1 << 16  # ids without a token between the last rank and the special tokens
_MAX_SPECIAL = 1 << 16
# Control tokens of tekken files that list none, by id; further ones are <SPECIAL_20> and so on.
_TEKKEN_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
_ATOM = r"\\p\{\^?\w+\}|\\[^p]|\[(?:\\.|[^\]\\])*\]|[^\\()\[\]{}|*+?]"
_POSSESSIVE_COUNT = re.compile(rf"({_ATOM})(\{{\d+(?:,\d*)?\}})\+")
_END = re.compile(r"(\\.|\[(?:\\.|[^\]\\])*\])|\$")


def read_tiktoken(
    data: bytes,
    *,
    pattern: str,
    special_tokens: Mapping[str, int],
    bos_token: str | None,
    eos_token: str | None,
) -> Vocabulary:
    """The vocabulary of a tiktoken file.

    Raises:
        WeightFormatError: a line is not base64 and a rank, a byte has no token, or ids collide.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            ranks[base64.b64decode(encoded, validate=True)] = _rank(rank.decode())
        except (ValueError, binascii.Error):
            raise WeightFormatError(
                f"line {number} of the tiktoken file is {line[:40]!r}; "
                "it must be a token in base64, a space, and its rank"
            ) from None
    return _vocabulary(ranks, pattern, special_tokens, 0, bos_token, eos_token)


def read_tekken(data: bytes) -> Vocabulary:
    """The vocabulary of a `tekken.json`; a token's id is its rank after the special tokens.

    Raises:
        WeightFormatError: it is not JSON, or a field is missing or has the wrong type.
    """
    try:
        file = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WeightFormatError(f"the tekken file is not JSON: {str(error)[:100]}") from None
    config = _field(file, "config", dict)
    num_special = _field(config, "default_num_special_tokens", int)
    size = _field(config, "default_vocab_size", int)
    entries = _field(file, "vocab", list)
    if not (3 <= num_special <= _MAX_SPECIAL and 0 < size - num_special <= len(entries)):
        raise WeightFormatError(
            f"the tekken file says {size} tokens, {num_special} of them special, "
            f"and lists {len(entries)}; it must list those that are not special"
        )
    ranks: dict[bytes, int] = {}
    for entry in entries[: size - num_special]:
        text = _field(entry, "token_bytes", str)
        try:
            ranks[base64.b64decode(text, validate=True)] = _field(entry, "rank", int)
        except ValueError as error:
            if isinstance(error, WeightFormatError):
                raise
            raise WeightFormatError(f"the tekken file's token {text!r:.40} is no base64") from None
    if ranks.keys() and sorted(ranks.values()) != list(range(size - num_special)):
        raise WeightFormatError("the ranks of the tekken file are not 0, 1, 2 and so on")
    special = {f"<SPECIAL_{i}>": i for i in range(num_special)}
    listed = file.get("special_tokens")
    if listed is None:
        listed = [{"rank": i, "token_str": text} for i, text in enumerate(_TEKKEN_SPECIAL)]
    if not isinstance(listed, list):
        raise WeightFormatError("the tekken file's special_tokens is not a list")
    for entry in listed:
        rank, text = _field(entry, "rank", int), _field(entry, "token_str", str)
        if special.pop(f"<SPECIAL_{rank}>", None) is None and special.get(text) != rank:
            raise WeightFormatError(
                f"the tekken file's special token {text!r:.40} has the rank {rank}, which is taken "
                f"or not below {num_special}"
            )
        special[text] = rank
    if len(special) != num_special:
        raise WeightFormatError("two special tokens of the tekken file have the same text")
    bos, eos = ("<s>" if "<s>" in special else None), ("</s>" if "</s>" in special else None)
    pattern = _field(config, "pattern", str)
    return _vocabulary(ranks, pattern, special, num_special, bos, eos)


def _vocabulary(
    ranks: Mapping[bytes, int],
    pattern: str,
    special: Mapping[str, int],
    offset: int,
    bos_token: str | None,
    eos_token: str | None,
) -> Vocabulary:
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise WeightFormatError(
                f"the byte {byte:02X} has no token; byte-level BPE needs one for each byte"
            )
    by_id = {rank + offset: bytes_letters(data) for data, rank in ranks.items()}
    if len(by_id) != len(ranks):
        raise WeightFormatError("two tokens have the same rank")
    for text, i in special.items():
        if isinstance(i, bool) or not isinstance(i, int) or i < 0 or i in by_id:
            raise WeightFormatError(
                f"the special token {text!r:.40} has the id {i!r:.40}, which is taken or no id"
            )
        by_id[i] = text
    size = max(by_id) + 1
    if size > len(by_id) + _MAX_GAP:
        raise WeightFormatError(f"{len(by_id)} tokens have ids up to {size - 1}; too far apart")
    tokens = [by_id.get(i) or f"<unused {i}>" for i in range(size)]
    types = bytearray([TokenType.UNUSED]) * size
    for i in by_id:
        types[i] = TokenType.NORMAL
    for i in special.values():
        types[i] = TokenType.CONTROL
    ids = dict(zip(tokens, range(size), strict=True))
    if len(ids) != size:
        first = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise WeightFormatError(f"two tokens are {tokens[first]!r:.60}")
    named = {}
    for name, text in (("bos_token", bos_token), ("eos_token", eos_token)):
        if text is not None and text not in special:
            raise WeightFormatError(f"{name} is {text!r:.60}, which is no special token")
        named[name] = None if text is None else special[text]
    eos = [] if named["eos_token"] is None else [named["eos_token"]]
    return Vocabulary(
        kind="tiktoken",
        tokens=tokens,
        ids=ids,
        types=bytes(types),
        scores=[],
        merges=[],
        pre=PreTokenizer(patterns=(in_oniguruma(pattern),)),
        add_bos=named["bos_token"] is not None,
        add_space_prefix=False,
        bos_id=named["bos_token"],
        eos_ids=end_ids(eos, ids, bytes(types)),
        pad_id=special.get("<pad>"),
        unk_id=special.get("<unk>"),
        chat_template=None,
    )


def in_oniguruma(pattern: str) -> str:
    """An expression of Rust's fancy-regex as one of Oniguruma with the same meaning."""
    pattern = _POSSESSIVE_COUNT.sub(r"(?>\1\2)", pattern)
    return _END.sub(lambda match: match[1] or r"\z", pattern)


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(text)
    return int(text)


def _field(holder: Any, name: str, kind: type) -> Any:
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise WeightFormatError(
            f"the tekken file's {name} is {value!r:.40}, which is not {kind.__name__}"
        )
    return value
