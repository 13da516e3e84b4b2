"""The Llama family: Llama 1 to 3.x, SmolLM2, TinyLlama, and what else comes in Llama's layout;
Mistral's GGUF files too.
"""

from collections.abc import Collection

from infer.config import LayerConfig, ModelConfig
from infer.errors import ConfigError
from infer.models import gguf_layout, hf_layout
from infer.models.family import Family, HfConfig, Layout, Metadata


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
        layers=gguf_layout.layers(meta, "llama", LayerConfig(rope=rope), sliding),
        qkv_bias=gguf_layout.has_bias(meta, "attn_q"),
        o_bias=gguf_layout.has_bias(meta, "attn_output"),
        mlp_bias=gguf_layout.has_bias(meta, "ffn_up"),
    ).validate()


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `llama`."""
    fields = hf_layout.common_fields(hf, tensors)
    full = LayerConfig(rope=hf_layout.rope(hf, fields["head_dim"]))
    return ModelConfig(
        **fields,
        layers=hf_layout.layers(hf, full, full),
        qkv_bias=hf.get("attention_bias", False),
        o_bias=hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
    ).validate()


HF = Layout(
    layer_names=hf_layout.LAYER_NAMES,
    global_names=hf_layout.GLOBAL_NAMES,
    ignored=hf_layout.IGNORED,
)

FAMILY = Family(
    name="llama",
    config=config,
    gguf=Layout(
        layer_names=gguf_layout.LAYER_NAMES,
        global_names=gguf_layout.GLOBAL_NAMES,
        adjacent_pairs=True,
    ),
    model_types=("llama",),
    config_from_hf=config_from_hf,
    hf=HF,
)
