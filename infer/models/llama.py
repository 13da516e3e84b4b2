"""The Llama family: Llama 1 to 3.x, SmolLM2, TinyLlama, and what else comes in Llama's layout;
Mistral's GGUF files too.
"""

from typing import Any

from infer.config import LayerConfig, ModelConfig
from infer.errors import ConfigError
from infer.models import checkpoint, config_json, gguf_layout
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata
from infer.models.rows import adjacent_pairs


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `llama` describes."""
    if experts := meta.meta_int("llama.expert_count", 0):
        raise ConfigError(
            f"llama with {experts} experts is a mixture of experts, which this version does not run"
        )
    fields = gguf_layout.common_fields(meta, "llama")
    rope = gguf_layout.rope(meta, "llama", fields["head_dim"])
    sliding = LayerConfig(rope=rope, window=gguf_layout.window(meta, "llama"))
    return ModelConfig(
        **fields,
        **biases(meta),
        layers=gguf_layout.layers(meta, "llama", LayerConfig(rope=rope), sliding),
    ).validate()


def biases(meta: Metadata) -> dict[str, Any]:
    """Return which of a Llama's products have a bias, by the tensors of its first layer."""
    return dict(
        qkv_bias=gguf_layout.has_bias(meta, "attn_q"),
        o_bias=gguf_layout.has_bias(meta, "attn_output"),
        mlp_bias=gguf_layout.has_bias(meta, "ffn_up"),
    )


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a LlamaForCausalLM describes."""
    fields = checkpoint.common_fields(hf, "llama", max_position_embeddings=2048)
    rope = checkpoint.rope_of(hf, fields["head_dim"])
    return ModelConfig(
        **fields,
        **biases_of_hf(hf),
        layers=(LayerConfig(rope=rope),) * checkpoint.num_layers(hf),
        activation=hf.activation("hidden_act", default="silu"),
    ).validate()


def biases_of_hf(hf: HFConfig) -> dict[str, Any]:
    """Return which of a Llama's products have a bias, as config.json says."""
    attention = hf.flag("attention_bias", False)
    return dict(qkv_bias=attention, o_bias=attention, mlp_bias=hf.flag("mlp_bias", False))


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a LlamaForCausalLM says."""
    return config_json.common(config) | bias_values(config)


def bias_values(config: ModelConfig) -> dict[str, Any]:
    """Return a Llama's two keys of biases."""
    return dict(attention_bias=config.qkv_bias, mlp_bias=config.mlp_bias)


# Of all families that converters permute like Llama.
GGUF_LAYER_NAMES = gguf_layout.LAYER_NAMES | adjacent_pairs(gguf_layout.LAYER_NAMES)

FAMILY = Family(
    name="llama",
    config=config,
    layer_names=GGUF_LAYER_NAMES,
    global_names=gguf_layout.GLOBAL_NAMES,
    hf=Layout(
        architectures=("LlamaForCausalLM",),
        model_types=("llama",),
        config=config_from_hf,
        values=values,
        layer_names=checkpoint.LAYER_NAMES,
        global_names=checkpoint.GLOBAL_NAMES,
    ),
)
