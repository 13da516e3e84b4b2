"""Phi-3, Phi-4 and Phi-4-mini: q, k, v in one tensor, gate and up in another, LongRoPE, and in
Phi-4-mini a rotation of a part of each head.
"""

from collections.abc import Collection

from infer.config import LayerConfig, ModelConfig
from infer.models import gguf_layout, hf_layout
from infer.models.family import Family, HfConfig, Layout, Metadata


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `phi3` describes."""
    fields = gguf_layout.common_fields(meta, "phi3")
    rope = gguf_layout.rope(meta, "phi3", fields["head_dim"])
    layer = LayerConfig(rope=rope, window=gguf_layout.window(meta, "phi3"))
    return ModelConfig(**fields, layers=(layer,) * meta.meta_int("phi3.block_count")).validate()


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `phi3`."""
    fields = hf_layout.common_fields(hf, tensors)
    layer = LayerConfig(
        rope=hf_layout.rope(hf, fields["head_dim"]), window=hf.get("sliding_window")
    )
    return ModelConfig(
        **fields, layers=(layer,) * hf_layout.integer(hf, "num_hidden_layers")
    ).validate()


FAMILY = Family(
    name="phi3",
    config=config,
    gguf=Layout(
        layer_names=gguf_layout.LAYER_NAMES
        | gguf_layout.FUSED_QKV_NAMES
        | gguf_layout.FUSED_GATE_NAMES,
        global_names=gguf_layout.GLOBAL_NAMES,
        fused=gguf_layout.FUSED_QKV | gguf_layout.FUSED_GATE,
    ),
    model_types=("phi3",),
    config_from_hf=config_from_hf,
    hf=Layout(
        layer_names=hf_layout.LAYER_NAMES | hf_layout.FUSED_QKV_NAMES | hf_layout.FUSED_GATE_NAMES,
        global_names=hf_layout.GLOBAL_NAMES,
        fused=hf_layout.FUSED_QKV | hf_layout.FUSED_GATE,
        ignored=hf_layout.IGNORED,
    ),
)
