"""Packed weights written in the form of compressed-tensors: they come back bit for bit, and what
has no place there is refused before anything is written.
"""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer import quant
from infer.cli.main import main
from infer.errors import ConfigError
from infer.models.params import Params, random_params
from infer.quant.formats import GGML_TYPES
from infer.quant.methods import Method
from infer.quant.qarray import QArray, dequantize
from tests.models import tiny, tiny_folder

# Method -> (its format there, strategy).
METHODS: dict[str, tuple[Method, str, str]] = {
    "int4": (quant.RTN(bits=4, group_size=16), "pack-quantized", "group"),
    "int4, zeros": (quant.RTN(bits=4, group_size=16, symmetric=False), "pack-quantized", "group"),
    "int3": (quant.RTN(bits=3, group_size=16), "pack-quantized", "group"),
    "int4, channel": (quant.RTN(bits=4, group_size="channel"), "pack-quantized", "channel"),
    "int8": (
        quant.RTN(bits=8, group_size="channel", activations="int8", scale_dtype="float32"),
        "int-quantized",
        "channel",
    ),
    "int8, zeros": (
        quant.RTN(bits=8, group_size="channel", symmetric=False),
        "int-quantized",
        "channel",
    ),
    "fp8": (quant.FP8(activations="token"), "float-quantized", "channel"),
    "fp8, tensor": (quant.FP8(granularity="tensor"), "float-quantized", "tensor"),
    "fp8, blocks": (
        quant.FP8(granularity="block", activations="block"),
        "float-quantized",
        "block",
    ),
    "mxfp4": (quant.MX(), "mxfp4-pack-quantized", "group"),
    "nvfp4": (quant.NVFP4(), "nvfp4-pack-quantized", "tensor_group"),
}


def _params() -> Params:
    fields = dict(vocab_size=268, num_tokens=268, intermediate_size=64, max_context=512)
    return random_params(tiny.llama_config(**fields), seed=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return infer.load(tiny_folder.write(tmp_path_factory.mktemp("source") / "m")).tokenizer


@pytest.mark.parametrize("name", METHODS)
def test_weights_come_back_bit_for_bit(name: str, tokenizer: Any, tmp_path: Path) -> None:
    method, form, strategy = METHODS[name]
    packed = infer.quantize(_params(), {"layers.0.down": None, "layers.*": method})
    infer.save(packed, tmp_path / "m", tokenizer=tokenizer, form="compressed-tensors")
    said = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert said["format"] == form
    (group,) = said["config_groups"].values()
    assert group["weights"]["strategy"] == strategy and group["targets"] == ["Linear"]
    assert said["ignore"] == ["model.layers.0.mlp.down_proj", "lm_head"]
    loaded = infer.load(tmp_path / "m", packed=False).params
    is_packed = lambda x: isinstance(x, QArray)
    leaves = lambda p: jax.tree.leaves(p, is_leaf=is_packed)
    for a, b in zip(leaves(loaded), leaves(packed), strict=True):
        assert isinstance(a, QArray) == isinstance(b, QArray)
        if isinstance(b, QArray):
            assert a.format == b.format or (name, a.format.group) == ("fp8, blocks", 128)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            exact = name != "nvfp4" or y.ndim  # the global scale is a reciprocal there
            np.testing.assert_allclose(x, y, rtol=0 if exact else 2e-7, atol=0)


def test_several_formats_name_their_modules(tokenizer: Any, tmp_path: Path) -> None:
    recipe = {"layers.*.down": quant.FP8(), "layers.*": quant.RTN(bits=4, group_size=16)}
    packed = infer.quantize(_params(), recipe)
    infer.save(packed, tmp_path / "m", tokenizer=tokenizer, form="compressed-tensors")
    said = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert said["format"] == "mixed-precision"
    int4, fp8 = said["config_groups"].values()
    assert fp8["targets"] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    assert (int4["format"], fp8["format"]) == ("pack-quantized", "float-quantized")
    loaded = infer.load(tmp_path / "m", packed=False).params
    assert loaded.layers[1].down.format == packed.layers[1].down.format


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"layers.*": quant.NF4(group_size=16)}, r"codes of 4 bits \(nf4\) have no place there"),
        ({"layers.*": quant.RTN(bits=6, group_size=16)}, r"codes of 6 bits \(int\)"),
        ({"layers.*": quant.RTN(bits=4, group_size=16, hadamard=16)}, "turned inputs have no"),
        ({"layers.*": quant.LLMInt8()}, "activations rounded by 'outliers'"),
        ({"embed": quant.RTN(bits=8, group_size="channel")}, "only linear layers of their own"),
    ],
)
def test_what_has_no_place_is_refused_by_name(
    recipe: dict, words: str, tokenizer: Any, tmp_path: Path
) -> None:
    packed = infer.quantize(_params(), recipe)
    with pytest.raises(ConfigError, match=words):
        infer.save(packed, tmp_path / "m", tokenizer=tokenizer, form="compressed-tensors")
    assert not (tmp_path / "m").exists()
    with pytest.raises(ConfigError, match="form is 'awq'; use 'infer', 'compressed-tensors'"):
        infer.save(packed, tmp_path / "m", tokenizer=tokenizer, form="awq")


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_folder.write(tmp_path / "source")
    asked = ["--method", "rtn", "--group-size", "16", "--form", "compressed-tensors"]
    assert main(["quantize", str(source), *asked, "--out", str(tmp_path / "m")]) == 0
    assert main(["info", str(tmp_path / "m")]) == 0
    out = capsys.readouterr().out
    assert 'quantised by   compressed-tensors: format pack-quantized, ignore ["lm_head"]' in out
    assert main(["quantize", str(source), *asked[:-1], "gptq", "--out", "x"]) == 2
    assert "--form is 'gptq'; use infer or compressed-tensors" in capsys.readouterr().err


def test_blocks_of_gguf_are_written_as_the_floats_that_they_are(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = infer.quantize(_params(), quant.RTN(bits=4, group_size=16))
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (268, 34), dtype=np.uint8)
    rows[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    q8 = QArray.create(jnp.asarray(rows), GGML_TYPES[8], (268, 32))
    params = dataclasses.replace(params, embed=q8)
    with caplog.at_level(logging.WARNING):
        infer.save(params, tmp_path / "m", tokenizer=tokenizer, form="compressed-tensors")
    assert "model.embed_tokens.weight and 0 others are blocks of GGUF" in caplog.text
    loaded = infer.load(tmp_path / "m", packed=False).params
    np.testing.assert_array_equal(loaded.embed, dequantize(q8))
