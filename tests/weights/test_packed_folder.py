"""Quantised models on disk: what comes back is what was saved, bit for bit, and nothing half done
or half right is ever there.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer import fingerprint, quant
from infer.errors import ConfigError
from infer.model import Model
from infer.models.differences import differences
from infer.models.params import Params, random_params
from infer.quant.qarray import QArray
from infer.tokenizer import Tokenizer
from infer.weights.folder import load_folder
from infer.weights.packed_folder import write_params
from infer.weights.safetensors import SafetensorsFile
from tests.models import tiny, tiny_folder
from tests.models.test_families import CASES, from_hf, tensors
from tests.tokenizer import tokenizer_json

# One for each kind of part and of field in a format.
METHODS: dict[str, quant.Method] = {
    "int8 channel": quant.RTN(bits=8, group_size="channel"),
    "int3 tensor": quant.RTN(bits=3, group_size="tensor", scale_dtype="float32"),
    "int5 asymmetric": quant.RTN(bits=5, group_size=16, symmetric=False, scale_dtype="bfloat16"),
    "llm.int8": quant.LLMInt8(),
    "fp8": quant.FP8(activations="token"),
    "fp8 blocks": quant.FP8(granularity="block", activations="block"),
    "nf4": quant.NF4(group_size=16),
    "fp4": quant.NF4(group_size=16, double=False, levels="fp4"),
    "mxfp6": quant.MX(code="e3m2"),
    "nvfp4": quant.NVFP4(),
}


def _tokenizer() -> Tokenizer:
    return Tokenizer.from_tokenizer_json(
        tokenizer_json.byte_level().to_str(), config={"eos_token": "<|im_end|>"}
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return _tokenizer()


def _params(**changes: Any) -> Params:
    # Widths of 32 and 64, so that groups of 32 divide.
    fields = dict(vocab_size=268, num_tokens=268, intermediate_size=64, max_context=512)
    return random_params(tiny.llama_config(**(fields | changes)), seed=4)


def _leaves(params: Params) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QArray))


def _assert_same(have: Params, want: Params) -> None:
    for a, b in zip(_leaves(have), _leaves(want), strict=True):
        assert type(a) is type(b)
        if isinstance(b, QArray):
            assert (a.format, a.shape) == (b.format, b.shape)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("name", METHODS)
def test_packed_weights_come_back_bit_for_bit(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    params = _params()
    method = METHODS[name]
    packed = infer.quantize(params, {"layers.*.down": None, "layers.*": method, "embed": method})
    infer.save(packed, tmp_path / "m", tokenizer=tokenizer)
    loaded = infer.load(tmp_path / "m")
    _assert_same(loaded.params, packed)
    text = "Hello <|im_end|> world"
    for special in (False, True):
        assert loaded.tokenizer.encode(text, parse_special=special) == tokenizer.encode(
            text, parse_special=special
        )


def test_orders_static_scales_and_blocks_of_gguf(tokenizer: Tokenizer, tmp_path: Path) -> None:
    params = _params(tied_embeddings=False)
    ids = np.random.default_rng(0).integers(0, 268, (4, 32)).astype(np.int32)
    recipe = {
        "layers.0.*": quant.GPTQ(group_size=16, act_order=True),
        "layers.1.*": quant.SmoothQuant(static=True),
    }
    packed = infer.quantize(params, recipe, ids)
    assert packed.layers[0].q.perm is not None and packed.layers[1].q.act_scale is not None
    blocks = QArray.create(
        jnp.asarray(np.random.default_rng(1).integers(0, 256, (268, 34), np.uint8)),
        infer.quant.Format(name="Q8_0", bits=8, group=32, block_bytes=34),
        (268, 32),
    )
    packed = dataclasses.replace(packed, lm_head=blocks)
    infer.save(packed, tmp_path / "m", tokenizer=tokenizer, calibration=ids)
    _assert_same(infer.load(tmp_path / "m").params, packed)
    said = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert said["calibration"]["num_tokens"] == 128 and said["calibration"]["of"] == "tokens"
    assert said["weights"]["lm_head.weight"] == "Q8_0"
    with SafetensorsFile.open(tmp_path / "m" / "model.safetensors") as file:
        mark = fingerprint.Fingerprint.from_json(file.metadata[fingerprint.METADATA_KEY])
    assert fingerprint.share_in(fingerprint.token_hashes(ids), mark) == 1


# Among them tensors that hold several weights (phi3, gpt2, gpt_neox), transposed ones (gpt2), rows
# in another order (glm4, cohere2), norms less one (gemma3), every kind of rotary scaling.
@pytest.mark.parametrize("case", CASES)
def test_every_family(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    params = from_hf(case)
    method = quant.RTN(bits=8, group_size="channel")
    packed = infer.quantize(params, {"layers.0.q": method, "layers.1.up": method})
    [path] = write_params(packed, tokenizer, tmp_path / "m")
    have = load_folder(tmp_path / "m", num_tokens=params.config.num_tokens)
    _assert_same(have, packed)
    assert not differences(params.config, have.config)
    # What stays in floats is the checkpoint's own tensor.
    old, new = tensors(case), SafetensorsFile.open(path)
    common = [name for name in new.tensors if name in old]
    assert len(common) >= len(old) - 2
    for name in common:
        np.testing.assert_array_equal(new.array(name).astype(np.float32), old[name])


def test_norms_far_from_one_come_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = dataclasses.replace(tiny.gemma3_config(), vocab_size=268, num_tokens=268)
    params = random_params(config, seed=2)
    odd = jnp.asarray(np.float32([1e-6, 0.1, 0.3, 1.7, 3.3, 1e5, 0, -0.7] * 4))
    params = dataclasses.replace(params, final_norm=odd)
    infer.save(params, tmp_path / "m", tokenizer=tokenizer)
    _assert_same(infer.load(tmp_path / "m").params, params)


def test_floats_are_written_in_the_narrowest_dtype_that_holds_them(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    params = _params()
    half = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), params.layers[0].q)
    brain = params.layers[0].k.astype(jnp.bfloat16).astype(jnp.float32)
    layer = dataclasses.replace(params.layers[0], q=half, k=brain)
    params = dataclasses.replace(params, layers=(layer, params.layers[1]))
    infer.save(params, tmp_path / "m", tokenizer=tokenizer)
    with SafetensorsFile.open(tmp_path / "m" / "model.safetensors") as file:
        dtypes = {n.split(".")[-2]: t.dtype for n, t in file.tensors.items() if ".0." in n}
    assert (dtypes["q_proj"], dtypes["k_proj"], dtypes["v_proj"]) == ("F16", "BF16", "F32")
    _assert_same(infer.load(tmp_path / "m").params, params)


# ---- Whole or not at all -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed() -> Params:
    return infer.quantize(_params(), quant.RTN(bits=4, group_size=16, symmetric=False))


def test_a_failure_half_way_leaves_nothing(
    packed: Params, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        infer.save(packed, tmp_path / "a" / "b", tokenizer=tokenizer, progress=stop)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_never_written_over(
    packed: Params, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="is not empty; name a new folder"):
        infer.save(packed, tmp_path, tokenizer=tokenizer)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert infer.save(packed, tmp_path / "empty", tokenizer=tokenizer)


def test_what_cannot_be_saved_is_refused(
    packed: Params, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    to = tmp_path / "m"
    with pytest.raises(ConfigError, match=r"pass tokenizer=model\.tokenizer"):
        infer.save(packed, to)
    with pytest.raises(ConfigError, match=r"calibration is float32\[2\]; pass the token ids"):
        infer.save(packed, to, tokenizer=tokenizer, calibration=np.zeros(2, np.float32))
    broken = dataclasses.replace(packed.layers[0].q, zero=None)
    layer = dataclasses.replace(packed.layers[0], q=broken)
    wrong = dataclasses.replace(packed, layers=(layer, packed.layers[1]))
    with pytest.raises(ConfigError, match=r"q_proj.weight: .*zero is missing"):
        infer.save(wrong, to, tokenizer=tokenizer)
    wrong = dataclasses.replace(packed, final_norm=packed.layers[0].q)
    with pytest.raises(ConfigError):
        infer.save(wrong, to, tokenizer=tokenizer)
    other = dataclasses.replace(packed.config, residual_scale=0.5)  # no Llama has that
    with pytest.raises(ConfigError, match=r"residual_scale 0\.5 would become 1\.0"):
        infer.save(dataclasses.replace(packed, config=other), to, tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


def test_a_model_is_saved_with_its_own_tokenizer(packed: Params, tmp_path: Path) -> None:
    model = infer.load(tiny_folder.write(tmp_path / "source"))
    ours = Model(params=packed, tokenizer=model.tokenizer, name="x", path=tmp_path)
    infer.save(ours, tmp_path / "m")
    loaded = infer.load(tmp_path / "m")
    assert loaded.tokenizer.chat_template == tiny_folder.TEMPLATE
    assert loaded.tokenizer.eos_ids == model.tokenizer.eos_ids
    assert loaded.tokenizer.bos_id == model.tokenizer.bos_id
    assert loaded.config == dataclasses.replace(packed.config, **_ids(model))


def _ids(model: Model) -> dict[str, Any]:
    return {"bos_id": model.config.bos_id, "eos_ids": model.config.eos_ids}
