"""Folders of other tools, loaded packed: the weights that they stand for, bit for bit, the same
logits as the floats, saved in our form and read again; and what is refused.
"""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.cli.main import main
from infer.errors import WeightFormatError
from infer.models import decoder
from infer.models.checkpoint import HFConfig
from infer.quant.formats import PlanarFormat
from infer.quant.qarray import QArray, dequantize
from infer.weights.folder_config import QUANTISED
from infer.weights.packed_folder import assembled
from infer.weights.quantised.matrix import Matrix, Tensors, pack, unpacked
from infer.weights.quantised.translate import READERS
from infer.weights.safetensors import TensorInfo
from infer.weights.safetensors_writer import dtype_name
from tests.weights.quantised import layouts
from tests.weights.quantised.layouts import CASES

_FIELDS = {"q": "self_attn.q_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj"}
_FIELDS |= {"down": "mlp.down_proj", "k": "self_attn.k_proj"}


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_as_the_weights_that_it_stands_for(name: str, tmp_path: Path) -> None:
    packing, quantisation, format = CASES[name]
    # 16 rows of 3 bits fill no whole words.
    narrow = tuple(f"layers.{i}.self_attn.{n}" for i in (0, 1) for n in "kv")
    kept = ("layers.0.down", *(narrow if name == "gptq 3" else ()))
    want = layouts.write(tmp_path / "m", packing, quantisation, kept=kept)
    model = infer.load(tmp_path / "m", packed=False)
    q = model.params.layers[0].q
    assert isinstance(q, QArray) and q.format.name == format
    assert not isinstance(model.params.layers[0].down, QArray)  # what stays in floats
    for i, layer in enumerate(model.params.layers):
        for field, module in _FIELDS.items():
            weight = getattr(layer, field)
            floats = dequantize(weight) if isinstance(weight, QArray) else weight
            np.testing.assert_array_equal(floats, want[f"model.layers.{i}.{module}.weight"])
    infer.save(model, tmp_path / "again")
    again = infer.load(tmp_path / "again", packed=False)
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert again.params.layers[0].q.format == q.format


@pytest.mark.parametrize("name", ["gptq 4 v2, act-order", "awq", "int-quantized", "modelopt NVFP4"])
def test_logits_are_those_of_the_decoded_model(name: str, tmp_path: Path) -> None:
    packing, quantisation, _ = CASES[name]
    layouts.write(tmp_path / "m", packing, quantisation)
    params = infer.load(tmp_path / "m", packed=False).params
    ids = jnp.asarray([[3, 14, 15, 92, 65, 35]], jnp.int32)
    is_packed = lambda x: isinstance(x, QArray)
    plain = jax.tree.map(lambda x: dequantize(x) if is_packed(x) else x, params, is_leaf=is_packed)
    have, want = (np.asarray(decoder.forward(p, ids))[..., :267] for p in (params, plain))
    rounded = isinstance(params.layers[0].q.format, PlanarFormat) and "A:" in CASES[name][2]
    np.testing.assert_allclose(have, want, atol=(0.1 if rounded else 1e-4) * np.abs(want).max())


def test_natively_repacked_where_there_is_a_kernel(tmp_path: Path) -> None:
    quantisation = {**CASES["gptq 4"][1], "group_size": 16, "desc_act": True}
    layouts.write(tmp_path / "m", layouts.gptq(4, 16, act=True), quantisation)
    ids = jnp.asarray([[3, 14, 15, 92, 65, 35]], jnp.int32)
    of = lambda packed: np.asarray(
        decoder.forward(infer.load(tmp_path / "m", packed=packed).params, ids)
    )[..., :267]
    have, want = of(True), of(False)
    assert np.abs(have - want).max() < 0.05 * np.abs(want).max()  # activations in 8 bits


def matrix_of(tensors: dict[str, np.ndarray], **config: Any) -> Matrix:
    """Return the matrix "m" of these tensors."""
    named = {f"m.{part}": a for part, a in tensors.items()}
    infos = {
        n: TensorInfo(name=n, shape=a.shape, dtype=dtype_name(a.dtype), offset=0, nbytes=a.nbytes)
        for n, a in named.items()
    }
    reader = READERS[config["quant_method"]]
    return reader(HFConfig(config), Tensors("folder", infos, named.__getitem__))["m"]


def decoded(matrix: Matrix) -> np.ndarray:
    arrays = {name: jnp.asarray(part.read()) for name, part in matrix.parts.items()}
    assert all(arrays[name].shape == part.shape for name, part in matrix.parts.items())
    return np.asarray(dequantize(assembled(arrays, matrix.format, matrix.shape)))


def test_a_fused_tensor_is_cut_into_its_weights() -> None:
    tensors, w = layouts.gptq(4, 16)(np.random.default_rng(0), 48, 32)
    matrix = matrix_of(tensors, quant_method="gptq", bits=4, group_size=16)
    for rows in (slice(16, 32), np.array([40, 3, 7])):
        np.testing.assert_array_equal(decoded(matrix.rows(rows, "m")), w[rows])


def test_blocks_are_cut_where_they_can_be() -> None:
    tensors, w = layouts.float8("block", inverse=True)(np.random.default_rng(0), 384, 256)
    matrix = matrix_of(tensors, quant_method="fp8", weight_block_size=[128, 128])
    np.testing.assert_array_equal(decoded(matrix.rows(slice(128, 384), "m")), w[128:])
    with pytest.raises(WeightFormatError, match="a scale spans 128 rows of a tensor that holds"):
        matrix.rows(slice(64, 128), "m")
    tensors, w = layouts.float8("tensor")(np.random.default_rng(0), 48, 32)
    matrix = matrix_of(tensors, quant_method="fp8")
    np.testing.assert_array_equal(decoded(matrix.rows(slice(16, 48), "m")), w[16:])


def test_methods_that_are_named_are_read() -> None:
    assert set(QUANTISED) == set(READERS)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_in_planes_are_those_of_the_format(bits: int) -> None:
    from infer.quant import codes

    q = np.random.default_rng(0).integers(0, 1 << bits, (3, 32)).astype(np.uint8)
    np.testing.assert_array_equal(pack(q, bits), codes.pack(jnp.asarray(q), bits))
    stream = layouts.words(q.T, bits).T
    np.testing.assert_array_equal(unpacked(np.ascontiguousarray(stream).view(np.uint8), bits), q)


def test_scales_of_a_cache_are_left_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packing, quantisation, _ = CASES["modelopt NVFP4"]
    scale = np.array(0.5, np.float32)
    extra = {f"model.layers.0.self_attn.{n}_proj.{n}_scale": scale for n in ("k", "v")}
    layouts.write(tmp_path / "m", packing, quantisation, extra=extra)
    with caplog.at_level(logging.WARNING):
        infer.load(tmp_path / "m", packed=False)
    said = " ".join(caplog.messages)
    assert "2 scales for cached keys and values are not used" in said
    assert "input_scale and 12 others are not used: activations stay as they are" in said


def test_a_configuration_beside_config_json(tmp_path: Path) -> None:
    packing, _, format = CASES["modelopt FP8"]
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    layouts.write(tmp_path / "m", packing, None, files={"hf_quant_config.json": content})
    assert infer.load(tmp_path / "m", packed=False).params.layers[0].q.format.name == format


def _inputs(targets: list[str] | None = None, **change: Any) -> dict[str, Any]:
    """Another group of compressed-tensors."""
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True} | change
    said = layouts.group({"num_bits": 4, "type": "int"}, inputs)["config_groups"]
    if targets is not None:
        said["group_0"]["targets"] = targets
    return {"config_groups": said}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gptq 4", {"quant_method": "exl2"}, "quantised by 'exl2', which this version does not"),
        ("gptq 4", {"bits": 5}, "bits is 5; GPTQ is read with 2, 3, 4 and 8"),
        ("gptq 4", {"bits": "4"}, "bits is '4', must be an integer"),
        ("gptq 4", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("gptq 4", {"group_size": 24}, "4 words of 4 bits a column, no whole groups of 24"),
        ("gptq 4", {"bits": 8}, r"scales is \[2, 64\], must be \[1, 64\]"),
        ("gptq 4", {"quant_method": "fp8"}, "is said to be quantised by fp8, and no tensor is"),
        ("awq", {"version": "gemv"}, "4 bits in the version 'gemv'; 4 bits in 'gemm' are read"),
        ("fp8 blocks", {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
        ("fp8 blocks", {"activation_scheme": "odd"}, "activation_scheme is 'odd'"),
        ("pack-quantized", {"format": "marlin-24"}, "format is 'marlin-24'"),
        ("modelopt FP8", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; FP8 and NVFP4"),
        ("gptq 4", {"dynamic": {"+:(": {"bits": 8}}}, r"'\+:\(' is no pattern"),
        ("pack-quantized", {"transform_config": {"R1": {}}}, "has transform_config, which this"),
        ("int-quantized", _inputs(symmetric=False), "activations have zero points"),
        ("int-quantized", _inputs(num_bits=4), "activations of 4 bits .* are not rounded so here"),
        ("pack-quantized", _inputs(targets=["re:("]), r"'re:\(' is no pattern"),
    ],
)
def test_what_is_refused(name: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    packing, quantisation, _ = CASES[name]
    layouts.write(tmp_path / "m", packing, quantisation | change)
    with pytest.raises(WeightFormatError, match=words):
        infer.load(tmp_path / "m")


def test_broken_tensors_are_named(tmp_path: Path) -> None:
    packing, quantisation, _ = CASES["gptq 4 v2, act-order"]

    def broken(change: dict[str, Any]) -> layouts.Pack:
        return lambda *asked: ((made := packing(*asked))[0] | change, made[1])

    for number, (change, words) in enumerate(
        [
            ({"g_idx": np.zeros(8, np.int32)}, r"g_idx is \[8\], must be \[32\]"),
            ({"g_idx": np.zeros(32, np.int32)}, "groups that are not of 8 each"),
            ({"scales": np.zeros((4, 32), np.int32)}, "scales is I32, must be F16 or BF16 or F32"),
        ]
    ):
        folder = tmp_path / str(number)
        layouts.write(folder, broken(change), quantisation)
        with pytest.raises(WeightFormatError, match=words):
            infer.load(folder)

    def not_a_number(*asked: Any) -> tuple[layouts.Tensors, np.ndarray]:
        tensors, w = packing(*asked)
        return tensors | {"scales": tensors["scales"] * np.float16(np.nan)}, w

    layouts.write(tmp_path / "nan", not_a_number, quantisation)
    with pytest.raises(WeightFormatError, match="scales that are NaN or infinite"):
        infer.load(tmp_path / "nan")


def test_a_module_that_the_model_has_not(tmp_path: Path) -> None:
    packing, quantisation, _ = CASES["awq"]
    parts, _ = packing(np.random.default_rng(0), 32, 32)
    extra = {f"model.layers.7.mlp.up_proj.{part}": a for part, a in parts.items()}
    layouts.write(tmp_path / "m", packing, quantisation, extra=extra)
    with pytest.raises(WeightFormatError, match=r"'model\.layers\.7\.mlp\.up_proj' is quantised"):
        infer.load(tmp_path / "m")


def test_info_says_method_bits_what_stayed_and_who_runs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packing, quantisation, _ = CASES["gptq 4 v2, act-order"]
    layouts.write(tmp_path / "m", packing, {**quantisation, "dataset": "wikitext2"})
    assert main(["info", str(tmp_path / "m")]) == 0
    out = capsys.readouterr().out
    assert "quantised by   gptq: bits 4, group_size 8, desc_act true, sym false" in out
    assert "dataset wikitext2" in out
    assert "INT4-G8-ASYM-ORDERED: 4-bit integers, a float16 scale for each 8 weights, zero" in out
    assert "stays          model.layers.0.mlp.down_proj.weight (F32)" in out
    assert "stays          model.embed_tokens.weight (F32)" in out
    assert main(["info", str(tmp_path / "m"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["quantisation"]
    assert found["method"] == "gptq" and found["says"]["checkpoint_format"] == "gptq_v2"


# ---- Numbers that other engines once got wrong, by hand ------------------------------------------


def _gptq_codes(zero: int, **config: Any) -> np.ndarray:
    """A weight [8, 16] whose rows have the codes 0 to 15, under the scale 0.5."""
    codes = np.tile(np.arange(16), (8, 1))
    tensors = {
        "qweight": layouts.words(codes.T, 4),
        "qzeros": np.array([[zero * 0x11111111]], np.uint32).view(np.int32),
        "scales": np.full((1, 8), 0.5, np.float16),
    }
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    return decoded(matrix_of(tensors, **fields, **config))[0]


def test_gptqs_zero_points_are_stored_less_one_in_version_1() -> None:
    assert _gptq_codes(7)[8] == 0 and _gptq_codes(7)[[0, 15]].tolist() == [-4, 3.5]
    second = _gptq_codes(7, checkpoint_format="gptq_v2")
    assert second[7] == 0 and second[[0, 15]].tolist() == [-3.5, 4]
    assert _gptq_codes(15)[[0, 15]].tolist() == [0, 7.5]  # a zero point of 0


def test_a_symmetric_file_of_version_2_that_says_1_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert _gptq_codes(8, sym=True)[8] == 0
    assert "and stores 8: they are read as those of 'gptq_v2'" in caplog.text
    assert _gptq_codes(8, sym=False)[9] == 0


def test_awqs_nibbles_have_their_own_order_and_zero_points_no_one() -> None:
    word = np.full((8, 1), 0x75316420, np.int32)
    tensors = {
        "qweight": word,
        "qzeros": word[:1] & 0,
        "scales": np.full((1, 8), 1, np.float16),
    }
    found = decoded(matrix_of(tensors, quant_method="awq", bits=4, group_size=8))
    np.testing.assert_array_equal(found, np.tile(np.arange(8), (8, 1)).T)
    tensors["qzeros"] = word[:1]
    found = decoded(matrix_of(tensors, quant_method="awq", bits=4, group_size=8))
    np.testing.assert_array_equal(found, 0)


def test_gptqs_modules_may_have_bits_of_their_own() -> None:
    wide = {"bits": 8, "group_size": 64, "dynamic": {"-:other": {}, "+:^m$": {"bits": 4}}}
    tensors, w = layouts.gptq(4, 64)(np.random.default_rng(0), 8, 64)
    found = matrix_of(tensors, quant_method="gptq", **wide)
    assert found.format.bits == 4
    np.testing.assert_array_equal(decoded(found), w)


def test_another_threshold_of_outliers_is_refused() -> None:
    tensors = {"weight": np.zeros((8, 32), np.int8), "SCB": np.ones(8, np.float32)}
    assert matrix_of(tensors, quant_method="bitsandbytes", llm_int8_threshold=6.0)
    with pytest.raises(WeightFormatError, match=r"llm_int8_threshold is 0\.0, and outliers"):
        matrix_of(tensors, quant_method="bitsandbytes", llm_int8_threshold=0.0)
