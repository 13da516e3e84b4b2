"""Tokenizers of folders: ids and texts of the `tokenizers` library, streams, special ids, chat."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.errors import ConfigError, RequestError, WeightFormatError
from infer.tokenizer import Tokenizer
from tests.tokenizer.tokenizer_json import CHATML, byte_level, sentencepiece, write

CONFIG = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>", "special": True}}
LIBRARIES = {"bytes": byte_level(bos=True), "pieces": sentencepiece()}
OURS = {name: Tokenizer.from_tokenizer_json(lib.to_str()) for name, lib in LIBRARIES.items()}

TEXTS = st.text(alphabet="heli o!<s>|bé😀▁\n\t한", max_size=20) | st.text(max_size=8)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, name=st.sampled_from(["bytes", "pieces"]))
def test_ids_and_texts_are_the_librarys(text: str, name: str) -> None:
    library, ours = LIBRARIES[name], OURS[name]
    # With special tokens matched, as transformers does it, and BOS in front.
    assert ours.encode(text, parse_special=True, add_bos=False) == (
        library.encode(text, add_special_tokens=False).ids
    )
    want = library.encode(text).ids
    if library.encode(text, add_special_tokens=False).ids[:1] != want[:1]:  # no BOS in the text
        assert ours.encode(text, parse_special=True) == want
    plain = ours.encode(text, add_bos=False)
    assert not set(plain) & ours.special_ids
    assert ours.decode(plain) == library.decode(plain, skip_special_tokens=True)
    stream = ours.stream()
    assert "".join([*map(stream.put, plain), stream.flush()]) == ours.decode(plain)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 264), max_size=20),
    name=st.sampled_from(["bytes", "pieces"]),
    skip=st.booleans(),
    continuation=st.booleans(),
)
def test_a_stream_is_decoding_at_once(ids, name, skip, continuation) -> None:
    ours = OURS[name]
    options = {"skip_special_tokens": skip, "continuation": continuation}
    stream = ours.stream(**options)
    parts = [*map(stream.put, ids), stream.flush()]
    assert "".join(parts) == ours.decode(ids, **options)


def test_an_emoji_over_three_tokens_and_byte_tokens() -> None:
    for ours in OURS.values():
        ids = ours.encode("😀", add_bos=False)
        stream = ours.stream()
        parts = [*map(stream.put, ids), stream.flush()]
        assert "".join(parts) == "😀"
        assert parts.count("") >= len(parts) - 2


def test_the_bytes_of_a_token() -> None:
    ours = OURS["pieces"]
    by_text = {t: i for i, t in enumerate(ours._vocabulary.tokens)}
    assert ours.token_bytes(by_text["▁hi"]) == b" hi"
    assert ours.token_bytes(by_text["<0xF0>"]) == b"\xf0"
    assert ours.token_bytes(by_text["<s>"]) == b"<s>"
    assert OURS["bytes"].token_bytes(266) == "<tool é>".encode()
    assert OURS["bytes"].decode([266]) == "<tool é>"
    with pytest.raises(RequestError, match="0 to 266"):
        OURS["bytes"].token_bytes(267)


def test_bos_by_the_post_processor_and_by_the_configuration(tmp_path: Path) -> None:
    with_bos, without = byte_level(bos=True), byte_level()
    of = lambda lib, **config: Tokenizer.from_tokenizer_json(lib.to_str(), config=CONFIG | config)
    assert of(with_bos).encode("hello") == [262, 259]
    assert of(with_bos).encode("hello", add_bos=False) == [259]
    assert of(with_bos).encode("") == [262]
    assert of(with_bos, add_bos_token=False).encode("hello") == [259]
    assert of(with_bos, add_bos_token=False).encode("hello", add_bos=True) == [262, 259]
    assert of(without).encode("hello") == [259]
    assert of(without, add_bos_token=True).encode("hello") == [262, 259]
    # A template that writes BOS gets no second one.
    assert of(with_bos).encode("<|bos|>hello", parse_special=True) == [262, 259]
    # What a user wrote is not a control token.
    assert 262 not in of(without).encode("<|bos|>hello")
    nameless = Tokenizer.from_tokenizer_json(without.to_str())
    with pytest.raises(RequestError, match="no BOS token"):
        nameless.encode("hello", add_bos=True)


def test_a_prefix_of_two_tokens() -> None:
    """As GLM-4, whose texts begin with [gMASK]<sop>."""
    library = byte_level()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> <|im_start|> $A",
        pair="$A $B",
        special_tokens=[("<|bos|>", 262), ("<|im_start|>", 264)],
    )
    ours = Tokenizer.from_tokenizer_json(library.to_str())
    assert ours.encode("hello") == [262, 264, 259]
    assert ours.encode("<|bos|><|im_start|>hello", parse_special=True) == [262, 264, 259]


def test_special_ids_come_from_every_file(tmp_path: Path) -> None:
    files = {
        "special_tokens_map.json": {"pad_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        "tokenizer_config.json": CONFIG,
        "generation_config.json": {"eos_token_id": [265, 263]},
        "config.json": {"eos_token_id": 260, "text_config": {"eos_token_id": [261, 10**9]}},
    }
    ours = Tokenizer.from_folder(write(tmp_path, byte_level(), files))
    assert (ours.bos_id, ours.eos_ids, ours.pad_id) == (262, (263, 265, 260, 261), 264)
    assert ours.special_ids == {262, 263, 264, 265}
    # Without any of these files: the known texts of control tokens.
    assert Tokenizer.from_tokenizer_json(byte_level().to_str()).eos_ids == (265,)
    ids = {"config.json": {"bos_token_id": 262, "eos_token_id": 263}}
    other = Tokenizer.from_folder(write(tmp_path / "b", byte_level(), ids))
    assert (other.bos_id, other.eos_ids) == (262, (263,))


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": CHATML, "tokenizer_config.json": {"chat_template": "old"}},
        {"tokenizer_config.json": {"chat_template": CHATML}},
        {"chat_template.json": {"chat_template": CHATML}},
        {
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "tool_use", "template": "tools"},
                    {"name": "default", "template": CHATML},
                ]
            }
        },
        {"chat_template.jinja": CHATML, "additional_chat_templates/tool_use.jinja": "tools"},
    ],
)
def test_chat_templates(tmp_path: Path, files: dict[str, Any]) -> None:
    ours = Tokenizer.from_folder(write(tmp_path, byte_level(), files))
    text = ours.apply_chat_template(MESSAGES, tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    ids = ours.apply_chat_template(MESSAGES)
    assert (ids[0], ids[-2]) == (264, 265)
    named = "tool_use" in ours.chat_templates
    with_tools = ours.apply_chat_template(MESSAGES, tokenize=False, tools=[{}])
    assert with_tools == ("tools" if named else text)
    assert ours.apply_chat_template(MESSAGES, tokenize=False, chat_template="{{ 1 }}") == "1"
    if named:
        by_name = ours.apply_chat_template(MESSAGES, tokenize=False, chat_template="tool_use")
        assert by_name == "tools"


def test_templates_that_are_missing_or_broken(tmp_path: Path) -> None:
    base = Tokenizer.from_folder(write(tmp_path / "a", byte_level()))
    with pytest.raises(ConfigError, match="no chat template"):
        base.apply_chat_template(MESSAGES)
    only = {"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "x"}]}}
    with pytest.raises(ConfigError, match="no default chat template; choose one of rag"):
        Tokenizer.from_folder(write(tmp_path / "b", byte_level(), only)).apply_chat_template(
            MESSAGES
        )
    broken = {"tokenizer_config.json": {"chat_template": ["x"]}}
    with pytest.raises(WeightFormatError, match="must have a name and a template"):
        Tokenizer.from_folder(write(tmp_path / "c", byte_level(), broken))


def test_a_file_cannot_cut_or_pad_prompts() -> None:
    library = byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=10)
    ours = Tokenizer.from_tokenizer_json(library.to_str())
    assert ours.encode("hello hello hello") == [259, 260, 260]


def _changed(change: Any) -> str:
    value = json.loads(byte_level().to_str())
    change(value)
    return json.dumps(value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "is no tokenizer"),
        ("{}", "is no tokenizer"),
        ("[" * 100_000, "is no tokenizer"),
        ('{"version":"1.0"}', "is no tokenizer"),
        (_changed(lambda v: v["model"].update(type="Unknown")), "is no tokenizer"),
        (_changed(lambda v: v["model"]["merges"].append(["zz", "qq"])), "is no tokenizer"),
        (_changed(lambda v: v["model"]["vocab"].update(a="x")), "is no tokenizer"),
        (_changed(lambda v: v["model"]["vocab"].update(a=-1)), "is no tokenizer"),
        (_changed(lambda v: v["model"]["vocab"].update(x=2**32 - 1)), "has ids up to 4294967295"),
        (
            _changed(
                lambda v: v.update(
                    pre_tokenizer={
                        "type": "Split",
                        "pattern": {"Regex": "("},
                        "behavior": "Isolated",
                        "invert": False,
                    }
                )
            ),
            "is no tokenizer",
        ),
        (
            _changed(lambda v: v.update(decoder={"type": "BPEDecoder", "suffix": "</w>"})),
            "BPEDecoder.* is not supported; known are ByteLevel",
        ),
        (
            _changed(
                lambda v: v.update(
                    decoder={"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}
                )
            ),
            "is not supported",
        ),
    ],
)
def test_a_broken_file_is_one_line(source: str, message: str) -> None:
    with pytest.raises(WeightFormatError, match=message) as error:
        Tokenizer.from_tokenizer_json(source)
    assert str(error.value).isprintable() and len(str(error.value)) < 400


def test_a_panic_of_the_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    panic = type("PanicException", (BaseException,), {})

    def fail(*_: object) -> None:
        raise panic("called `Option::unwrap()` on a\n`None` value")

    monkeypatch.setattr(tokenizers.Tokenizer, "from_str", fail)
    with pytest.raises(WeightFormatError, match=r"is no tokenizer \(called `Option::unwrap"):
        Tokenizer.from_tokenizer_json("{}")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizers.Tokenizer, "from_str", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.from_tokenizer_json("{}")


def test_holes_in_the_vocabulary_and_words_without_unknowns() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hi": 0, "you": 5}, unk_token="no"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ours = Tokenizer.from_tokenizer_json(words.to_str())
    assert ours.vocab_size == 6
    assert ours.encode("hi you") == [0, 5]
    assert ours.decode([0, 3, 5]) == "hi you" == words.decode([0, 5])
    with pytest.raises(RequestError, match="cannot encode this text"):
        ours.encode("unknown")


def test_no_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(WeightFormatError, match=r"has no tokenizer\.json; tokenizer\.model alone"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(WeightFormatError, match="is not UTF-8"):
        Tokenizer.from_folder(tmp_path)
