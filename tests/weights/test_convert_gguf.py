"""Folders as GGUF files and back, for every family: the same weights and the same model."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from infer.errors import ConfigError
from infer.model_files import ModelFolder
from infer.models.differences import differences
from infer.models.params import Params
from infer.tokenizer import Tokenizer
from infer.tokenizer.byte_level import bytes_letters
from infer.weights.convert import convert
from infer.weights.folder import load_folder
from infer.weights.gguf import GGUFFile
from infer.weights.gguf_writer import metadata_of, tensors_of, write_gguf
from infer.weights.load import load_gguf
from infer.weights.shards import SafetensorsFolder
from tests.models import gguf_twin
from tests.models.test_families import CASES, NO_GGUF, golden, tensors
from tests.weights import hf_folders

BOTH = [case for case in CASES if case not in NO_GGUF]


def assert_same_model(have: Params, want: Params) -> None:
    assert differences(want.config, have.config) == []
    leaves = zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True)
    assert all(np.array_equal(a, b) for a, b in leaves)


@pytest.mark.parametrize("case", BOTH)
def test_a_folder_as_gguf_is_the_same_model(case: str, tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "hf", golden(case)["config"], tensors(case))
    [path] = convert(folder, tmp_path / "m.gguf")
    assert_same_model(load_gguf(path), load_folder(folder))
    # The names, shapes and bytes are those of llama.cpp's converter.
    twin = gguf_twin.write(tmp_path / "twin.gguf", golden(case)["config"], tensors(case))
    with GGUFFile.open(path) as ours, GGUFFile.open(twin) as theirs:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, info in theirs.tensors.items():
            assert (ours.tensors[name].shape, ours.tensors[name].type_name) == (
                info.shape,
                info.type_name,
            )
            np.testing.assert_allclose(ours.array(name), theirs.array(name), rtol=1e-6)
        arch = gguf_twin.ARCH.get(golden(case)["config"]["model_type"], case)
        assert ours.metadata["general.architecture"] == theirs.metadata["general.architecture"]
        shared = {k for k in theirs.metadata if k in ours.metadata and not k.startswith("general")}
        assert len(shared) > 8, arch
        for key in shared:
            assert ours.metadata[key] == pytest.approx(theirs.metadata[key]), key


@pytest.mark.parametrize("case", BOTH)
def test_gguf_as_a_folder_is_the_same_model(case: str, tmp_path: Path) -> None:
    config = golden(case)["config"]
    twin = gguf_twin.write(tmp_path / "m.gguf", config, tensors(case))
    convert(twin, tmp_path / "hf")
    have, want = load_folder(tmp_path / "hf"), load_gguf(twin)
    assert differences(want.config, have.config) == []
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        # Gemma's norms lose the one that is added, and get it back.
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["architectures"] == config["architectures"]
    names = {name for name, _ in golden(case)["tensors"]}
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    with SafetensorsFolder.open(ModelFolder(tmp_path / "hf")) as files:
        assert files.tensors.keys() == names - tied


def test_what_gguf_cannot_say_is_refused_by_name(tmp_path: Path) -> None:
    case = "llama_dynamic"
    folder = hf_folders.write(tmp_path / "hf", golden(case)["config"], tensors(case))
    with pytest.raises(ConfigError, match="no key for dynamic rotary scaling"):
        convert(folder, tmp_path / "new" / "m.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tokenizer_goes_both_ways(kind: str, tmp_path: Path) -> None:
    source, texts = TOKENIZERS[kind](), ["hello  world", "Hello, hé🚀\n123", " x<s>y</s>"]
    config = golden("llama")["config"] | {"vocab_size": len(source["tokenizer.ggml.tokens"])}
    weights = tensors("llama")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.resize(weights[name], (config["vocab_size"], weights[name].shape[1]))
    plain = hf_folders.write(tmp_path / "plain", config, weights)
    [path] = convert(plain, tmp_path / "plain.gguf")
    with GGUFFile.open(path) as file:
        keys = {k: v for k, v in metadata_of(file).items() if not k.startswith("tokenizer")}
        write_gguf(tmp_path / "a.gguf", keys | source, tensors_of(file))
    convert(tmp_path / "a.gguf", tmp_path / "hf")
    [back] = convert(tmp_path / "hf", tmp_path / "b.gguf")
    with GGUFFile.open(tmp_path / "a.gguf") as first, GGUFFile.open(back) as last:
        made = [
            Tokenizer.from_gguf(first.metadata),
            Tokenizer.from_folder(tmp_path / "hf"),
            Tokenizer.from_gguf(last.metadata),
        ]
        same = ("model", "tokens", "token_type", "add_bos_token", "bos_token_id", "eos_token_id")
        for key in (*same, *(["pre", "merges"] if kind == "gpt2" else ["add_space_prefix"])):
            a, b = (f.metadata[f"tokenizer.ggml.{key}"] for f in (first, last))
            assert list(np.atleast_1d(a)) == list(np.atleast_1d(b)), key
    for text in texts:
        for parse in (False, True):
            ids = [t.encode(text, parse_special=parse) for t in made]
            assert ids[0] == ids[1] == ids[2]
            assert len({t.decode(ids[0]) for t in made}) == 1
    assert len({t.chat_template for t in made}) == 1 and made[0].chat_template
    assert len({t.eos_ids for t in made}) == 1


def byte_level() -> dict[str, Any]:
    tokens = ["<s>", "</s>", *map(bytes_letters, (bytes([i]) for i in range(256)))]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3"]
    tokens += [merge.replace(" ", "") for merge in merges]
    return ggml(tokens, [3, 3] + [1] * (len(tokens) - 2)) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.merges": merges,
    }


def sentencepiece() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces = [*"▁helowrd,Hxy", "he", "ll", "▁he", "hell", "▁hell", "▁hello", "▁w", "▁▁"]
    scores = [0.0] * len(tokens) + [-1e4] * 12 + [-1.0 - i for i in range(len(pieces) - 12)]
    return ggml(tokens + pieces, [2, 3, 3] + [6] * 256 + [1] * len(pieces)) | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def ggml(tokens: list[str], types: list[int]) -> dict[str, Any]:
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
    }


TOKENIZERS = {"gpt2": byte_level, "llama": sentencepiece}


def test_floats_stay_as_they_are_unless_a_dtype_is_named(tmp_path: Path) -> None:
    twin = gguf_twin.write(tmp_path / "a.gguf", golden("llama")["config"], tensors("llama"))
    convert(twin, tmp_path / "same")
    convert(twin, tmp_path / "half", dtype="float16")
    for name, wanted in (("same", {"F32"}), ("half", {"F16"})):
        with SafetensorsFolder.open(ModelFolder(tmp_path / name)) as files:
            assert {t.dtype for t in files.tensors.values()} == wanted
        assert json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"] == (
            "float32" if name == "same" else "float16"
        )
    [path] = convert(tmp_path / "half", tmp_path / "half.gguf")
    with GGUFFile.open(path) as file:
        assert {t.type_name for t in file.tensors.values() if len(t.shape) == 2} == {"F16"}
        assert {t.type_name for t in file.tensors.values() if len(t.shape) == 1} == {"F32"}


def test_nothing_is_written_over_or_left_half_done(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "hf", golden("llama")["config"], tensors("llama"))
    [path] = convert(folder, tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="is there already; name a new file"):
        convert(folder, path)
    with pytest.raises(ConfigError, match="is no folder; a GGUF file is made from a folder"):
        convert(path, tmp_path / "other.gguf")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    for target in ("deep/er/b.gguf", "deep/er/folder"):
        with pytest.raises(KeyboardInterrupt):
            convert(folder if target.endswith("gguf") else path, tmp_path / target, progress=stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.gguf"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_pre_attn_scalar": 17}, "the factor on scores"),
        ({"hidden_activation": "silu"}, "activation silu would become gelu_tanh"),
    ],
)
def test_a_setting_that_no_key_holds_is_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = golden("gemma3")["config"] | change
    folder = hf_folders.write(tmp_path / "hf", config, tensors("gemma3"))
    with pytest.raises(ConfigError, match=f"gemma3 says what config.json says.*{message}"):
        convert(folder, tmp_path / "m.gguf")
