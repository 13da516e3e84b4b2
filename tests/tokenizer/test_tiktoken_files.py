"""tiktoken and tekken files: by hand, against the definition, against tiktoken, and broken."""

import json
from itertools import pairwise

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.errors import WeightFormatError
from infer.tokenizer import Tokenizer
from infer.tokenizer.tiktoken_files import in_oniguruma, read_tekken, read_tiktoken
from tests.cases.strings import strings
from tests.cases.tokenizer_bytes import tekken_file, tiktoken_file

MERGED = [b"ab", b"bc", b"abc", b" a", b"  ", b"\xc3\xa9", b"aa", b"aaa", b"xyzzy", b"11"]
PATTERN = r" ?\p{L}+|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]+|\s+$|\s+(?!\S)|\s+"
SPECIAL = {"<|endoftext|>": 270, "<|im_end|>": 272}
FILE = tiktoken_file(MERGED)


def read(data: bytes = FILE, **options) -> Tokenizer:
    values = {"pattern": PATTERN, "special_tokens": SPECIAL, "bos_token": None, "eos_token": None}
    return Tokenizer(read_tiktoken(data, **values | options))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("abc", [b"abc"]),  # a whole word that is a token
        ("abcb", [b"abc", b"b"]),  # ab, then abc
        ("bcab", [b"bc", b"ab"]),
        ("xyzzy", [b"xyzzy"]),  # taken whole, though no merge leads there
        ("xyzzya", [b"x", b"y", b"z", b"z", b"y", b"a"]),
        (" a a", [b" a", b" a"]),
        ("é", [b"\xc3\xa9"]),
        ("aaaa", [b"aa", b"aa"]),
        ("1111", [b"11", b"1", b"1"]),  # 111, 1
        ("a  ", [b"a", b"  "]),
    ],
)
def test_worked_by_hand(text, tokens):
    order = [*(bytes([byte]) for byte in range(256)), *MERGED]
    tokenizer = read()
    assert tokenizer.encode(text) == [order.index(token) for token in tokens]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_and_gaps():
    tokenizer = read(bos_token="<|endoftext|>", eos_token="<|im_end|>")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (270, (272, 270), 273)
    assert tokenizer.encode("a<|im_end|>", parse_special=True) == [270, 97, 272]
    assert 272 not in tokenizer.encode("a<|im_end|>")
    assert tokenizer.token_bytes(272) == b"<|im_end|>"
    assert tokenizer.decode([97, 271, 98]) == "a<unused 271>b"
    assert read().encode("a") == [97]  # no BOS token, no BOS


def naive(ranks: dict[bytes, int], word: bytes) -> list[int]:
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [ranks.get(a + b, 1 << 30) for a, b in pairwise(parts)]
        if not pairs or min(pairs) == 1 << 30:
            return [ranks[part] for part in parts]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abc", min_size=1, max_size=30))
def test_same_as_merging_one_pair_at_a_time(word):
    order = [*(bytes([byte]) for byte in range(256)), *MERGED]
    ranks = {token: rank for rank, token in enumerate(order)}
    expected = [ranks[word.encode()]] if word.encode() in ranks else naive(ranks, word.encode())
    assert read().encode(word) == expected


def test_same_as_tiktoken():
    order = [*(bytes([byte]) for byte in range(256)), *MERGED]
    ranks = {token: rank for rank, token in enumerate(order)}
    original = tiktoken.Encoding(
        "x", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=SPECIAL
    )
    tokenizer = read()
    for text in strings()[::12]:
        assert tokenizer.encode(text) == original.encode_ordinary(text), text
        parsed = tokenizer.encode(text, parse_special=True)
        assert parsed == original.encode(text, allowed_special="all"), text


def test_expressions_of_rust_mean_the_same_in_oniguruma():
    assert in_oniguruma(r"\p{N}{1,3}+|\s+$") == r"(?>\p{N}{1,3})|\s+\z"
    assert in_oniguruma(r"[^a$]{2}+\$[$]") == r"(?>[^a$]{2})\$[$]"
    assert in_oniguruma(r"\s++[\r\n]*+") == r"\s++[\r\n]*+"


def test_files_by_path(tmp_path):
    (tmp_path / "x.tiktoken").write_bytes(FILE)
    (tmp_path / "tekken.json").write_bytes(tekken_file(MERGED))
    plain = Tokenizer.from_tiktoken(tmp_path / "x.tiktoken", pattern=PATTERN)
    assert plain.encode("abc") == [258]
    tekken = Tokenizer.from_tekken(tmp_path / "tekken.json")
    assert tekken.encode("abc") == [1, 258 + 5]
    assert tekken.encode("[INST]a", parse_special=True) == [1, 3, 97 + 5]
    assert (tekken.eos_ids, tekken.unk_id, tekken.vocab_size) == ((2,), 0, 271)
    assert tekken.token_bytes(4) == b"<SPECIAL_4>"


def test_old_tekken_files_list_no_special_tokens():
    config = json.loads(tekken_file(MERGED))["config"]
    config |= {"default_num_special_tokens": 30, "default_vocab_size": 30 + 266}
    tokenizer = Tokenizer(read_tekken(tekken_file(MERGED, special_tokens=None, config=config)))
    assert tokenizer.token_bytes(10) == b"[IMG]"
    assert (tokenizer.pad_id, tokenizer.token_bytes(20)) == (11, b"<SPECIAL_20>")


BROKEN_TIKTOKEN = {
    "empty": (b"", "the byte 00 has no token"),
    "no-rank": (b"AA==\n", "line 1 .*'AA=='"),
    "no-base64": (b"?? 1\n", "line 1"),
    "huge-rank": (FILE + b"eHg= 999999999\n", "too far apart"),
    "endless-rank": (FILE + b"eHg= " + b"9" * 5000 + b"\n", "line 267"),
    "same-rank": (FILE + b"eHg= 3\n", "same rank"),
    "binary": (bytes(range(256)), "line 1"),
}


@pytest.mark.parametrize("name", BROKEN_TIKTOKEN)
def test_broken_tiktoken_files(name):
    data, message = BROKEN_TIKTOKEN[name]
    with pytest.raises(WeightFormatError, match=message) as error:
        read(data)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"special_tokens": {"<x>": 5}}, "'<x>' has the id 5, which is taken"),
        ({"special_tokens": {"<x>": -1}}, "-1"),
        ({"special_tokens": {"<x>": 10**9}}, "too far apart"),
        ({"bos_token": "<s>"}, "bos_token is '<s>', which is no special token"),
        ({"pattern": "(a"}, "does not compile"),
    ],
)
def test_broken_options(options, message):
    with pytest.raises(WeightFormatError, match=message):
        read(**options)


def config(**more) -> bytes:
    file = json.loads(tekken_file(MERGED))
    return json.dumps(file | {"config": file["config"] | more}).encode()


BROKEN_TEKKEN = {
    "empty": (b"", "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "list": (b"[]", "config is None"),
    "number": (b'{"config": {"default_num_special_tokens": 1e400}}', "is inf"),
    "size": (config(default_vocab_size=10**12), "says 1000000000000 tokens"),
    "special": (config(default_num_special_tokens=10**9), "special"),
    "pattern": (config(pattern=3), "pattern is 3"),
    "vocab": (tekken_file([], vocab=3), "vocab is 3"),
    "entry": (tekken_file([], vocab=[3] * 256), "token_bytes is None"),
    "ranks": (
        tekken_file([], vocab=[{"rank": 9, "token_bytes": "AA=="}] * 256),
        "not 0, 1, 2 and so on",
    ),
    "special-rank": (
        tekken_file([], special_tokens=[{"rank": 77, "token_str": "x"}]),
        "rank 77, which is taken or not below 5",
    ),
    "special-twice": (
        tekken_file([], special_tokens=[{"rank": i, "token_str": "x"} for i in range(2)]),
        "same text|taken",
    ),
}


@pytest.mark.parametrize("name", BROKEN_TEKKEN)
def test_broken_tekken_files(name):
    data, message = BROKEN_TEKKEN[name]
    with pytest.raises(WeightFormatError, match=message) as error:
        Tokenizer(read_tekken(data))
    assert str(error.value).isprintable()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_are_read_or_refused(data):
    which = data.draw(st.sampled_from(["tiktoken", "tekken"]))
    good = FILE if which == "tiktoken" else tekken_file(MERGED)
    cut = data.draw(st.integers(0, len(good)))
    tail = data.draw(st.binary(max_size=20))
    mixed = good[:cut] + tail + good[cut + len(tail) :]
    try:
        tokenizer = read(mixed) if which == "tiktoken" else Tokenizer(read_tekken(mixed))
        tokenizer.encode("ab é 11")
    except WeightFormatError as error:
        assert str(error).isprintable()
