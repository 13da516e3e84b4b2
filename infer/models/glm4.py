"""GLM-4: half of each head turns, in adjacent pairs; norms on both sides of each block; gate and up
in one tensor.
"""

from typing import Any

from infer.config import LayerConfig, ModelConfig
from infer.models import checkpoint, config_json, gguf_layout
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata
from infer.models.rows import adjacent_pairs, stacked


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `glm4` describes."""
    fields = gguf_layout.common_fields(meta, "glm4")
    layer = LayerConfig(rope=gguf_layout.rope(meta, "glm4", fields["head_dim"]))
    return ModelConfig(
        **fields,
        layers=(layer,) * meta.meta_int("glm4.block_count"),
        qkv_bias=gguf_layout.has_bias(meta, "attn_q"),
        post_norms=True,
    ).validate()


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a GLM-4 (0414) describes."""
    fields = checkpoint.common_fields(
        hf, "glm4", head_dim=128, num_key_value_heads=2, max_position_embeddings=131_072
    )
    layer = LayerConfig(rope=checkpoint.rope_of(hf, fields["head_dim"], partial=0.5))
    return ModelConfig(
        **fields,
        layers=(layer,) * checkpoint.num_layers(hf),
        activation=hf.activation("hidden_act", default="silu"),
        qkv_bias=hf.flag("attention_bias", True),
        post_norms=True,
    ).validate()


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a GLM-4 (0414) says."""
    return config_json.common(config) | dict(attention_bias=config.qkv_bias)


FAMILY = Family(
    name="glm4",
    config=config,
    layer_names=gguf_layout.LAYER_NAMES
    | gguf_layout.GATE_UP
    | adjacent_pairs(gguf_layout.LAYER_NAMES),
    global_names=gguf_layout.GLOBAL_NAMES,
    hf=Layout(
        architectures=("Glm4ForCausalLM",),
        model_types=("glm4",),
        config=config_from_hf,
        values=values,
        layer_names=checkpoint.LAYER_NAMES
        | adjacent_pairs(checkpoint.LAYER_NAMES)
        | stacked(checkpoint.GATE_UP_NAME, "gate", "up")
        | {
            "post_attn_norm": "model.layers.{i}.post_self_attn_layernorm.weight",
            "post_mlp_norm": "model.layers.{i}.post_mlp_layernorm.weight",
        },
        global_names=checkpoint.GLOBAL_NAMES,
    ),
)
