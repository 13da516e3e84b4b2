"""Granite: Llama with a factor on the embeddings, on attention scores, on what each block adds, and
on the logits.
"""

from typing import Any

from infer.config import LayerConfig, ModelConfig
from infer.models import checkpoint, config_json, gguf_layout, llama
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `granite` describes."""
    fields = gguf_layout.common_fields(meta, "granite")
    turns = meta.meta_bool("granite.rope.scaling.finetuned", True)
    rope = gguf_layout.rope(meta, "granite", fields["head_dim"])
    layer = LayerConfig(rope=rope if turns else None)
    factor = lambda key: meta.meta_float(f"granite.{key}", 0.0) or None
    divisor = factor("logit_scale")
    return ModelConfig(
        **fields,
        **llama.biases(meta),
        layers=(layer,) * meta.meta_int("granite.block_count"),
        embedding_scale=factor("embedding_scale"),
        query_scale=factor("attention.scale"),
        residual_scale=factor("residual_scale"),
        logit_scale=None if divisor is None else 1 / divisor,
    ).validate()


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a Granite describes."""
    fields = checkpoint.common_fields(hf, "granite", max_position_embeddings=2048)
    layer = LayerConfig(rope=checkpoint.rope_of(hf, fields["head_dim"]))
    return ModelConfig(
        **fields,
        **llama.biases_of_hf(hf),
        layers=(layer,) * checkpoint.num_layers(hf),
        activation=hf.activation("hidden_act", default="silu"),
        embedding_scale=hf.number("embedding_multiplier", 1.0),
        query_scale=hf.number("attention_multiplier", 1.0),
        residual_scale=hf.number("residual_multiplier", 1.0),
        logit_scale=1 / hf.number("logits_scaling", 1.0),
    ).validate()


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a Granite says."""
    return (
        config_json.common(config)
        | llama.bias_values(config)
        | dict(
            embedding_multiplier=config_json.scale(config.embedding_scale),
            attention_multiplier=config_json.shortest(config.softmax_scale),
            residual_multiplier=config_json.scale(config.residual_scale),
            logits_scaling=config_json.shortest(1 / config_json.scale(config.logit_scale)),
        )
    )


def own_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the four factors as GGUF has them."""
    return {
        "embedding_scale": config_json.scale(config.embedding_scale),
        "attention.scale": float(config.softmax_scale),
        "residual_scale": config_json.scale(config.residual_scale),
        "logit_scale": 1 / config_json.scale(config.logit_scale),
    }


FAMILY = Family(
    name="granite",
    config=config,
    layer_names=llama.GGUF_LAYER_NAMES,
    global_names=gguf_layout.GLOBAL_NAMES,
    own_keys=own_keys,
    hf=Layout(
        architectures=("GraniteForCausalLM",),
        model_types=("granite",),
        config=config_from_hf,
        values=values,
        layer_names=checkpoint.LAYER_NAMES,
        global_names=checkpoint.GLOBAL_NAMES,
    ),
)
