"""Every pre-tokenizer's name against llama.cpp; see scripts/goldens/pretokenizers.py."""

import base64
import hashlib
import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from infer.errors import WeightFormatError
from infer.tokenizer import Tokenizer
from infer.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from tests.cases.strings import word_cut_strings
from tests.tokenizer.vocabularies import CONTROL, NORMAL, letters, with_prefix

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "pretokenizers.json").read_text())
HASH_BYTES = 2
TEXTS = word_cut_strings()

# Where llama.cpp has adapted an expression to its own engine, by the first name of the set: a
# pattern over the texts' general categories (see `categories`). Ours is the model's own there.
ADAPTED = {
    "deepseek-llm": "[S]",  # whitespace outside ASCII is turned into \v before the ranges are tried
    "deepseek-coder": "[S]",
    "tekken": "[ulM]",  # case is that of ASCII, marks are no part of a word
    "gpt-4o": "[ulM]",
    "granite-embed-multi-97m": "[ulM]",
    "kimi-k2": "[ulMH]|[ao]A",  # case is not looked at, and Han is a list of blocks
    "youtu": "[aloM][Au]",
    # std::regex misjudges \\b in a lookahead, before a letter and at the end
    "tiny_aya": "[aloM][Au]|[sS]{2,}[0-9]|[DN]|[0-9](?:[aAuloM_]|$)",
    "afmoe": "[sS]{2,}[0-9DN]",  # what stands before the first digits is cut with them
    "superbpe": "[D]",  # \d is that of ASCII
}


def categories(text: str) -> str:
    """One letter for each character: capitals and small letters of ASCII and of the rest, ..."""

    def one(c: str) -> str:
        category = unicodedata.category(c)
        if c.isspace():
            return "s" if c.isascii() else "S"
        if c.isascii():
            return "A" if c.isupper() else "a" if c.islower() else c
        if c in "々〆":
            return "H"
        if category == "Nd":
            return "D"
        return {"Lu": "u", "Lt": "u", "Ll": "l"}.get(category, category[0].replace("L", "o"))

    return "".join(map(one, text))


def vocabulary() -> dict:
    merges = GOLDEN["merges"]
    tokens = ["<first>", "<last>", *sorted(letters())]
    tokens += dict.fromkeys(merge.replace(" ", "") for merge in merges)
    types = [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2)
    return with_prefix(
        model="gpt2",
        tokens=tokens,
        token_type=np.array(types, np.int32),
        merges=merges,
        bos_token_id=0,
        eos_token_id=1,
    )


VOCABULARY = vocabulary()
NAMES: dict[tuple[PreTokenizer, int], list[str]] = {}
for _name, _pre in PRE_TOKENIZERS.items():
    NAMES.setdefault((_pre, GOLDEN["names"][_name]), []).append(_name)


def test_the_names_are_those_of_llama_cpp():
    assert PRE_TOKENIZERS.keys() == GOLDEN["names"].keys()
    assert len(TEXTS) == GOLDEN["count"] >= 1500
    with pytest.raises(WeightFormatError, match=r"'gpt-5', which is not known; known: a\.x-4\.0, "):
        Tokenizer.from_gguf(VOCABULARY | {"tokenizer.ggml.pre": "gpt-5"})


@pytest.mark.parametrize("names", NAMES.values(), ids=lambda names: names[0])
def test_words_are_cut_as_llama_cpp_does(names):
    tokenizer = Tokenizer.from_gguf(VOCABULARY | {"tokenizer.ggml.pre": names[0]})
    expected = base64.b64decode(GOLDEN["sets"][GOLDEN["names"][names[0]]])
    wrong, compared = [], 0
    for i, text in enumerate(TEXTS):
        if "\U00013c5a" in text:  # a letter since Unicode 16, which Oniguruma does not know yet
            continue
        if names[0] in ADAPTED and re.search(ADAPTED[names[0]], categories(text)):
            continue
        ids = json.dumps(tokenizer.encode(text, add_bos=False)).encode()
        digest = hashlib.blake2b(ids, digest_size=HASH_BYTES).digest()
        compared += 1
        if digest != expected[i * HASH_BYTES : (i + 1) * HASH_BYTES]:
            wrong.append(text)
    assert wrong == []
    assert compared > (1700 if names[0] not in ADAPTED else 600), compared


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tiny_aya", "x 1234567 y", ["x", " ", "1", "234", "567", " y"]),
        ("afmoe", "12345 x=7", ["12", "345", " x", "=", "7"]),
        ("superbpe", "a 1234567", ["a ", "1", "234", "567"]),
        ("tekken", "aÀb IDs", ["a", "Àb", " IDs"]),
        ("kimi-k2", "ok漢字ab's", ["ok", "漢字", "ab's"]),
        ("youtu", "한국，注音ㄅㄆ", ["한국", "，", "注音", "ㄅㄆ"]),
        ("deepseek-llm", "a b\n\n12", ["a", " b", "\n", "\n", "12"]),
        ("chameleon", "IMGIMGABZ  x", ["IMGIMGABZ", "  ", "x"]),
        ("jais-2", "a" + " " * 10 + "b", ["a", " " * 8, " ", " b"]),
        ("spark2_5", "?!\n\n1234", ["?!", "\n", "\n", "1", "2", "3", "4"]),
    ],
)
def test_words_worked_by_hand(name, text, words):
    from tokenizers import Regex, pre_tokenizers

    patterns = PRE_TOKENIZERS[name].patterns
    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in patterns])
    assert [word for word, _ in cut.pre_tokenize_str(text)] == words
