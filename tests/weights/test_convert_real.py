"""The bundled models as folders and back: the tokenizer's ids and a quantised file's weights."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from infer.model_files import ModelFolder
from infer.tokenizer import Tokenizer
from infer.weights.convert import convert
from infer.weights.gguf import GGUFFile
from infer.weights.shards import SafetensorsFolder
from tests.cases.strings import strings
from tests.real_models import real_model_path

pytestmark = pytest.mark.real


def test_smollm2_goes_both_ways(tmp_path: Path) -> None:
    path = real_model_path("smollm2-135m")
    convert(path, tmp_path / "hf")
    [back] = convert(tmp_path / "hf", tmp_path / "back.gguf")
    with GGUFFile.open(path) as first, GGUFFile.open(back) as last:
        assert last.metadata["tokenizer.ggml.pre"] == "smollm"
        for key in ("tokens", "merges"):
            name = f"tokenizer.ggml.{key}"
            assert first.metadata[name] == last.metadata[name]
        old = Tokenizer.from_gguf(first.metadata)
        made = [Tokenizer.from_folder(tmp_path / "hf"), Tokenizer.from_gguf(last.metadata)]
        for text in strings(300):
            want = old.encode(text, parse_special=True)
            assert [t.encode(text, parse_special=True) for t in made] == [want, want], text
        # Q4_1 and Q8_0 are bfloat16 now, on both sides alike.
        for name in ("token_embd.weight", "blk.3.ffn_down.weight", "blk.7.attn_q.weight"):
            wide = first.array(name).astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(last.array(name, ml_dtypes.bfloat16), wide)
            assert last.tensors[name].type_name == "BF16"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["torch_dtype"], config["rms_norm_eps"]) == ("bfloat16", 1e-05)
    with SafetensorsFolder.open(ModelFolder(tmp_path / "hf")) as files:
        assert {t.dtype for t in files.tensors.values()} == {"BF16", "F32"}
