"""Case T01: characters split over tokens, and text that comes token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.errors import RequestError
from infer.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import CONTROL, USER_DEFINED, byte_level, scored

SPECIAL = (("<s>", CONTROL), ("</s>", CONTROL), ("<tag ▁Ġ>", USER_DEFINED))
BYTES = Tokenizer.from_gguf(byte_level(["Ġ o", "Ġo k"], special=SPECIAL))
FIRST_BYTE = len(SPECIAL)
PIECES = [("▁", -2.0), ("▁ok", -1.0), ("ok", -1.5), ("é▁", -1.0)]
SCORED = Tokenizer.from_gguf(
    scored(PIECES, special=(("<unk>", 2), ("<s>", CONTROL), ("</s>", CONTROL), SPECIAL[2]))
)


def of_bytes(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


def deltas(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*map(stream.put, ids), stream.flush()]


def test_an_emoji_over_three_tokens():
    ok = BYTES.encode(" ok")
    assert len(ok) == 1
    ids = of_bytes(b"\xf0\x9f\x98\x80") + ok
    assert deltas(BYTES, ids) == ["", "", "", "😀", " ok", ""]
    two_tokens = Tokenizer.from_gguf(byte_level(["ð Ł"]))
    pair = two_tokens.encode("😀")
    assert len(pair) == 3 and deltas(two_tokens, pair) == ["", "", "😀", ""]


def test_a_hangul_syllable_as_one_and_two_bytes():
    metadata = byte_level(["ķ ľ"])
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("한")
    assert "한".encode() == b"\xed\x95\x9c"
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xed", b"\x95\x9c"]
    assert deltas(tokenizer, ids) == ["", "한", ""]


def test_no_prompt_text_comes_out():
    """A prompt that ends in the middle of a character: the generated part stands alone."""
    prompt, generated = of_bytes(b"weather: " + b"\xf0\x9f\x8c"), of_bytes(b"\xb6")
    assert BYTES.decode(prompt + generated) == "weather: 🌶"
    assert "".join(deltas(BYTES, generated)) == BYTES.decode(generated) == "\ufffd"


def test_a_genuine_replacement_character_passes():
    assert deltas(BYTES, of_bytes(b"\xef\xbf\xbd")) == ["", "", "\ufffd", ""]


def test_an_unfinished_tail_appears_once_at_the_end():
    assert deltas(BYTES, of_bytes(b"a\xf0\x9f")) == ["a", "", "", "\ufffd"]
    stream = BYTES.stream()
    stream.put(FIRST_BYTE + 0xF0)
    assert (stream.flush(), stream.flush()) == ("\ufffd", "")
    assert stream.put(FIRST_BYTE + 0x61) == "a"  # and nothing of the tail is left


def test_special_tokens_are_shown_on_request():
    ids = [0, *of_bytes(b"a"), 2, 1]
    assert BYTES.decode(ids) == "a<tag ▁Ġ>"  # a user-defined token is text, as it is written
    assert BYTES.decode(ids, skip_special_tokens=False) == "<s>a<tag ▁Ġ></s>"
    assert deltas(BYTES, ids, skip_special_tokens=False) == ["<s>", "a", "<tag ▁Ġ>", "</s>", ""]


def test_the_first_space():
    ok = SCORED.encode("ok", add_bos=True)
    assert [SCORED.token_bytes(i) for i in ok] == [b"<s>", b" ok"]
    assert SCORED.decode(ok) == "ok"
    assert SCORED.decode(ok, continuation=True) == " ok"
    assert SCORED.decode(ok, skip_special_tokens=False) == "<s>ok"
    assert SCORED.decode(ok[1:] * 2) == "ok ok"
    assert deltas(SCORED, ok[1:] * 2) == ["ok", " ok", ""]
    assert SCORED.decode(SCORED.encode("  ok")) == "  ok"


ANY_IDS = st.lists(st.integers(0, 263), max_size=30)


@settings(max_examples=400, deadline=None)
@given(ids=ANY_IDS, skip=st.booleans(), continuation=st.booleans(), scored=st.booleans())
def test_deltas_joined_are_the_whole(ids, skip, continuation, scored):
    tokenizer = SCORED if scored else BYTES
    ids = [i % tokenizer.vocab_size for i in ids]
    options = {"skip_special_tokens": skip, "continuation": continuation}
    parts = deltas(tokenizer, ids, **options)
    assert "".join(parts) == tokenizer.decode(ids, **options)
    for end in range(len(ids)):  # what was shown is never taken back
        assert tokenizer.decode(ids, **options).startswith("".join(parts[: end + 1]))


@pytest.mark.parametrize("bad", [-1, 261, 10**12])
def test_ids_out_of_range(bad):
    with pytest.raises(RequestError, match=f"token id {bad} is not in the vocabulary, 0 to 260"):
        BYTES.decode([3, bad])
    with pytest.raises(RequestError, match="0 to 260"):
        BYTES.stream().put(bad)
    with pytest.raises(RequestError, match="0 to 260"):
        BYTES.token_bytes(bad)


def test_ids_may_be_numpy_integers():
    assert BYTES.decode(np.array(of_bytes(b"hi"), np.int32)) == "hi"
