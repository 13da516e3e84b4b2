"""SentencePiece BPE against the sentencepiece library, on models trained here, and by hand."""

import io

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.tokenizer import Tokenizer
from tests.cases.strings import strings
from tests.tokenizer.vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    scored,
    with_prefix,
)

USER = ["<tag>", "\n", "\n\n", "ab"]


def train(**options) -> sentencepiece.SentencePieceProcessor:
    text = [
        line
        for s in strings(1800, seed=5)[800:]
        for line in s.split("\n")
        if line and len(line) < 400
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text[:500]),
        model_writer=model,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def as_metadata(sp: sentencepiece.SentencePieceProcessor, user=(), **more) -> dict:
    def kind(i: int) -> int:
        if sp.is_unknown(i):
            return UNKNOWN
        if sp.is_control(i):
            return CONTROL
        if sp.is_byte(i):
            return BYTE
        return USER_DEFINED if sp.id_to_piece(i) in user else NORMAL

    size = sp.get_piece_size()
    values = {
        "model": "llama",
        "tokens": [sp.id_to_piece(i) for i in range(size)],
        "scores": np.array([sp.get_score(i) for i in range(size)], np.float32),
        "token_type": np.array([kind(i) for i in range(size)], np.int32),
        "bos_token_id": sp.bos_id(),
        "eos_token_id": sp.eos_id(),
        "unknown_token_id": sp.unk_id(),
    }
    return with_prefix(**values | more)


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 1500, "byte_fallback": True, "add_dummy_prefix": False},
        {"vocab_size": 1100, "byte_fallback": False, "add_dummy_prefix": True},
        {
            "vocab_size": 1500,
            "byte_fallback": True,
            "add_dummy_prefix": True,
            "split_by_whitespace": False,
            "user_defined_symbols": USER,
        },
    ],
    ids=["bytes", "unknown-and-prefix", "across-spaces-and-user-defined"],
)
def test_same_ids_and_text_as_sentencepiece(options):
    sp = train(**options)
    user = options.get("user_defined_symbols", ())
    prefix = options["add_dummy_prefix"]
    tokenizer = Tokenizer.from_gguf(as_metadata(sp, user, add_space_prefix=prefix))
    for text in strings(1200, seed=6)[-500:]:
        # SentencePiece reads U+2581 and a space as one, also within user-defined tokens.
        text = text.replace("▁", "_").replace("\0", "")
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == sp.encode(text), text
        if sp.unk_id() not in ids:
            assert tokenizer.decode(ids) == sp.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40).map(lambda text: text.replace("▁", "")), st.booleans())
def test_round_trip_of_any_text(text, prefix):
    tokenizer = PREFIXED if prefix else PLAIN
    assert tokenizer.decode(tokenizer.encode(text)) == text


PIECES = [("▁", -9.0), ("a", -8.0), ("b", -7.0), ("c", -6.0), ("ab", -1.0), ("bc", -2.0)]
PIECES += [("▁a", -3.0), ("abc", -4.0), ("c▁a", -0.5)]
PLAIN = Tokenizer.from_gguf(scored(PIECES, add_space_prefix=False, add_bos_token=False))
PREFIXED = Tokenizer.from_gguf(scored(PIECES, add_bos_token=False))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["abc"]),  # ab merges first, then ab and c
        ("bc", ["bc"]),
        (" a", ["▁a"]),
        ("c a", ["c▁a"]),  # a token across a space: no cut between c and the space
        ("b a", ["b", "▁a"]),
        ("bc ab", ["bc", "▁", "ab"]),
        ("aab", ["a", "ab"]),
        ("a  a", ["a", "▁", "▁a"]),
    ],
)
def test_merges_worked_by_hand(text, pieces):
    tokens = scored(PIECES)["tokenizer.ggml.tokens"]
    assert PLAIN.encode(text) == [tokens.index(piece) for piece in pieces]


def test_equal_scores_go_left_first():
    pieces = [("a", 0.0), ("b", 0.0), ("ab", -1.0), ("ba", -1.0)]
    tokenizer = Tokenizer.from_gguf(scored(pieces, add_space_prefix=False, add_bos_token=False))
    tokens = scored(pieces)["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in tokenizer.encode("ababa")] == ["ab", "ab", "a"]
    assert [tokens[i] for i in tokenizer.encode("baba")] == ["ba", "ba"]


def test_bytes_where_no_token_fits():
    assert PLAIN.encode("é") == [3 + 0xC3, 3 + 0xA9]
    assert PLAIN.decode([3 + 0xC3, 3 + 0xA9]) == "é"
    unknown = Tokenizer.from_gguf(
        scored(PIECES, byte_tokens=False, add_space_prefix=False, add_bos_token=False)
    )
    a = 3 + 1
    assert unknown.encode("éé") == [0]
    assert unknown.encode("aéaéé") == [a, 0, a, 0]


def test_special_texts_do_not_come_out_of_plain_text():
    """llama.cpp would merge `<`, `s`, `>` into the control token, were the pairs tokens."""
    pieces = [
        ("<", 0.0),
        ("s", 0.0),
        (">", 0.0),
        ("<s", -1.0),
        ("0", 0.0),
        ("x", 0.0),
        ("<0", -1.0),
    ]
    pieces += [("4", 0.0), ("1", 0.0), ("<0x", -1.0), ("<0x4", -1.0), ("<0x41", -1.0)]
    metadata = scored(pieces, add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in tokenizer.encode("<s>")] == ["<s", ">"]
    assert [tokens[i] for i in tokenizer.encode("<0x41>")] == ["<0x41", ">"]
    assert tokenizer.encode("<s>", parse_special=True) == [1]


def test_unused_tokens_are_taken_apart_again():
    """A merge may lead through an UNUSED token, as in SentencePiece, but not end at it."""
    metadata = scored(PIECES, add_space_prefix=False, add_bos_token=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]

    def pieces(text: str) -> list[str]:
        return [tokens[i] for i in Tokenizer.from_gguf(metadata).encode(text)]

    assert (pieces("ab"), pieces("abc"), pieces("bc a")) == (["ab"], ["abc"], ["bc", "▁a"])
    types[tokens.index("ab")] = UNUSED
    assert (pieces("ab"), pieces("abc")) == (["a", "b"], ["abc"])
    types[tokens.index("abc")] = UNUSED
    assert pieces("abc") == ["a", "b", "c"]


def test_long_words():
    text = "ab" * 20_000
    tokens = scored(PIECES)["tokenizer.ggml.tokens"]
    assert PLAIN.encode(text) == [tokens.index("ab")] * 20_000


def test_whole_texts_of_phi3_take_the_whitespace_after_them():
    special = (("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<|user|>", CONTROL))
    metadata = scored(PIECES, special=special, add_bos_token=False)
    tokens = metadata["tokenizer.ggml.tokens"]

    def pieces(text: str, name: str) -> list[str]:
        tokenizer = Tokenizer.from_gguf(metadata | {"general.name": name})
        return [tokens[i] for i in tokenizer.encode(text, parse_special=True)]

    # What llama.cpp gives for the same vocabulary.
    assert pieces("<|user|> \t\n a", "Phi-3 mini") == ["<|user|>", "▁a"]
    assert pieces("<s> a</s> ", "Phi-3 mini") == ["<s>", "▁", "▁a", "</s>"]
    assert pieces("<|user|> a", "Llama 2") == ["<|user|>", "▁", "▁a"]
