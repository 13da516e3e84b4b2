"""StarCoder2: LayerNorm, biases everywhere, a feed-forward without gate."""

from typing import Any

from infer.config import Activation, LayerConfig, ModelConfig, Norm
from infer.models import checkpoint, config_json, gguf_layout
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata


def _blocks(bias: bool) -> dict[str, Any]:
    return dict(
        norm=Norm.LAYER,
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `starcoder2` describes."""
    fields = gguf_layout.common_fields(meta, "starcoder2")
    layer = LayerConfig(
        rope=gguf_layout.rope(meta, "starcoder2", fields["head_dim"]),
        window=gguf_layout.window(meta, "starcoder2"),
    )
    return ModelConfig(
        **fields,
        **_blocks(gguf_layout.has_bias(meta, "attn_q")),
        layers=(layer,) * meta.meta_int("starcoder2.block_count"),
        activation=Activation.GELU_TANH,
    ).validate()


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a StarCoder2 describes."""
    fields = checkpoint.common_fields(
        hf, "starcoder2", tied=True, max_position_embeddings=4096, num_key_value_heads=2
    )
    fields["norm_eps"] = hf.number("norm_epsilon", 1e-5)
    layer = LayerConfig(
        rope=checkpoint.rope_of(hf, fields["head_dim"]), window=hf.window("sliding_window")
    )
    return ModelConfig(
        **fields,
        **_blocks(hf.flag("use_bias", True)),
        layers=(layer,) * checkpoint.num_layers(hf),
        activation=hf.activation("hidden_act", default="gelu_pytorch_tanh"),
    ).validate()


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a StarCoder2 says."""
    return config_json.common(config) | dict(
        norm_epsilon=config_json.shortest(config.norm_eps),
        use_bias=config.mlp_bias,
        sliding_window=config_json.window(config),
    )


_MLP = "model.layers.{i}.mlp."
FAMILY = Family(
    name="starcoder2",
    config=config,
    layer_names=gguf_layout.LAYER_NAMES,
    global_names=gguf_layout.GLOBAL_NAMES,
    hf=Layout(
        architectures=("Starcoder2ForCausalLM",),
        model_types=("starcoder2",),
        config=config_from_hf,
        values=values,
        layer_names=checkpoint.LAYER_NAMES
        | {
            "up": _MLP + "c_fc.weight",
            "up_bias": _MLP + "c_fc.bias",
            "down": _MLP + "c_proj.weight",
            "down_bias": _MLP + "c_proj.bias",
        },
        global_names=checkpoint.GLOBAL_NAMES,
    ),
)
