"""Case T03: BOS exactly once; special tokens; texts that are refused; a light import."""

import re
import subprocess
import sys
import textwrap

import pytest

from infer.errors import RequestError
from infer.tokenizer import Tokenizer
from infer.tokenizer.splitting import TokenSplitter
from tests.tokenizer.vocabularies import CONTROL, USER_DEFINED, byte_level, scored

PIECES = [("▁", -9.0), ("▁hi", -1.0), ("hi", -2.0), ("h", -8.0), ("i", -8.0), ("▁h", -7.0)]
ADDS_BOS = Tokenizer.from_gguf(scored(PIECES, add_space_prefix=False))
HI = 3 + 256 + 2
BYTE_LEVEL = Tokenizer.from_gguf(byte_level(["h i"], add_bos_token=False))


def test_bos_by_the_files_rule_and_by_request():
    assert ADDS_BOS.encode("hi") == [1, HI]
    assert ADDS_BOS.encode("hi", add_bos=False) == [HI]
    assert BYTE_LEVEL.encode("hi") == [258]
    assert BYTE_LEVEL.encode("hi", add_bos=True) == [0, 258]


def test_bos_is_not_put_before_a_bos():
    assert ADDS_BOS.encode("<s>hi", parse_special=True) == [1, HI]
    assert ADDS_BOS.encode("<s>hi", parse_special=True, add_bos=True) == [1, HI]
    assert ADDS_BOS.encode("<s><s>hi", parse_special=True) == [1, 1, HI]  # it was asked for
    plain = ADDS_BOS.encode("<s>hi")  # what a user typed is text
    assert plain[0] == 1 and plain.count(1) == 1 and plain[-1] == HI


def test_the_empty_text():
    assert ADDS_BOS.encode("") == [1]
    assert ADDS_BOS.encode("", add_bos=False) == []
    assert BYTE_LEVEL.encode("") == []


def test_bos_that_is_not_there():
    metadata = byte_level([])
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(RequestError, match="add_bos=True, but this tokenizer has no BOS token"):
        Tokenizer.from_gguf(metadata).encode("x", add_bos=True)


def test_special_tokens_only_on_request_and_user_defined_ones_always():
    special = (("<s>", CONTROL), ("</s>", CONTROL), ("<b>", USER_DEFINED), ("  ", USER_DEFINED))
    tokenizer = Tokenizer.from_gguf(byte_level(["h i"], special=special))
    assert tokenizer.encode("<b>hi") == [2, 260]
    assert tokenizer.encode("hi   hi", parse_special=True)[:2] == [260, 3]
    assert 1 not in tokenizer.encode("hi</s>")
    assert tokenizer.encode("hi</s><b>", parse_special=True) == [260, 1, 2]
    assert tokenizer.decode(tokenizer.encode("hi</s>")) == "hi</s>"
    assert tokenizer.special_ids == {0, 1}


def test_the_space_prefix_begins_every_stretch_of_text():
    special = (("<unk>", 2), ("<s>", CONTROL), ("</s>", CONTROL), ("<b>", USER_DEFINED))
    metadata = scored(PIECES, special=special)
    tokenizer = Tokenizer.from_gguf(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]

    def pieces(text: str) -> list[str]:
        return [tokens[i] for i in tokenizer.encode(text, parse_special=True)]

    assert pieces("hi") == ["<s>", "▁hi"]
    assert pieces("<s>hi</s>hi") == ["<s>", "▁hi", "</s>", "▁hi"]
    assert pieces("hi<b>hi") == ["<s>", "▁hi", "<b>", "hi"]
    assert pieces("<b>hi") == ["<s>", "▁", "<b>", "hi"]
    assert pieces("") == ["<s>"]


def test_tokens_are_found_from_the_left_the_longest_first():
    splitter = TokenSplitter({"ab": 0, "bcd": 1, "a": 2, "abcde": 3, "\n": 4, "\n\n": 5, "é": 6})
    assert list(splitter.split("abcd")) == [0, "cd"]
    assert list(splitter.split("abcdef")) == [3, "f"]
    assert list(splitter.split("xaéa")) == ["x", 2, 6, 2]
    assert list(splitter.split("\n\n\nb\n")) == [5, 4, "b", 4]
    assert list(splitter.split("")) == []
    assert list(TokenSplitter({}).split("x")) == ["x"]
    assert list(TokenSplitter({"<^]-\\>": 7}).split("<^]-\\><^")) == [7, "<^"]


@pytest.mark.parametrize(
    ("text", "where"), [("\ud800", "U+D800 at 0"), ("ok\udfffz", "U+DFFF at 2")]
)
def test_lone_surrogates_are_refused(text, where):
    with pytest.raises(RequestError, match=re.escape(f"lone surrogate, {where}, which is no")):
        ADDS_BOS.encode(text)
    with pytest.raises(RequestError, match="lone surrogate"):
        BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.encode(text.encode("utf-8", "replace").decode())


def test_without_type_checks_as_users_have_it():
    """No type checker runs for users; nor does the import bring JAX or the libraries in."""
    script = """
        import sys
        import infer.tokenizer
        assert not {"jax", "tokenizers", "jinja2", "transformers"} & set(sys.modules)
        from infer.errors import RequestError
        from tests.tokenizer.vocabularies import byte_level
        tokenizer = infer.tokenizer.Tokenizer.from_gguf(byte_level([]))
        assert "jinja2" not in sys.modules
        for call in (
            lambda: tokenizer.encode(b"bytes"),
            lambda: tokenizer.encode(None),
            lambda: tokenizer.decode(["a"]),
            lambda: tokenizer.decode([3.0]),
        ):
            try:
                call()
            except RequestError as error:
                print(error)
            else:
                raise AssertionError
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "text is bytes, not str; decode bytes first",
        "text is NoneType, not str; decode bytes first",
        "token id 'a' is not an integer",
        "token id 3.0 is not an integer",
    ]


def test_threads_may_share_a_tokenizer():
    from concurrent.futures import ThreadPoolExecutor

    from tests.cases.strings import strings

    texts = strings(1500)[-200:]
    fresh = Tokenizer.from_gguf(scored(PIECES))
    alone = [Tokenizer.from_gguf(scored(PIECES)).encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fresh.encode, texts)) == alone
