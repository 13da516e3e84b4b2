"""Granite: Llama with a factor on the embeddings, on attention scores, on what each block adds, and
on the logits.
"""

from infer.config import LayerConfig, ModelConfig
from infer.models import checkpoint, gguf_layout, llama
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


FAMILY = Family(
    name="granite",
    config=config,
    layer_names=llama.GGUF_LAYER_NAMES,
    global_names=gguf_layout.GLOBAL_NAMES,
    hf=Layout(
        architectures=("GraniteForCausalLM",),
        model_types=("granite",),
        config=config_from_hf,
        layer_names=checkpoint.LAYER_NAMES,
        global_names=checkpoint.GLOBAL_NAMES,
    ),
)
