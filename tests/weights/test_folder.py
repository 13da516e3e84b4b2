"""Folders in transformers' layout: logits against transformers, both spellings, refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers

import infer
from infer import backend
from infer.config import RopeScalingKind
from infer.errors import CapacityError, ConfigError, WeightFormatError
from infer.models import decoder, llama, registry
from infer.models.checkpoint import HFConfig, Part
from infer.models.registry import layout_of
from infer.weights.folder import load_folder
from infer.weights.safetensors_writer import write_folder
from tests.weights.hf_folders import CONFIGS, golden, golden_weights, older, write


@pytest.mark.parametrize("spelling", ["5", "4"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_agree_with_transformers(name: str, spelling: str, tmp_path: Path) -> None:
    config = CONFIGS[name] if spelling == "5" else older(name)
    params = load_folder(write(tmp_path, config, golden_weights(name)))
    if spelling == "4":  # the same configuration: the logits are those of the other spelling
        other = layout_of(config["architectures"]).config(HFConfig(CONFIGS[name]))
        assert params.config == other
        return
    want = golden(name)
    logits = np.asarray(jax.jit(decoder.forward)(params, jnp.asarray(want["tokens"])))[0]
    worst = np.abs(logits[want["kept"]] - want["logits"]).max(axis=1)
    assert worst.max() < 1e-4, dict(zip(want["kept"].tolist(), worst.tolist(), strict=True))


def test_text_from_a_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS["llama"], golden_weights("llama"))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(90)}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    (folder / "tokenizer.json").write_text(words.to_str())
    model = infer.load(folder)
    greedy = infer.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    out = model.generate(["w5 w6 w7"], greedy)
    ids = [5, 6, 7]
    for _ in range(3):
        logits = decoder.forward(model.params, jnp.asarray([ids], jnp.int32))[0, -1]
        ids.append(int(jnp.argmax(logits)))
    assert out.tokens[0].tolist() == ids[3:] and max(ids) < 90
    assert out.text[0].split() == [f"w{i}" for i in ids[3:]]
    with pytest.raises(ConfigError, match="packed='blocks' keeps the blocks of a GGUF file"):
        infer.load(folder, packed="blocks")
    with pytest.raises(ConfigError, match=r"is a part of a model; give its folder"):
        infer.load(folder / "model.safetensors")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(WeightFormatError, match=r"has no tokenizer\.json"):
        infer.load(folder)


def test_a_multimodal_gemma_gives_its_text_model(tmp_path: Path) -> None:
    weights = golden_weights("gemma3")
    plain = load_folder(write(tmp_path / "plain", CONFIGS["gemma3"], weights))
    text = {k: v for k, v in CONFIGS["gemma3"].items() if "token_id" not in k}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
    }
    vision = {"x.weight": np.ones((2, 2), np.float32)}
    published = {f"language_model.{k}": v for k, v in weights.items()}
    published |= {f"vision_tower.{k}": v for k, v in vision.items()}
    published |= {f"multi_modal_projector.{k}": v for k, v in vision.items()}
    current = {k.replace("model.", "model.language_model.", 1): v for k, v in weights.items()}
    current |= {f"model.vision_tower.{k}": v for k, v in vision.items()}
    for i, tensors in enumerate((published, current)):
        params = load_folder(write(tmp_path / str(i), config, tensors))
        assert params.config == dataclasses.replace(plain.config, eos_ids=(1, 106))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(params), jax.tree.leaves(plain))
    both = published | current
    with pytest.raises(WeightFormatError, match="are the same weight"):
        load_folder(write(tmp_path / "both", config, both))
    stray = published | {"audio_tower.x": vision["x.weight"]}
    with pytest.raises(WeightFormatError, match=r"audio_tower\.x has no place in a gemma3 model"):
        load_folder(write(tmp_path / "stray", config, stray))


def test_the_defaults_of_a_published_gemma_3_4b() -> None:
    """Its config.json leaves most to transformers' class; literals from the model's card."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = layout_of(["Gemma3ForConditionalGeneration"]).config(HFConfig({"text_config": text}))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_context) == (262_208, 131_072)
    assert [i for i, layer in enumerate(config.layers) if layer.window is None] == [
        5, 11, 17, 23, 29,
    ]  # fmt: skip
    full, sliding = config.layers[5].rope, config.layers[0].rope
    assert full is not None and sliding is not None and full.scaling is not None
    assert (full.theta, full.scaling.factor) == (1e6, 8.0)
    assert (sliding.theta, sliding.scaling) == (1e4, None)
    assert config.tied_embeddings and config.softmax_scale == 1 / 16


def test_bfloat16_norms_get_their_one_in_float32(tmp_path: Path) -> None:
    """1 + 0.0123: bfloat16(0.0123) is 0.01232910, the sum 1.0123291; in bfloat16 1.015625."""
    weights = {
        k: np.full_like(v, 0.0123).astype(ml_dtypes.bfloat16) if v.ndim == 1 else v
        for k, v in golden_weights("gemma3").items()
    }
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["gemma3"]))
    write_folder(folder, weights, max_shard_bytes=20_000)
    params = load_folder(folder)
    np.testing.assert_allclose(params.final_norm, 1.0123291, rtol=1e-7)
    assert load_folder(folder, dtype="bfloat16").layers[0].q.dtype == jnp.bfloat16


def test_a_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    weights = golden_weights("gemma3")
    head = weights["model.embed_tokens.weight"]
    equal = load_folder(write(tmp_path, CONFIGS["gemma3"], weights | {"lm_head.weight": head}))
    assert equal.lm_head is None and equal.config.tied_embeddings
    other = load_folder(write(tmp_path, CONFIGS["gemma3"], weights | {"lm_head.weight": -head}))
    np.testing.assert_array_equal(other.lm_head, -head)
    assert not other.config.tied_embeddings
    untied = CONFIGS["gemma3"] | {"tie_word_embeddings": False}
    with pytest.raises(WeightFormatError, match=r"lm_head\.weight is missing"):
        load_folder(write(tmp_path, untied, weights))


def test_ids_come_from_both_files_and_padding_is_masked(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS["llama"], golden_weights("llama"))
    (folder / "generation_config.json").write_text('{"bos_token_id": 5, "eos_token_id": [7, 2]}')
    config = load_folder(folder, num_tokens=90).config
    assert (config.bos_id, config.eos_ids) == (5, (7, 2))
    assert (config.num_tokens, config.vocab_size) == (90, 96)
    assert load_folder(folder, num_tokens=97).config.num_tokens == 96


def test_a_fused_tensor_is_split_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v as one tensor, its heads interleaved as in GPT-NeoX: [head, (q, k, v), width]."""
    fused = "model.layers.{i}.self_attn.query_key_value.weight"
    order = np.arange(48).reshape(4, 3, 4)
    rows = lambda part: lambda config: order[:, part].reshape(-1)
    layout = dataclasses.replace(
        llama.FAMILY.hf,
        layer_names=llama.FAMILY.hf.layer_names
        | {
            "q": Part(fused, rows(0)),
            "k": Part(fused, rows(1)),
            "v": Part(fused, rows(2)),
            "gate": Part("model.layers.{i}.mlp.gate_up_proj.weight", lambda c: slice(0, 6)),
            "up": Part("model.layers.{i}.mlp.gate_up_proj.weight", lambda c: slice(6, 12)),
        },
    )
    monkeypatch.setitem(registry.FAMILIES, "llama", dataclasses.replace(llama.FAMILY, hf=layout))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 6,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
        "vocab_size": 3,
    }
    column = lambda count: np.arange(count, dtype=np.float32)[:, None] * np.ones(16, np.float32)
    base = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": column(3),
        "model.norm.weight": np.ones(16, np.float32),
        base + "input_layernorm.weight": np.ones(16, np.float32),
        base + "post_attention_layernorm.weight": np.ones(16, np.float32),
        base + "self_attn.query_key_value.weight": column(48),
        base + "self_attn.o_proj.weight": column(16),
        base + "mlp.gate_up_proj.weight": column(12),
        base + "mlp.down_proj.weight": np.ones((16, 6), np.float32),
    }
    done: list[tuple[int, int]] = []
    layer = load_folder(
        write(tmp_path, config, weights), progress=lambda *step: done.append(step)
    ).layers[0]
    assert layer.q[:, 0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 24, 25, 26, 27, 36, 37, 38, 39]
    assert layer.k[:, 0].tolist()[:5] == [4, 5, 6, 7, 16]
    assert layer.v[:, 0].tolist()[-1] == 47
    assert layer.gate[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert layer.up[:, 0].tolist() == [6, 7, 8, 9, 10, 11]
    assert done[-1][0] == done[-1][1] == sum(v.nbytes for v in weights.values())
    weights[base + "self_attn.query_key_value.weight"] = column(47)
    with pytest.raises(WeightFormatError, match=r"query_key_value.weight is \[47, 16\], must be"):
        load_folder(write(tmp_path, config, weights))


def test_every_problem_is_in_one_error(tmp_path: Path) -> None:
    weights = golden_weights("llama")
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.v_proj.weight"] = np.zeros((23, 32), np.float32)
    weights["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    weights["model.layers.0.mlp.down_proj.weight"] = np.zeros((32, 48), np.int32)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(6, np.float32)  # no problem
    with pytest.raises(WeightFormatError) as error:
        load_folder(write(tmp_path, CONFIGS["llama"], weights))
    message = str(error.value)
    for piece in (
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.0.self_attn.v_proj.weight is [23, 32], must be [24, 32]",
        "model.layers.7.mlp.up_proj.weight has no place in a llama model",
        "model.layers.0.mlp.down_proj.weight is I32, which this version does not read",
    ):
        assert piece in message
    assert "inv_freq" not in message and "\n" not in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.* is not supported.*Gemma3For"),
        ({"architectures": [], "model_type": "mamba"}, "'?mamba'? is not supported"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported; known are silu"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be 1 to 4096"),
        (
            {"rope_parameters": {"rope_type": "spiral", "factor": 2.0}},
            "rope type 'spiral' is not supported; this version has",
        ),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
    ],
)
def test_what_this_version_does_not_run(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path, CONFIGS["llama"] | change, golden_weights("llama"))
    with pytest.raises(ConfigError, match=message):
        load_folder(folder)


def test_a_setting_that_a_family_does_not_run_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["gemma3"] | {"attention_bias": True}
    with pytest.raises(ConfigError, match="attention_bias is True, and this version runs False"):
        load_folder(write(tmp_path, config, golden_weights("gemma3")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32', must be an integer"),
        ({"hidden_size": None}, "has no hidden_size, must have an integer"),
        ({"hidden_size": True}, "must be an integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, must be a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of strings"),
        ({"eos_token_id": [-1]}, r"eos_token_id is \[-1\], must be token ids"),
        ({"rope_parameters": 3}, "rope_parameters is 3, must be an object"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: has no factor"),
        ({"tie_word_embeddings": 1}, "must be true or false"),
    ],
)
def test_a_configuration_that_is_broken(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path, CONFIGS["llama"] | change, golden_weights("llama"))
    with pytest.raises(WeightFormatError, match=message) as error:
        load_folder(folder)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("config", "beside", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "", "by gptq, and no"),
        ({"quantization_config": {"quant_method": "fp8"}}, "", "by fp8, and no"),
        ({"quantization_config": {"load_in_4bit": True}}, "", "by bitsandbytes, and no"),
        ({"quantization_config": {"bits": 4}}, "", "by an unknown method"),
        ({"quantization_config": []}, "", "by an unknown method"),
        ({"compression_config": {"format": "dense"}}, "", "by compressed-tensors, and"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "", "by awq, and no"),
        ({"quantization_config": {"quant_method": "exl2"}}, "", "by 'exl2', which"),
        ({}, "hf_quant_config.json", "quant_algo is ''; FP8 and NVFP4 are read"),
        ({}, "quantize_config.json", "quantize_config.json: has no bits"),
    ],
)
def test_quantised_weights_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], beside: str, message: str
) -> None:
    folder = write(tmp_path, CONFIGS["llama"] | config, golden_weights("llama"))
    if beside:
        (folder / beside).write_text("{}")
    with pytest.raises(WeightFormatError, match=message):
        load_folder(folder)


def test_no_config_and_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, CONFIGS["llama"], golden_weights("llama"))
    monkeypatch.setattr(backend, "free_memory_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match="as float32 needs"):
        load_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(WeightFormatError, match=r"has no config\.json; give a folder"):
        load_folder(folder)


def test_yarn_and_partial_rotation() -> None:
    values = CONFIGS["llama"] | {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 5e5,
            "partial_rotary_factor": 0.5,
            "mscale": 0.7,
        }
    }
    rope = layout_of(["LlamaForCausalLM"]).config(HFConfig(values)).layers[0].rope
    assert rope is not None and rope.scaling is not None
    assert (rope.theta, rope.dim) == (5e5, 6)
    assert rope.scaling.kind is RopeScalingKind.YARN
    assert (rope.scaling.factor, rope.scaling.original_context) == (4.0, 4096)
    assert (rope.scaling.mscale, rope.scaling.beta_fast) == (0.7, 32.0)
