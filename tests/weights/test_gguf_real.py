"""The GGUF reader on the bundled models, against gguf-py."""

import time
from collections import Counter

import gguf
import numpy as np
import pytest

from infer.weights.gguf import GGUFFile
from tests.real_models import real_model_path

pytestmark = pytest.mark.real


def assert_one_tensor_of_each_type_is_gguf_pys(file: GGUFFile) -> None:
    by_type = {info.type_name: name for name, info in reversed(file.tensors.items())}
    for type_name, name in by_type.items():
        raw = file.raw(name)[:64]
        want = gguf.quants.dequantize(np.array(raw), gguf.GGMLQuantizationType[type_name])
        got = file.array(name)
        assert np.isfinite(got).all() and np.abs(got).max() > 0
        np.testing.assert_array_equal(got.reshape(-1, got.shape[-1])[:64], want)


def test_smollm2():
    path = real_model_path("smollm2-135m")
    theirs = gguf.GGUFReader(str(path))
    with GGUFFile.open(path) as file:
        assert {t.name: (t.tensor_type.name, t.data_offset, t.n_bytes) for t in theirs.tensors} == {
            t.name: (t.type_name, t.offset, t.nbytes) for t in file.tensors.values()
        }
        for t in theirs.tensors:
            assert file.tensors[t.name].shape == tuple(int(d) for d in t.shape[::-1])
        ours = set(file.metadata)
        assert ours == {k for k in theirs.fields if not k.startswith("GGUF.")}
        for key in ours:
            want = theirs.fields[key].contents()
            got = file.metadata[key]
            assert (got.tolist() if isinstance(got, np.ndarray) else got) == want, key
        assert file.meta_strs("tokenizer.ggml.tokens")[1] == "<|im_start|>"
        assert_one_tensor_of_each_type_is_gguf_pys(file)


def test_gemma3_opens_at_once():
    path = real_model_path("gemma3-270m")
    GGUFFile.open(path).close()  # the file is in memory now
    started = time.process_time()
    with GGUFFile.open(path) as file:
        seconds = time.process_time() - started
        assert seconds < 0.5  # measured 0.04 s; a loaded machine is slower
        assert Counter(t.type_name for t in file.tensors.values()) == {
            "F32": 109,
            "Q5_0": 81,
            "Q4_K": 27,
            "Q8_0": 10,
            "Q6_K": 9,
        }
        tokens = file.meta_strs("tokenizer.ggml.tokens")
        assert len(tokens) == 262_144 and tokens[:4] == ["<pad>", "<eos>", "<bos>", "<unk>"]
        assert file.meta_floats("tokenizer.ggml.scores").shape == (262_144,)
        assert file.tensors["token_embd.weight"].shape == (262_144, 640)
        assert_one_tensor_of_each_type_is_gguf_pys(file)
