"""Folders as GGUF files and back, for every family: the same weights and the same model."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from infer.errors import ConfigError
from infer.model_files import ModelFolder
from infer.models.differences import differences
from infer.models.params import Params
from infer.weights.convert import convert
from infer.weights.folder import load_folder
from infer.weights.gguf import GGUFFile
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
