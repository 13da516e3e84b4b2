"""Qwen 2, with biases on q, k and v, and Qwen 3, with a norm on each head of q and k instead."""

import functools
from typing import Any

from infer.config import LayerConfig, ModelConfig, QkNorm
from infer.models import checkpoint, config_json, gguf_layout
from infer.models.checkpoint import FULL, SLIDING, HFConfig, Layout
from infer.models.family import Family, Metadata


def config(meta: Metadata, family: str, qk_norm: QkNorm) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `qwen2` or `qwen3` describes."""
    fields = gguf_layout.common_fields(meta, family)
    full = LayerConfig(rope=gguf_layout.rope(meta, family, fields["head_dim"]))
    layers = (full,) * meta.meta_int(f"{family}.block_count")
    # Converters may note the window of a model that does not use it: it counts with a pattern only.
    if f"{family}.attention.sliding_window_pattern" in meta.metadata:
        sliding = LayerConfig(rope=full.rope, window=gguf_layout.window(meta, family))
        layers = gguf_layout.layers(meta, family, full, sliding)
    return ModelConfig(
        **fields,
        layers=layers,
        qkv_bias=gguf_layout.has_bias(meta, "attn_q"),
        qk_norm=qk_norm,
    ).validate()


def config_from_hf(hf: HFConfig, family: str, qk_norm: QkNorm) -> ModelConfig:
    """Return the configuration that the config.json of a Qwen 2 or Qwen 3 describes."""
    is_3 = qk_norm is QkNorm.HEAD
    defaults: dict[str, Any] = dict(head_dim=128) if is_3 else {}
    fields = checkpoint.common_fields(hf, family, max_position_embeddings=32768, **defaults)
    rope = checkpoint.rope_of(hf, fields["head_dim"])
    slides = hf.flag("use_sliding_window", False)
    # The first max_window_layers are full, the window is for those after them.
    first = hf.integer("max_window_layers", 28) if slides else 1 << 30
    default = [SLIDING if i >= first else FULL for i in range(checkpoint.num_layers(hf))]
    window = hf.window("sliding_window", 4096) if slides else None
    layers = checkpoint.layers_of(
        hf, LayerConfig(rope=rope), LayerConfig(rope=rope, window=window), default
    )
    bias = hf.flag("attention_bias", False) if is_3 else True
    return ModelConfig(
        **fields,
        layers=layers,
        activation=hf.activation("hidden_act", default="silu"),
        qkv_bias=bias,
        o_bias=bias and is_3,
        qk_norm=qk_norm,
    ).validate()


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a Qwen 2 or Qwen 3 says."""
    window = config_json.window(config)
    return config_json.common(config) | dict(
        attention_bias=config.qkv_bias,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=config.num_layers if window is None else 0,
        layer_types=config_json.layer_types(config),
    )


def _family(name: str, architecture: str, qk_norm: QkNorm) -> Family:
    return Family(
        name=name,
        config=functools.partial(config, family=name, qk_norm=qk_norm),
        layer_names=gguf_layout.LAYER_NAMES,
        global_names=gguf_layout.GLOBAL_NAMES,
        hf=Layout(
            architectures=(architecture,),
            model_types=(name,),
            config=functools.partial(config_from_hf, family=name, qk_norm=qk_norm),
            values=values,
            layer_names=checkpoint.LAYER_NAMES,
            global_names=checkpoint.GLOBAL_NAMES,
        ),
    )


QWEN2 = _family("qwen2", "Qwen2ForCausalLM", QkNorm.NONE)
QWEN3 = _family("qwen3", "Qwen3ForCausalLM", QkNorm.HEAD)
