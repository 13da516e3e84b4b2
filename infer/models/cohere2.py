"""Command R7B (Cohere 2): attention and feed-forward side by side after one LayerNorm without bias;
three sliding layers that turn adjacent pairs to one full layer that turns nothing.
"""

from typing import Any

from infer.config import LayerConfig, ModelConfig, Norm, Residual
from infer.models import checkpoint, config_json, gguf_layout
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata
from infer.models.rows import adjacent_pairs

_PERIOD = 4
_BLOCKS: dict[str, Any] = dict(norm=Norm.LAYER, residual=Residual.PARALLEL_ONE_NORM)


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `cohere2` describes."""
    fields = gguf_layout.common_fields(meta, "cohere2")
    sliding = LayerConfig(
        rope=gguf_layout.rope(meta, "cohere2", fields["head_dim"]),
        window=gguf_layout.window(meta, "cohere2"),
    )
    full = LayerConfig(rope=None)
    return ModelConfig(
        **fields,
        **_BLOCKS,
        layers=gguf_layout.layers(meta, "cohere2", full, sliding, _PERIOD),
        logit_scale=meta.meta_float("cohere2.logit_scale"),
    ).validate()


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a Cohere 2 describes."""
    fields = checkpoint.common_fields(hf, "cohere2", tied=True, max_position_embeddings=8192)
    fields["norm_eps"] = hf.number("layer_norm_eps", 1e-5)
    sliding = LayerConfig(
        rope=checkpoint.rope_of(hf, fields["head_dim"]),
        window=hf.window("sliding_window", 4096),
    )
    pattern = checkpoint.every(
        checkpoint.num_layers(hf), hf.integer("sliding_window_pattern", _PERIOD)
    )
    bias = hf.flag("attention_bias", False)
    return ModelConfig(
        **fields,
        **_BLOCKS,
        layers=checkpoint.layers_of(hf, LayerConfig(rope=None), sliding, pattern),
        activation=hf.activation("hidden_act", default="silu"),
        qkv_bias=bias,
        o_bias=bias,
        logit_scale=hf.number("logit_scale", 0.0625),
    ).validate()


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a Cohere 2 says."""
    return config_json.common(config) | dict(
        layer_norm_eps=config_json.shortest(config.norm_eps),
        attention_bias=config.qkv_bias,
        sliding_window=config_json.window(config),
        layer_types=config_json.layer_types(config),
        logit_scale=config_json.scale(config.logit_scale),
    )


def own_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the factor on logits, which is required."""
    return {"logit_scale": config_json.scale(config.logit_scale)}


FAMILY = Family(
    name="cohere2",
    config=config,
    layer_names=gguf_layout.LAYER_NAMES | adjacent_pairs(gguf_layout.LAYER_NAMES),
    global_names=gguf_layout.GLOBAL_NAMES,
    own_keys=own_keys,
    hf=Layout(
        architectures=("Cohere2ForCausalLM",),
        model_types=("cohere2",),
        config=config_from_hf,
        values=values,
        layer_names=checkpoint.LAYER_NAMES | adjacent_pairs(checkpoint.LAYER_NAMES),
        global_names=checkpoint.GLOBAL_NAMES,
    ),
)
