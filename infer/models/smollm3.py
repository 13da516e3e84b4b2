"""SmolLM3: Llama in which every fourth layer turns nothing (NoPE)."""

from collections.abc import Collection

from infer.config import LayerConfig, ModelConfig
from infer.models import gguf_layout, hf_layout, llama
from infer.models.family import Family, HfConfig, Metadata

# GGUF has no key for it.
_PERIOD = 4


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `smollm3` describes."""
    fields = gguf_layout.common_fields(meta, "smollm3")
    turned = LayerConfig(rope=gguf_layout.rope(meta, "smollm3", fields["head_dim"]))
    plain = LayerConfig(rope=None)
    num_layers = meta.meta_int("smollm3.block_count")
    return ModelConfig(
        **fields,
        layers=tuple(plain if (i + 1) % _PERIOD == 0 else turned for i in range(num_layers)),
        qkv_bias=gguf_layout.has_bias(meta, "attn_q"),
        o_bias=gguf_layout.has_bias(meta, "attn_output"),
        mlp_bias=gguf_layout.has_bias(meta, "ffn_up"),
    ).validate()


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `smollm3`."""
    fields = hf_layout.common_fields(hf, tensors)
    rope = hf_layout.rope(hf, fields["head_dim"])
    num_layers = hf_layout.integer(hf, "num_hidden_layers")
    period = hf.get("no_rope_layer_interval", _PERIOD)
    # In spite of its name: 1 where a layer turns.
    turns = hf.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(num_layers)]
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    default = ["full_attention" if turn else "sliding_attention" for turn in turns]
    windows = hf_layout.layers(hf, LayerConfig(), LayerConfig(window=window), default)
    return ModelConfig(
        **fields,
        layers=tuple(
            LayerConfig(rope=rope if turn else None, window=layer.window)
            for turn, layer in zip(turns, windows, strict=True)
        ),
        qkv_bias=hf.get("attention_bias", False),
        o_bias=hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
    ).validate()


FAMILY = Family(
    name="smollm3",
    config=config,
    gguf=llama.FAMILY.gguf,
    model_types=("smollm3",),
    config_from_hf=config_from_hf,
    hf=llama.HF,
)
