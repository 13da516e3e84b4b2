"""OLMo 2: norms only after each block, and on the full width of q and k."""

from collections.abc import Collection
from typing import Any

from infer.config import LayerConfig, ModelConfig, QkNorm
from infer.errors import ConfigError
from infer.models import gguf_layout, hf_layout
from infer.models.family import Family, HfConfig, Layout, Metadata

_NORMS: dict[str, Any] = dict(pre_norms=False, post_norms=True, qk_norm=QkNorm.FULL)


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `olmo2` describes."""
    if gguf_layout.window(meta, "olmo2"):
        raise ConfigError("olmo2 with a sliding window is OLMo 3, which this version does not run")
    fields = gguf_layout.common_fields(meta, "olmo2")
    layer = LayerConfig(rope=gguf_layout.rope(meta, "olmo2", fields["head_dim"]))
    num_layers = meta.meta_int("olmo2.block_count")
    return ModelConfig(**fields, **_NORMS, layers=(layer,) * num_layers).validate()


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `olmo2`."""
    fields = hf_layout.common_fields(hf, tensors)
    layer = LayerConfig(rope=hf_layout.rope(hf, fields["head_dim"]))
    return ModelConfig(
        **fields,
        **_NORMS,
        layers=hf_layout.layers(hf, layer, layer),
        qkv_bias=hf.get("attention_bias", False),
        o_bias=hf.get("attention_bias", False),
    ).validate()


FAMILY = Family(
    name="olmo2",
    config=config,
    gguf=Layout(layer_names=gguf_layout.LAYER_NAMES, global_names=gguf_layout.GLOBAL_NAMES),
    model_types=("olmo2",),
    config_from_hf=config_from_hf,
    hf=Layout(
        layer_names=hf_layout.LAYER_NAMES | hf_layout.SANDWICH_NAMES,
        global_names=hf_layout.GLOBAL_NAMES,
        ignored=hf_layout.IGNORED,
    ),
)
