"""Command R7B (Cohere 2): attention and feed-forward side by side after one LayerNorm without bias;
three sliding layers that turn adjacent pairs to one full layer that turns nothing.
"""

from collections.abc import Collection
from typing import Any

from infer.config import LayerConfig, ModelConfig, Norm, Residual
from infer.models import gguf_layout, hf_layout
from infer.models.family import Family, HfConfig, Layout, Metadata

_PERIOD = 4
_BLOCKS: dict[str, Any] = dict(norm=Norm.LAYER, residual=Residual.PARALLEL_ONE_NORM)


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `cohere2` describes."""
    fields = gguf_layout.common_fields(meta, "cohere2")
    sliding = LayerConfig(
        rope=gguf_layout.rope(meta, "cohere2", fields["head_dim"]),
        window=gguf_layout.window(meta, "cohere2"),
    )
    full = LayerConfig(rope=None)
    return ModelConfig(
        **fields,
        **_BLOCKS,
        layers=gguf_layout.layers(meta, "cohere2", full, sliding, _PERIOD),
        logit_scale=meta.meta_float("cohere2.logit_scale"),
    ).validate()


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `cohere2`."""
    fields = hf_layout.common_fields(hf, tensors)
    fields["norm_eps"] = hf.get("layer_norm_eps", 1e-5)
    sliding = LayerConfig(
        rope=hf_layout.rope(hf, fields["head_dim"]), window=hf.get("sliding_window", 4096)
    )
    pattern = hf_layout.every(
        hf_layout.integer(hf, "num_hidden_layers"), hf.get("sliding_window_pattern", _PERIOD)
    )
    return ModelConfig(
        **fields,
        **_BLOCKS,
        layers=hf_layout.layers(hf, LayerConfig(rope=None), sliding, pattern),
        qkv_bias=hf.get("attention_bias", False),
        o_bias=hf.get("attention_bias", False),
        logit_scale=hf.get("logit_scale", 0.0625),
    ).validate()


FAMILY = Family(
    name="cohere2",
    config=config,
    gguf=Layout(
        layer_names=gguf_layout.LAYER_NAMES,
        global_names=gguf_layout.GLOBAL_NAMES,
        adjacent_pairs=True,
    ),
    model_types=("cohere2",),
    config_from_hf=config_from_hf,
    hf=Layout(
        layer_names=hf_layout.LAYER_NAMES,
        global_names=hf_layout.GLOBAL_NAMES,
        adjacent_pairs=True,
        ignored=hf_layout.IGNORED,
    ),
)
