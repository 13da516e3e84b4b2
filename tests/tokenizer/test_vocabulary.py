"""Metadata that is broken is refused in one line; special ids are what llama.cpp would take."""

import numpy as np
import pytest

from infer.errors import WeightFormatError
from infer.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import CONTROL, NORMAL, USER_DEFINED, byte_level, scored

BYTE_LEVEL = byte_level(["h e", "l l"])
SCORED = scored([("▁", -1.0), ("a", -2.0)])


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (BYTE_LEVEL, {"model": None}, "tokenizer.ggml.model is missing"),
        (BYTE_LEVEL, {"model": "bert"}, "is 'bert', which is not read; known kinds: gpt2, llama"),
        (BYTE_LEVEL, {"model": 7}, "tokenizer.ggml.model is int 7, not str"),
        (BYTE_LEVEL, {"tokens": None}, "tokens is missing"),
        (BYTE_LEVEL, {"tokens": []}, "tokens is empty"),
        (BYTE_LEVEL, {"tokens": [1, 2]}, "tokens is not a list of strings"),
        (BYTE_LEVEL, {"tokens": ["a", "b", "a"]}, "tokens 0 and 2 are both 'a'"),
        (BYTE_LEVEL, {"merges": None}, "merges is missing"),
        (BYTE_LEVEL, {"merges": ["h e", "ll"]}, r"merges\[1\] is 'll'; a merge is two texts"),
        (BYTE_LEVEL, {"merges": ["h "]}, r"merges\[0\] is 'h '"),
        (BYTE_LEVEL, {"pre": None}, "pre is missing, so how the text is cut"),
        (
            BYTE_LEVEL,
            {"pre": "nobody"},
            "is 'nobody', which is not known; known: .*, gpt-2, .*smol",
        ),
        (BYTE_LEVEL, {"token_type": np.ones(3, np.int32)}, r"shape \(3,\); there are 260 tokens"),
        (BYTE_LEVEL, {"token_type": np.ones(260)}, "dtype float64; it must hold integers"),
        (BYTE_LEVEL, {"token_type": np.full(260, 9)}, "of token 0 is 9; known types are 0 to 6"),
        (BYTE_LEVEL, {"bos_token_id": 260}, "bos_token_id is 260; ids are 0 to 259"),
        (BYTE_LEVEL, {"eos_token_id": -1}, "eos_token_id is -1; ids are 0 to 259"),
        (BYTE_LEVEL, {"eos_token_id": True}, "eos_token_id is True, not an integer"),
        (BYTE_LEVEL, {"add_bos_token": 1}, "add_bos_token is int 1, not bool"),
        (
            BYTE_LEVEL,
            {"add_bos_token": True, "bos_token_id": None},
            "add_bos_token is true but tokenizer.ggml.bos_token_id is not set",
        ),
        (SCORED, {"scores": None}, "scores is missing; the kind 'llama' merges by score"),
        (SCORED, {"scores": np.zeros(5, np.float32)}, r"shape \(5,\); there are 261 tokens"),
        (SCORED, {"scores": np.array(["x"] * 261)}, "scores has dtype <U1; it must hold numbers"),
        (SCORED, {"scores": np.zeros(261, bool)}, "scores has dtype bool; it must hold numbers"),
        (SCORED, {"scores": np.full(261, np.nan)}, "scores of token 0 is nan"),
        (SCORED, {"tokens": ["<0x4>", *SCORED["tokenizer.ggml.tokens"][1:]]}, None),
    ],
)
def test_broken_metadata_is_refused_in_one_line(base, change, message):
    metadata = base | {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    metadata = {name: value for name, value in metadata.items() if value is not None}
    if message is None:  # the text of a control token may be anything
        assert Tokenizer.from_gguf(metadata).vocab_size == 261
        return
    with pytest.raises(WeightFormatError, match=message) as caught:
        Tokenizer.from_gguf(metadata)
    assert "\n" not in str(caught.value)


def test_byte_tokens_are_all_there_or_none():
    tokens = list(SCORED["tokenizer.ggml.tokens"])
    tokens[3 + 0x41] = "<0x4G>"
    with pytest.raises(WeightFormatError, match=r"byte token '<0x4G>' is not of the form <0x41>"):
        Tokenizer.from_gguf(SCORED | {"tokenizer.ggml.tokens": tokens})
    types = SCORED["tokenizer.ggml.token_type"].copy()
    types[3 + 0x41] = NORMAL
    with pytest.raises(WeightFormatError, match=r"no byte token <0x41> \(1 of 256 are missing\)"):
        Tokenizer.from_gguf(SCORED | {"tokenizer.ggml.token_type": types})


def test_merges_that_do_not_fit_the_tokens():
    metadata = BYTE_LEVEL | {"tokenizer.ggml.merges": ["h e", "l l", "he ll"]}
    with pytest.raises(
        WeightFormatError, match=r"merges\[2\] joins 'he' and 'll' to 'hell'; all three"
    ):
        Tokenizer.from_gguf(metadata)


def test_chat_template_is_a_string():
    with pytest.raises(WeightFormatError, match="chat_template is bytes, not a string"):
        Tokenizer.from_gguf(BYTE_LEVEL | {"tokenizer.chat_template": b"{{ x }}"})


def test_special_ids_and_their_defaults():
    tokenizer = Tokenizer.from_gguf(scored([("a", 0.0)], padding_token_id=np.uint32(2)))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id) == (1, (2,), 0)
    assert tokenizer.pad_id == 2
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.add_bos and tokenizer.add_space_prefix
    without = {
        name: value
        for name, value in scored([("a", 0.0)]).items()
        if not name.endswith("_token_id")
    }
    tokenizer = Tokenizer.from_gguf(without)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id) == (1, (2,), 0)
    without = {n: v for n, v in BYTE_LEVEL.items() if not n.endswith("_token_id")}
    tokenizer = Tokenizer.from_gguf(without)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id) == (None, (1,), None)
    assert not tokenizer.add_bos


def test_end_ids_are_named_ones_and_control_tokens_with_a_known_text():
    special = (
        ("<s>", CONTROL),
        ("</s>", USER_DEFINED),  # an HTML tag in Gemma's vocabulary
        ("<end_of_turn>", CONTROL),
        ("<|im_end|>", NORMAL),
        ("[my end]", CONTROL),
        ("<file_sep>", CONTROL),
        ("<|eot_id|>", CONTROL),
    )
    tokenizer = Tokenizer.from_gguf(byte_level([], special=special, eos_token_id=4))
    assert tokenizer.eos_ids == (4, 2, 6)
    tokenizer = Tokenizer.from_gguf(
        byte_level([], special=special, eos_token_id=4, eot_token_id=3, eom_token_id=0)
    )
    assert tokenizer.eos_ids == (4, 3, 0, 2, 6)


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (("<|end|>", "<|return|>"), {"<|end|>", "<|return|>"}),
        (("<|end|>", "<|return|>", "<|call|>"), {"<|return|>", "<|call|>"}),
        (("<|end|>", "<|calls|>", "<|flush|>"), {"<|calls|>", "<|flush|>"}),
        (("</s>", "<|tool_response>", "<turn|>"), {"<|tool_response>", "<turn|>"}),
    ],
)
def test_texts_that_end_nothing_beside_others(texts, ends):
    special = tuple((text, CONTROL) for text in texts)
    metadata = byte_level([], special=special)
    del metadata["tokenizer.ggml.eos_token_id"]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert {texts[i] for i in tokenizer.eos_ids} == ends


def test_an_empty_text_gets_a_name_and_is_never_matched():
    metadata = scored([("a", 0.0), ("", 0.0)], add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("aa") == [259, 259]
    assert tokenizer.token_bytes(260) == b"[EMPTY_260]"
