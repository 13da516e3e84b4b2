"""Gemma 1 and 2: scaled embeddings, norms that compute with 1 + w; Gemma 2 adds norms after each
block, two softcaps, and a window on every other layer.

GGUF stores norm weights with the one already added.
"""

import math
from typing import Any

from infer.config import Activation, LayerConfig, ModelConfig
from infer.models import checkpoint, config_json, gguf_layout
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata

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


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a Gemma 1 describes."""
    hf.refuse("attention_bias")
    fields = checkpoint.common_fields(
        hf, "gemma", tied=True, head_dim=256, max_position_embeddings=8192
    )
    full = LayerConfig(rope=checkpoint.rope_of(hf, fields["head_dim"]))
    return ModelConfig(
        **fields,
        **_gemma(fields["hidden_size"]),
        layers=(full,) * checkpoint.num_layers(hf),
    ).validate()


def config_2_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a Gemma 2 describes."""
    hf.refuse("attention_bias")
    fields = checkpoint.common_fields(
        hf, "gemma2", tied=True, head_dim=256, max_position_embeddings=8192
    )
    rope = checkpoint.rope_of(hf, fields["head_dim"])
    full = LayerConfig(rope=rope)
    sliding = LayerConfig(rope=rope, window=hf.window("sliding_window", 4096))
    alternate = checkpoint.every(checkpoint.num_layers(hf), 2)
    return ModelConfig(
        **fields,
        **_gemma(fields["hidden_size"]),
        layers=checkpoint.layers_of(hf, full, sliding, alternate),
        query_scale=hf.number("query_pre_attn_scalar", 256.0) ** -0.5,
        post_norms=True,
        # None in the file is no cap; absent is the published models' cap.
        attn_softcap=hf.number("attn_logit_softcapping", _unless_null(hf, "attn", 50.0)),
        final_softcap=hf.number("final_logit_softcapping", _unless_null(hf, "final", 30.0)),
    ).validate()


def _unless_null(hf: HFConfig, which: str, default: float) -> float | None:
    return None if f"{which}_logit_softcapping" in hf.values else default


def _gemma(hidden: int) -> dict[str, Any]:
    # Whatever config.json calls the activation: the first files say "gelu" and mean the tanh form.
    return dict(activation=Activation.GELU_TANH, embedding_scale=math.sqrt(hidden))


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a Gemma 1 says."""
    common = config_json.common(config)
    return common | dict(hidden_activation=common["hidden_act"])


def values_2(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a Gemma 2 or 3 says of windows, scores and caps."""
    cap = lambda x: None if x is None else config_json.shortest(x)
    scalar = config_json.shortest(config.softmax_scale**-2)
    return values(config) | dict(
        sliding_window=config_json.window(config),
        layer_types=config_json.layer_types(config),
        query_pre_attn_scalar=int(scalar) if scalar.is_integer() else scalar,
        attn_logit_softcapping=cap(config.attn_softcap),
        final_logit_softcapping=cap(config.final_softcap),
    )


GEMMA = Family(
    name="gemma",
    config=config,
    layer_names=gguf_layout.LAYER_NAMES,
    global_names=gguf_layout.GLOBAL_NAMES,
    hf=Layout(
        architectures=("GemmaForCausalLM",),
        model_types=("gemma",),
        config=config_from_hf,
        values=values,
        layer_names=checkpoint.LAYER_NAMES,
        global_names=checkpoint.GLOBAL_NAMES,
        norm_plus_one=True,
    ),
)

GEMMA2 = Family(
    name="gemma2",
    config=config_2,
    layer_names=gguf_layout.LAYER_NAMES,
    global_names=gguf_layout.GLOBAL_NAMES,
    hf=Layout(
        architectures=("Gemma2ForCausalLM",),
        model_types=("gemma2",),
        config=config_2_from_hf,
        values=values_2,
        layer_names=checkpoint.LAYER_NAMES | checkpoint.SANDWICH_NAMES,
        global_names=checkpoint.GLOBAL_NAMES,
        norm_plus_one=True,
    ),
)
