"""GLM-4: half of each head turns, in adjacent pairs; norms on both sides of each block; gate and up
in one tensor.
"""

from collections.abc import Collection

from infer.config import LayerConfig, ModelConfig
from infer.models import gguf_layout, hf_layout
from infer.models.family import Family, HfConfig, Layout, Metadata


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


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `glm4`."""
    fields = hf_layout.common_fields(hf, tensors)
    layer = LayerConfig(rope=hf_layout.rope(hf, fields["head_dim"], partial=0.5))
    return ModelConfig(
        **fields,
        layers=hf_layout.layers(hf, layer, layer),
        qkv_bias=hf.get("attention_bias", True),
        post_norms=True,
    ).validate()


_LAYER = "model.layers.{i}."
FAMILY = Family(
    name="glm4",
    config=config,
    gguf=Layout(
        layer_names=gguf_layout.LAYER_NAMES | gguf_layout.FUSED_GATE_NAMES,
        global_names=gguf_layout.GLOBAL_NAMES,
        fused=gguf_layout.FUSED_GATE,
        adjacent_pairs=True,
    ),
    model_types=("glm4",),
    config_from_hf=config_from_hf,
    hf=Layout(
        layer_names=hf_layout.LAYER_NAMES
        | hf_layout.FUSED_GATE_NAMES
        | {
            "post_attn_norm": _LAYER + "post_self_attn_layernorm.weight",
            "post_mlp_norm": _LAYER + "post_mlp_layernorm.weight",
        },
        global_names=hf_layout.GLOBAL_NAMES,
        fused=hf_layout.FUSED_GATE,
        adjacent_pairs=True,
        ignored=hf_layout.IGNORED,
    ),
)
