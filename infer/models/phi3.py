"""Phi-3, Phi-4 and Phi-4-mini: q, k, v in one tensor, gate and up in another, LongRoPE, and in
Phi-4-mini a rotation of a part of each head.
"""

from typing import Any

from infer.config import LayerConfig, ModelConfig
from infer.models import checkpoint, config_json, gguf_layout
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata
from infer.models.rows import stacked


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `phi3` describes."""
    fields = gguf_layout.common_fields(meta, "phi3")
    rope = gguf_layout.rope(meta, "phi3", fields["head_dim"])
    layer = LayerConfig(rope=rope, window=gguf_layout.window(meta, "phi3"))
    return ModelConfig(**fields, layers=(layer,) * meta.meta_int("phi3.block_count")).validate()


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a Phi-3 or Phi-4 describes."""
    fields = checkpoint.common_fields(hf, "phi3", max_position_embeddings=4096)
    layer = LayerConfig(
        rope=checkpoint.rope_of(hf, fields["head_dim"]), window=hf.window("sliding_window")
    )
    return ModelConfig(
        **fields,
        layers=(layer,) * checkpoint.num_layers(hf),
        activation=hf.activation("hidden_act", default="silu"),
    ).validate()


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a Phi-3 or Phi-4 says."""
    return config_json.common(config) | dict(sliding_window=config_json.window(config))


FAMILY = Family(
    name="phi3",
    config=config,
    layer_names=gguf_layout.LAYER_NAMES | gguf_layout.QKV | gguf_layout.GATE_UP,
    global_names=gguf_layout.GLOBAL_NAMES,
    hf=Layout(
        architectures=("Phi3ForCausalLM",),
        model_types=("phi3",),
        config=config_from_hf,
        values=values,
        layer_names=checkpoint.LAYER_NAMES
        | stacked(checkpoint.QKV_NAME, "q", "k", "v")
        | stacked(checkpoint.GATE_UP_NAME, "gate", "up"),
        global_names=checkpoint.GLOBAL_NAMES,
    ),
)
