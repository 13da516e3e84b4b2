"""Gemma 3 (text): scaled embeddings, q/k norms, norms on both sides of each block, five sliding
layers to one full.

The two kinds of layer have rotary tables of their own: a frequency scaling applies to the full ones
only.  GGUF stores norm weights with the +1 that Gemma's (1 + w) asks for already added;
transformers' checkpoints do not.
"""

import math
from typing import Any

from infer.config import Activation, LayerConfig, ModelConfig, QkNorm, RopeConfig
from infer.errors import ConfigError
from infer.models import checkpoint, config_json, gemma, gguf_layout
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata

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


def layer_pattern(
    full: LayerConfig, sliding: LayerConfig, num_layers: int, pattern: int
) -> tuple[LayerConfig, ...]:
    """Return the layers: every `pattern`-th one is full, counting from one; the others slide."""
    return tuple(full if (i + 1) % pattern == 0 else sliding for i in range(num_layers))


# What an absent key means: the defaults of transformers' Gemma3TextConfig, on which the published
# multimodal checkpoints rely.
_DEFAULTS = dict(
    vocab_size=262_208,
    hidden_size=2304,
    intermediate_size=9216,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131_072,
)
_NUM_LAYERS, _WINDOW, _PATTERN = 26, 4096, 6


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that a Gemma 3 config.json describes; of a multimodal one, the text
    model's.
    """
    text = hf.section("text_config") or hf
    text.refuse("attention_bias")
    text.refuse("use_bidirectional_attention")
    tied = hf.flag("tie_word_embeddings", True)
    fields = checkpoint.common_fields(text, "gemma3", tied=tied, **_DEFAULTS)
    if text is not hf:  # a multimodal file has the ids outside
        fields |= {"bos_id": next(iter(hf.ids("bos_token_id")), fields["bos_id"])}
        fields |= {"eos_ids": hf.ids("eos_token_id") or fields["eos_ids"]}
    full = LayerConfig(
        rope=checkpoint.rope_of(text, fields["head_dim"], layer_type="full_attention", theta=1e6)
    )
    sliding = LayerConfig(
        rope=checkpoint.rope_of(
            text,
            fields["head_dim"],
            layer_type="sliding_attention",
            theta=1e4,
            theta_key="rope_local_base_freq",
            scaled=False,
        ),
        window=text.integer("sliding_window", _WINDOW),
    )
    scalar = text.number("query_pre_attn_scalar", 256.0)
    return ModelConfig(
        **fields,
        layers=_layers_of_hf(text, full, sliding),
        activation=text.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        embedding_scale=math.sqrt(fields["hidden_size"]),
        query_scale=scalar**-0.5 if scalar > 0 else None,
        qk_norm=QkNorm.HEAD,
        post_norms=True,
        attn_softcap=text.number("attn_logit_softcapping", None),
        final_softcap=text.number("final_logit_softcapping", None),
    ).validate()


def _layers_of_hf(
    text: HFConfig, full: LayerConfig, sliding: LayerConfig
) -> tuple[LayerConfig, ...]:
    """Return the layers, by `layer_types` or by the older `sliding_window_pattern`."""
    count = checkpoint.num_layers(text, _NUM_LAYERS)
    types = text.texts("layer_types")
    if not types:
        pattern = text.integer("sliding_window_pattern", _PATTERN)
        if pattern < 1:
            raise ConfigError(
                f"{text.where}: sliding_window_pattern is {pattern}, must be at least 1"
            )
        return layer_pattern(full, sliding, count, pattern)
    kinds = {"full_attention": full, "sliding_attention": sliding}
    if len(types) != count or set(types) - set(kinds):
        raise ConfigError(
            f"{text.where}: layer_types has {len(types)} entries of {sorted(set(types))}; must be"
            f" {count} of {sorted(kinds)}"
        )
    return tuple(kinds[kind] for kind in types)


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a Gemma 3 text model says."""
    local = _local_rope(config)
    base = {} if local is None else dict(rope_local_base_freq=config_json.shortest(local.theta))
    return gemma.values_2(config) | base


def own_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the rotary base of the layers that slide."""
    local = _local_rope(config)
    return {} if local is None else {"rope.freq_base_swa": float(local.theta)}


def _local_rope(config: ModelConfig) -> RopeConfig | None:
    return next((layer.rope for layer in config.layers if layer.window is not None), None)


FAMILY = Family(
    name="gemma3",
    config=config,
    layer_names=gguf_layout.LAYER_NAMES,
    global_names=gguf_layout.GLOBAL_NAMES,
    own_keys=own_keys,
    hf=Layout(
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        model_types=("gemma3_text", "gemma3"),
        config=config_from_hf,
        values=values,
        layer_names=checkpoint.LAYER_NAMES
        | {
            "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
            "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
            "post_attn_norm": "model.layers.{i}.post_attention_layernorm.weight",
            "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
            "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
        },
        global_names=checkpoint.GLOBAL_NAMES,
        prefixes={
            # The multimodal checkpoints as published, and as transformers 5 writes them.
            "language_model.": "",
            "model.language_model.": "model.",
            "vision_tower.": None,
            "multi_modal_projector.": None,
            "model.vision_tower.": None,
            "model.multi_modal_projector.": None,
        },
        norm_plus_one=True,
    ),
)
