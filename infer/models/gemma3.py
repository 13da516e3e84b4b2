"""Gemma 3 (text): scaled embeddings, q/k norms, norms on both sides of each block, five sliding
layers to one full.

The two kinds of layer have rotary tables of their own: a frequency scaling applies to the full ones
only.  GGUF stores norm weights with the +1 that Gemma's (1 + w) asks for already added.
"""

import math
from collections.abc import Collection

from infer.config import Activation, LayerConfig, ModelConfig, QkNorm, RopeConfig
from infer.models import gemma, gguf_layout, hf_layout
from infer.models.family import Family, HfConfig, Layout, Metadata

# The 27B model alone scales queries by its hidden size per head; GGUF tells the sizes apart by
# their layers.
_LAYERS_OF_27B = 62


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `gemma3` describes."""
    fields = gguf_layout.common_fields(meta, "gemma3")
    full = LayerConfig(
        rope=RopeConfig(
            theta=meta.meta_float("gemma3.rope.freq_base", 1e6),
            scaling=gguf_layout.rope_scaling(meta, "gemma3"),
        )
    )
    sliding = LayerConfig(
        rope=RopeConfig(theta=meta.meta_float("gemma3.rope.freq_base_swa", 1e4)),
        window=gguf_layout.window(meta, "gemma3"),
    )
    hidden, num_heads = fields["hidden_size"], fields["num_heads"]
    layers = gguf_layout.layers(meta, "gemma3", full, sliding, default_period=6)
    return ModelConfig(
        **fields,
        layers=layers,
        activation=Activation.GELU_TANH,
        embedding_scale=math.sqrt(hidden),
        query_scale=(hidden // num_heads) ** -0.5 if len(layers) == _LAYERS_OF_27B else None,
        qk_norm=QkNorm.HEAD,
        post_norms=True,
        final_softcap=meta.meta_float("gemma3.final_logit_softcapping", 0.0) or None,
    ).validate()


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `gemma3_text`."""
    fields = hf_layout.common_fields(hf, tensors)
    fields["activation"] = Activation.GELU_TANH
    head_dim = fields["head_dim"]
    nested = "full_attention" in (hf.get("rope_parameters") or {})
    local = RopeConfig(theta=float(hf.get("rope_local_base_freq", 1e4)))
    sliding = LayerConfig(
        rope=hf_layout.rope(hf, head_dim, layer_type="sliding_attention") if nested else local,
        window=hf.get("sliding_window", 4096),
    )
    full = LayerConfig(
        rope=hf_layout.rope(
            hf if nested or "rope_theta" in hf else {**hf, "rope_theta": 1e6},
            head_dim,
            layer_type="full_attention",
        )
    )
    pattern = hf_layout.every(
        hf_layout.integer(hf, "num_hidden_layers"), hf.get("sliding_window_pattern", 6)
    )
    return ModelConfig(
        **fields,
        layers=hf_layout.layers(hf, full, sliding, pattern),
        embedding_scale=math.sqrt(fields["hidden_size"]),
        query_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
        qk_norm=QkNorm.HEAD,
        post_norms=True,
        attn_softcap=hf.get("attn_logit_softcapping"),
        final_softcap=hf.get("final_logit_softcapping"),
    ).validate()


def layer_pattern(
    full: LayerConfig, sliding: LayerConfig, num_layers: int, pattern: int
) -> tuple[LayerConfig, ...]:
    """Return the layers: every `pattern`-th one is full, counting from one; the others slide."""
    return tuple(full if (i + 1) % pattern == 0 else sliding for i in range(num_layers))


FAMILY = Family(
    name="gemma3",
    config=config,
    gguf=Layout(layer_names=gguf_layout.LAYER_NAMES, global_names=gguf_layout.GLOBAL_NAMES),
    model_types=("gemma3_text",),
    config_from_hf=config_from_hf,
    hf=gemma.GEMMA2.hf,
)
