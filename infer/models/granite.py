"""Granite: Llama with a factor on the embeddings, on attention scores, on what each block adds, and
on the logits.
"""

from collections.abc import Collection

from infer.config import LayerConfig, ModelConfig
from infer.models import gguf_layout, hf_layout, llama
from infer.models.family import Family, HfConfig, Metadata


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
        layers=(layer,) * meta.meta_int("granite.block_count"),
        qkv_bias=gguf_layout.has_bias(meta, "attn_q"),
        o_bias=gguf_layout.has_bias(meta, "attn_output"),
        mlp_bias=gguf_layout.has_bias(meta, "ffn_up"),
        embedding_scale=factor("embedding_scale"),
        query_scale=factor("attention.scale"),
        residual_scale=factor("residual_scale"),
        logit_scale=None if divisor is None else 1 / divisor,
    ).validate()


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `granite`."""
    fields = hf_layout.common_fields(hf, tensors)
    layer = LayerConfig(rope=hf_layout.rope(hf, fields["head_dim"]))
    return ModelConfig(
        **fields,
        layers=hf_layout.layers(hf, layer, layer),
        qkv_bias=hf.get("attention_bias", False),
        o_bias=hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
        embedding_scale=hf.get("embedding_multiplier", 1.0),
        query_scale=hf.get("attention_multiplier", 1.0),
        residual_scale=hf.get("residual_multiplier", 1.0),
        logit_scale=1 / hf.get("logits_scaling", 1.0),
    ).validate()


FAMILY = Family(
    name="granite",
    config=config,
    gguf=llama.FAMILY.gguf,
    model_types=("granite",),
    config_from_hf=config_from_hf,
    hf=llama.HF,
)
