"""SentencePiece's `.model` files: the pieces, what was done to text, and the special ids.

Source: google/sentencepiece, `sentencepiece_model.proto`; the field numbers below are its own.
"""

import math
from typing import Any

from infer.errors import WeightFormatError
from infer.tokenizer.normalizing import TextNormalizer
from infer.tokenizer.protobuf import BYTES, FIXED32, VARINT, fields
from infer.tokenizer.vocabulary import TokenType, Vocabulary, end_ids

_KINDS = {1: "unigram", 2: "llama"}  # TrainerSpec.model_type
_NAMES = {1: "UNIGRAM", 2: "BPE", 3: "WORD", 4: "CHAR"}
# What is read, by field number: name, wire type, default.
_PIECE = {1: ("piece", BYTES, b""), 2: ("score", FIXED32, 0.0), 3: ("type", VARINT, 1)}
_TRAINER = {
    3: ("model_type", VARINT, 1),
    24: ("treat_whitespace_as_suffix", VARINT, 0),
    35: ("byte_fallback", VARINT, 0),
    46: ("bos_piece", BYTES, b"<s>"),
    47: ("eos_piece", BYTES, b"</s>"),
    48: ("pad_piece", BYTES, b"<pad>"),
}
_NORMALIZER = {
    2: ("precompiled_charsmap", BYTES, b""),
    3: ("add_dummy_prefix", VARINT, 1),
    4: ("remove_extra_whitespaces", VARINT, 1),
    5: ("escape_whitespaces", VARINT, 1),
}


def read_sentencepiece(data: bytes) -> Vocabulary:
    """The vocabulary of a `.model` file.

    Raises:
        WeightFormatError: the file is broken, or of a kind that is not read (WORD, CHAR).
    """
    pieces: list[dict[str, Any]] = []
    trainer, normalizer = _message(b"", _TRAINER, ""), _message(b"", _NORMALIZER, "")
    for number, wire, value in fields(data, "the SentencePiece model"):
        if number in (1, 2, 3) and wire != BYTES:
            raise WeightFormatError(f"field {number} of the SentencePiece model is no message")
        if number == 1:
            pieces.append(_message(value, _PIECE, f"piece {len(pieces)}"))
        elif number == 2:
            trainer = _message(value, _TRAINER, "trainer_spec")
        elif number == 3:
            normalizer = _message(value, _NORMALIZER, "normalizer_spec")
    kind = _KINDS.get(trainer["model_type"])
    if kind is None:
        name = _NAMES.get(trainer["model_type"], trainer["model_type"])
        raise WeightFormatError(f"the SentencePiece model is {name}; UNIGRAM and BPE are read")
    for holder, name, needed in (
        (trainer, "treat_whitespace_as_suffix", 0),
        (normalizer, "escape_whitespaces", 1),
    ):
        if bool(holder[name]) != bool(needed):
            raise WeightFormatError(f"the SentencePiece model has {name}={holder[name]}; not read")
    tokens, types, scores, ids = _checked(pieces, bool(trainer["byte_fallback"]))
    unknown = [i for i, t in enumerate(types) if t == TokenType.UNKNOWN]
    if len(unknown) != 1:
        raise WeightFormatError(f"the SentencePiece model has {len(unknown)} unknown pieces, not 1")

    def control(name: str) -> int | None:
        i = ids.get(trainer[name].decode(errors="replace"))
        return i if i is not None and types[i] == TokenType.CONTROL else None

    bos, eos = control("bos_piece"), control("eos_piece")
    user = [text for text, t in zip(tokens, types, strict=True) if t == TokenType.USER_DEFINED]
    text_normalizer = TextNormalizer(
        charsmap=normalizer["precompiled_charsmap"],
        user_defined=user,
        dummy_prefix=bool(normalizer["add_dummy_prefix"]),
        remove_extra_whitespaces=bool(normalizer["remove_extra_whitespaces"]),
    )
    return Vocabulary(
        kind=kind,
        tokens=tokens,
        ids=ids,
        types=types,
        scores=scores,
        merges=[],
        pre=None,
        add_bos=bos is not None,
        add_space_prefix=text_normalizer.dummy_prefix or text_normalizer.remove_extra_whitespaces,
        bos_id=bos,
        eos_ids=end_ids([] if eos is None else [eos], ids, types),
        pad_id=control("pad_piece"),
        unk_id=unknown[0],
        chat_template=None,
        normalizer=text_normalizer,
    )


def _message(data: Any, known: dict[int, tuple[str, int, Any]], what: str) -> dict[str, Any]:
    """The fields that are read; the last of a number counts, as in protobuf."""
    values = {name: default for name, _, default in known.values()}
    for number, wire, value in fields(data, what):
        if number in known:
            name, expected, _ = known[number]
            if wire != expected:
                raise WeightFormatError(f"{what}: {name} has the wire type {wire}, not {expected}")
            values[name] = value
    return values


def _checked(
    pieces: list[dict[str, Any]], byte_fallback: bool
) -> tuple[list[str], bytes, list[float], dict[str, int]]:
    tokens: list[str] = []
    ids: dict[str, int] = {}
    for i, piece in enumerate(pieces):
        try:
            text = piece["piece"].decode()
        except UnicodeDecodeError:
            raise WeightFormatError(f"piece {i} of the SentencePiece model is no UTF-8") from None
        if not text or text in ids:
            raise WeightFormatError(
                f"piece {i} of the SentencePiece model is {text!r:.60}, which is "
                + (f"piece {ids[text]} too" if text else "empty")
            )
        if not 1 <= piece["type"] <= max(TokenType) or not math.isfinite(piece["score"]):
            raise WeightFormatError(
                f"piece {i} of the SentencePiece model has the type {piece['type']} "
                f"and the score {piece['score']}"
            )
        ids[text] = i
        tokens.append(text)
    # SentencePiece's numbers of types are those of GGUF, which took them over.
    types = bytes(piece["type"] for piece in pieces)
    if byte_fallback and TokenType.BYTE not in types:
        raise WeightFormatError("the SentencePiece model has byte_fallback but no byte pieces")
    return tokens, types, [piece["score"] for piece in pieces], ids
