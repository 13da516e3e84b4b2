"""Qwen 2, with biases on q, k and v, and Qwen 3, with a norm on each head of q and k instead."""

import dataclasses
import functools
from collections.abc import Collection

from infer.config import LayerConfig, ModelConfig, QkNorm
from infer.models import gguf_layout, hf_layout, llama
from infer.models.family import Family, HfConfig, Layout, Metadata


def config(meta: Metadata, arch: str, qk_norm: QkNorm) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `qwen2` or `qwen3` describes."""
    fields = gguf_layout.common_fields(meta, arch)
    full = LayerConfig(rope=gguf_layout.rope(meta, arch, fields["head_dim"]))
    return ModelConfig(
        **fields,
        layers=(full,) * meta.meta_int(f"{arch}.block_count"),
        qkv_bias=gguf_layout.has_bias(meta, "attn_q"),
        qk_norm=qk_norm,
    ).validate()


def config_from_hf(hf: HfConfig, tensors: Collection[str], qk_norm: QkNorm) -> ModelConfig:
    """Return the configuration of a folder whose model type is `qwen2` or `qwen3`."""
    fields = hf_layout.common_fields(hf, tensors)
    rope = hf_layout.rope(hf, fields["head_dim"])
    num_layers = hf_layout.integer(hf, "num_hidden_layers")
    # The first max_window_layers are full, the window is for those after them.
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers", 28)
    by_index = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    sliding = LayerConfig(rope=rope, window=window)
    bias = True if qk_norm is QkNorm.NONE else hf.get("attention_bias", False)
    return ModelConfig(
        **fields,
        layers=hf_layout.layers(hf, LayerConfig(rope=rope), sliding, by_index),
        qkv_bias=bias,
        o_bias=False if qk_norm is QkNorm.NONE else bias,
        qk_norm=qk_norm,
    ).validate()


QWEN2 = Family(
    name="qwen2",
    config=functools.partial(config, arch="qwen2", qk_norm=QkNorm.NONE),
    gguf=Layout(layer_names=gguf_layout.LAYER_NAMES, global_names=gguf_layout.GLOBAL_NAMES),
    model_types=("qwen2",),
    config_from_hf=functools.partial(config_from_hf, qk_norm=QkNorm.NONE),
    hf=llama.HF,
)

QWEN3 = dataclasses.replace(
    QWEN2,
    name="qwen3",
    config=functools.partial(config, arch="qwen3", qk_norm=QkNorm.HEAD),
    model_types=("qwen3",),
    config_from_hf=functools.partial(config_from_hf, qk_norm=QkNorm.HEAD),
)
