"""Gemma 1 and 2: scaled embeddings, norms that compute with 1 + w; Gemma 2 adds norms after each
block, two softcaps, and a window on every other layer.

GGUF stores norm weights with the one already added.
"""

import math
from collections.abc import Collection
from typing import Any

from infer.config import Activation, LayerConfig, ModelConfig
from infer.models import gguf_layout, hf_layout
from infer.models.family import Family, HfConfig, Layout, Metadata

# The 27B model alone scales queries by its hidden size per head; GGUF tells the sizes apart by
# their layers.
_LAYERS_OF_27B = 46


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `gemma` describes."""
    fields = gguf_layout.common_fields(meta, "gemma")
    full = LayerConfig(rope=gguf_layout.rope(meta, "gemma", fields["head_dim"]))
    num_layers = meta.meta_int("gemma.block_count")
    return ModelConfig(
        **fields, **_gemma(fields["hidden_size"]), layers=(full,) * num_layers
    ).validate()


def config_2(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `gemma2` describes."""
    fields = gguf_layout.common_fields(meta, "gemma2")
    rope = gguf_layout.rope(meta, "gemma2", fields["head_dim"])
    hidden, num_heads = fields["hidden_size"], fields["num_heads"]
    window = gguf_layout.window(meta, "gemma2") or 4096
    full, sliding = LayerConfig(rope=rope), LayerConfig(rope=rope, window=window)
    layers = gguf_layout.layers(meta, "gemma2", full, sliding, default_period=2)
    return ModelConfig(
        **fields,
        **_gemma(hidden),
        layers=layers,
        query_scale=(hidden // num_heads) ** -0.5 if len(layers) == _LAYERS_OF_27B else None,
        post_norms=True,
        attn_softcap=meta.meta_float("gemma2.attn_logit_softcapping", 50.0) or None,
        final_softcap=meta.meta_float("gemma2.final_logit_softcapping", 30.0) or None,
    ).validate()


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `gemma`."""
    fields = hf_layout.common_fields(hf, tensors)
    full = LayerConfig(rope=hf_layout.rope(hf, fields["head_dim"]))
    return ModelConfig(
        **(fields | _gemma(fields["hidden_size"])), layers=hf_layout.layers(hf, full, full)
    ).validate()


def config_2_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `gemma2`."""
    fields = hf_layout.common_fields(hf, tensors)
    rope = hf_layout.rope(hf, fields["head_dim"])
    alternate = hf_layout.every(hf_layout.integer(hf, "num_hidden_layers"), 2)
    sliding = LayerConfig(rope=rope, window=hf.get("sliding_window", 4096))
    return ModelConfig(
        **(fields | _gemma(fields["hidden_size"])),
        layers=hf_layout.layers(hf, LayerConfig(rope=rope), sliding, alternate),
        query_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
        post_norms=True,
        attn_softcap=hf.get("attn_logit_softcapping", 50.0),
        final_softcap=hf.get("final_logit_softcapping", 30.0),
    ).validate()


def _gemma(hidden: int) -> dict[str, Any]:
    # Whatever config.json calls the activation: the first files say "gelu" and mean the tanh form.
    return dict(activation=Activation.GELU_TANH, embedding_scale=math.sqrt(hidden))


_GGUF = Layout(layer_names=gguf_layout.LAYER_NAMES, global_names=gguf_layout.GLOBAL_NAMES)

GEMMA = Family(
    name="gemma",
    config=config,
    gguf=_GGUF,
    model_types=("gemma",),
    config_from_hf=config_from_hf,
    hf=Layout(
        layer_names=hf_layout.LAYER_NAMES,
        global_names=hf_layout.GLOBAL_NAMES,
        norm_offset=1.0,
        ignored=hf_layout.IGNORED,
    ),
)

GEMMA2 = Family(
    name="gemma2",
    config=config_2,
    gguf=_GGUF,
    model_types=("gemma2",),
    config_from_hf=config_2_from_hf,
    hf=Layout(
        layer_names=hf_layout.LAYER_NAMES | hf_layout.SANDWICH_NAMES,
        global_names=hf_layout.GLOBAL_NAMES,
        norm_offset=1.0,
        ignored=hf_layout.IGNORED,
    ),
)
