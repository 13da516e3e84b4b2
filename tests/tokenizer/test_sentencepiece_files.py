"""`.model` files against the sentencepiece library, on models trained here, by hand, and broken."""

import io
import tracemalloc

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.errors import WeightFormatError
from infer.tokenizer import Tokenizer
from infer.tokenizer.charsmap import CharsMap
from infer.tokenizer.normalizing import TextNormalizer
from infer.tokenizer.sentencepiece_files import read_sentencepiece
from tests.cases.strings import strings
from tests.cases.tokenizer_bytes import (
    UNIGRAM,
    byte_pieces,
    charsmap,
    field,
    message,
    sentencepiece_model,
)

USER = ["<tag>", "\n", "ab", "A\u030a"]


def train(**options) -> bytes:
    text = [line for s in strings(1800, seed=5)[800:] for line in s.split("\n") if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in text if len(line) < 400][:500]),
        model_writer=model,
        character_coverage=0.98,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 1300},  # nmt_nfkc, a space in front, no extra ones, unknown characters
        {
            "vocab_size": 1600,
            "normalization_rule_name": "identity",
            "byte_fallback": True,
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
            "user_defined_symbols": USER,
        },
        {
            "vocab_size": 1600,
            "normalization_rule_name": "nmt_nfkc_cf",
            "byte_fallback": True,
            "remove_extra_whitespaces": False,
            "user_defined_symbols": USER,
        },
    ],
    ids=["nmt_nfkc", "identity-bytes-user", "nmt_nfkc_cf-bytes-user"],
)
def test_same_ids_and_text_as_sentencepiece(tmp_path, kind, options):
    (tmp_path / "m.model").write_bytes(train(model_type=kind, **options))
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    tokenizer = Tokenizer.from_sentencepiece(tmp_path / "m.model")
    assert tokenizer.vocab_size == original.get_piece_size()
    assert (tokenizer.bos_id, tokenizer.eos_ids[0]) == (original.bos_id(), original.eos_id())
    assert tokenizer.unk_id == original.unk_id()
    for text in strings()[::25]:
        ids = original.encode(text)
        assert tokenizer.encode(text, add_bos=False) == ids, text
        if original.unk_id() not in ids and not text.startswith("▁"):
            assert tokenizer.decode(ids) == original.decode(ids), text


PIECES = [("▁", -4.0, 1), ("a", -3.0, 1), ("b", -3.0, 1), ("ab", -2.0, 1), ("▁a", -1.0, 1)]


def ids(data: bytes, text: str, **options) -> list[str]:
    vocabulary = read_sentencepiece(data)
    return [vocabulary.tokens[i] for i in Tokenizer(vocabulary).encode(text, **options)]


def test_worked_by_hand():
    # BPE: `▁a` has the best score and merges first.  Unigram: `▁` + `ab` is -6, `▁a` + `b` is -4.
    assert ids(sentencepiece_model(PIECES), "ab") == ["<s>", "▁a", "b"]
    assert ids(sentencepiece_model(PIECES, kind=UNIGRAM), "ab") == ["<s>", "▁a", "b"]
    assert ids(sentencepiece_model(PIECES, kind=UNIGRAM), "bab") == ["<s>", "▁", "b", "ab"]
    assert ids(sentencepiece_model(PIECES), "  a   b ") == ["<s>", "▁a", "▁", "b"]
    assert ids(sentencepiece_model(PIECES), "") == ["<s>"]
    assert ids(sentencepiece_model(PIECES), "xyz", add_bos=False) == ["▁", "<unk>"]
    plain = message(f3=0, f4=0)  # no space in front, spaces kept
    assert ids(sentencepiece_model(PIECES, normalizer=plain), "a  b", add_bos=False) == [
        "a",
        "▁",
        "▁",
        "b",
    ]


def test_control_tokens_only_when_parsed():
    data = sentencepiece_model([*PIECES, *byte_pieces()], trainer=message(f35=1))
    assert ids(data, "</s>a", parse_special=True) == ["<s>", "</s>", "▁a"]
    assert "</s>" not in ids(data, "</s>a")


def test_user_defined_symbols_are_not_normalised():
    normalizer = TextNormalizer(user_defined=["A  B"], remove_extra_whitespaces=False)
    assert normalizer("x A  B") == "▁x▁A▁▁B"
    assert TextNormalizer(remove_extra_whitespaces=True)("  x  y ") == "▁x▁y"
    assert TextNormalizer(remove_extra_whitespaces=True)("   ") == ""
    assert TextNormalizer(dummy_prefix=False)(" x ") == "▁x▁"


# A trie with one key, `A`, that becomes `b`: root, child at base ^ 0x41, its value.
ROOT = 0x100 << 10  # offset 256
UNITS = [ROOT] + [0] * 1023
UNITS[256 ^ 0x41] = 0x41 | 0x100 | (1 << 10)  # label, has a leaf, offset 1
UNITS[256 ^ 0x41 ^ 1] = 0x80000000  # value 0


def test_a_character_map_by_hand():
    found = CharsMap(charsmap(UNITS, b"b\0"))
    assert found.longest("AA", 0) == (1, "b")
    assert found.longest("BA", 0) == (0, "")
    assert TextNormalizer(charsmap=charsmap(UNITS, b"b\0"), dummy_prefix=False)("xAAy") == "xbby"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00", "3 bytes|1 bytes"),
        (charsmap(UNITS, b"b"), "does not end"),
        (charsmap(UNITS, b"x" * 300 + b"\0"), "300 bytes"),
        (b"\xff\xff\xff\xff" + b"\0" * 2000, "4294967295 of them"),
    ],
)
def test_a_broken_character_map(data, message):
    with pytest.raises(WeightFormatError, match=message):
        CharsMap(data)


GOOD = sentencepiece_model([*PIECES, *byte_pieces()], trainer=message(f35=1))
BROKEN = {
    "empty": (b"", "0 unknown pieces"),
    "text": (b"<!DOCTYPE html>", "wire type|ends at byte"),
    "truncated": (GOOD[:-3], "ends at byte"),
    "huge-length": (b"\x0a\xff\xff\xff\xff\x7f", "within a field of 34359738367 bytes"),
    "endless-number": (b"\x08" + b"\xff" * 20, "more than 10 bytes"),
    "word-model": (sentencepiece_model(PIECES, kind=3), "is WORD; UNIGRAM and BPE are read"),
    "suffix": (sentencepiece_model(PIECES, trainer=message(f24=1)), "whitespace_as_suffix=1"),
    "twice": (sentencepiece_model([("a", 0.0, 1)] * 2), "piece 4 .* 'a', which is piece 3 too"),
    "nan": (sentencepiece_model([("a", float("nan"), 1)]), "score nan"),
    "type": (sentencepiece_model([("a", 0.0, 9)]), "type 9"),
    "no-bytes": (sentencepiece_model(PIECES, trainer=message(f35=1)), "no byte pieces"),
    "two-unknown": (sentencepiece_model([("x", 0.0, 2)]), "2 unknown pieces"),
    "wrong-wire": (field(1, message(f1=7)), "piece has the wire type 0"),
    "not-a-message": (field(2, 7), "field 2 .* no message"),
    "not-utf8": (field(1, message(f1=b"\xff")), "no UTF-8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_in_one_line(name):
    data, message = BROKEN[name]
    with pytest.raises(WeightFormatError, match=message) as error:
        Tokenizer(read_sentencepiece(data))
    assert str(error.value).isprintable()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_are_read_or_refused(data):
    cut = data.draw(st.integers(0, len(GOOD)))
    tail = data.draw(st.binary(max_size=40))
    mixed = GOOD[:cut] + tail + (GOOD[cut + len(tail) :] if data.draw(st.booleans()) else b"")
    try:
        Tokenizer(read_sentencepiece(mixed)).encode("ab <s> é")
    except WeightFormatError as error:
        assert str(error).isprintable()


def test_a_length_is_not_believed():
    tracemalloc.start()
    with pytest.raises(WeightFormatError):
        read_sentencepiece(b"\x0a\xff\xff\xff\xff\x0f" + b"x" * 100)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
