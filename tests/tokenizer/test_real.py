"""The real vocabularies against llama.cpp, string by string (scripts/goldens/tokenizer_ids.py)."""

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer.tokenizer import Tokenizer
from tests.cases.strings import strings
from tests.real_models import real_model_path

pytestmark = pytest.mark.real
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "tokenizers.json").read_text())
MODELS = {"smollm2": "smollm2-135m", "gemma3": "gemma3-270m"}
HASH_BYTES = 4


@functools.cache
def load_metadata(name: str) -> dict[str, Any]:
    """The metadata of a model's file, as the package's GGUF reader gives it."""
    from gguf import GGUFReader

    reader = GGUFReader(real_model_path(MODELS[name]))
    metadata = {}
    for key, field in reader.fields.items():
        value = field.contents()
        if isinstance(value, list) and value and not isinstance(value[0], str):
            dtype = np.float32 if isinstance(value[0], float) else np.int32
            value = np.array(value, dtype)
        metadata[key] = value
    return metadata


@functools.cache
def load(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(load_metadata(name))


def digest(plain: list[int], special: list[int]) -> bytes:
    return hashlib.blake2b(json.dumps([plain, special]).encode(), digest_size=HASH_BYTES).digest()


def both(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    return [tokenizer.encode(text, add_bos=False, parse_special=p) for p in (False, True)]


def differing(tokenizer: Tokenizer, texts: list[str], hashes: str) -> list[str]:
    expected = base64.b64decode(hashes)
    assert len(expected) == len(texts) * HASH_BYTES
    return [
        text
        for i, text in enumerate(texts)
        if digest(*both(tokenizer, text)) != expected[i * HASH_BYTES : (i + 1) * HASH_BYTES]
    ]


def without_html_end(name: str, text: str) -> bool:
    """`</s>` is an HTML tag to Gemma and a user-defined token of its file.

    llama.cpp takes it for a control token, does not match it in plain text, and ends generations
    at it (it has an exception for Gemma 4 only); the model's own tokenizer matches it, as we do.
    """
    return name != "gemma3" or "</s>" not in text


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_ids_are_those_of_llama_cpp(name):
    tokenizer, golden = load(name), GOLDEN["models"][name]
    texts = strings()
    assert len(texts) == GOLDEN["count"] >= 10_000
    for i, ids in golden["ids"].items():
        if without_html_end(name, texts[int(i)]):
            assert both(tokenizer, texts[int(i)]) == ids, texts[int(i)]
    wrong = differing(tokenizer, texts, golden["hashes"])
    assert [text for text in wrong if without_html_end(name, text)] == []
    assert len(wrong) < 60


def test_the_html_tag_of_gemma():
    tokenizer = load("gemma3")
    assert tokenizer.encode("<s>x</s>", add_bos=False)[-1:] == [212]
    assert tokenizer.token_bytes(212) == b"</s>"
    assert 212 not in tokenizer.special_ids


def test_end_ids():
    """llama.cpp ends at `<reponame>` and, in Gemma 3, at the HTML tag `</s>` as well; we do not."""
    assert set(GOLDEN["models"]["smollm2"]["eog"]) - set(load("smollm2").eos_ids) == {4}
    assert set(GOLDEN["models"]["gemma3"]["eog"]) - set(load("gemma3").eos_ids) == {212}
    assert load("smollm2").eos_ids == (2, 0)
    assert load("gemma3").eos_ids == (1, 106)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_round_trip(name):
    tokenizer = load(name)
    missing = "\x04\x06\x13\x14\x16\x1d" if name == "smollm2" else "▁"
    for text in strings()[::5]:
        if any(c in missing or 0x40000 <= ord(c) < 0xC0000 for c in text):
            continue
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join(map(stream.put, ids)) + stream.flush() == text


def test_the_chat_template_of_smollm2():
    tokenizer = load("smollm2")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert (ids.count(1), ids.count(2)) == (3, 2)


def test_gemma3_has_no_template_and_begins_with_bos():
    tokenizer = load("gemma3")
    assert tokenizer.chat_template is None
    assert tokenizer.encode("hello world") == [2, 23391, 1902]
    assert tokenizer.encode("<bos>hello", parse_special=True) == [2, 23391]
    assert tokenizer.encode("") == [2]
