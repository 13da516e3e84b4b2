"""SmolLM3: Llama in which every fourth layer turns nothing (NoPE)."""

from typing import Any

from infer.config import LayerConfig, ModelConfig
from infer.errors import ConfigError
from infer.models import checkpoint, config_json, gguf_layout, llama
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata

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
        **llama.biases(meta),
        layers=tuple(plain if (i + 1) % _PERIOD == 0 else turned for i in range(num_layers)),
    ).validate()


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a SmolLM3 describes."""
    fields = checkpoint.common_fields(
        hf, "smollm3", tied=True, max_position_embeddings=32768, num_key_value_heads=4
    )
    rope, count = checkpoint.rope_of(hf, fields["head_dim"]), checkpoint.num_layers(hf)
    period = hf.integer("no_rope_layer_interval", _PERIOD)
    # In spite of its name: 1 where a layer turns.
    turns = hf.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(count)]
    if not isinstance(turns, list) or len(turns) != count or set(turns) - {0, 1}:
        raise ConfigError(f"{hf.where}: no_rope_layers must be {count} numbers, 0 or 1")
    window = hf.window("sliding_window") if hf.flag("use_sliding_window", False) else None
    default = [checkpoint.FULL if turn else checkpoint.SLIDING for turn in turns]
    windows = checkpoint.layers_of(hf, LayerConfig(), LayerConfig(window=window), default)
    return ModelConfig(
        **fields,
        **llama.biases_of_hf(hf),
        layers=tuple(
            LayerConfig(rope=rope if turn else None, window=layer.window)
            for turn, layer in zip(turns, windows, strict=True)
        ),
        activation=hf.activation("hidden_act", default="silu"),
    ).validate()


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a SmolLM3 says."""
    window = config_json.window(config)
    return (
        config_json.common(config)
        | llama.bias_values(config)
        | dict(
            no_rope_layers=[int(layer.rope is not None) for layer in config.layers],
            no_rope_layer_interval=_PERIOD,
            use_sliding_window=window is not None,
            sliding_window=window,
            layer_types=config_json.layer_types(config),
        )
    )


FAMILY = Family(
    name="smollm3",
    config=config,
    layer_names=llama.GGUF_LAYER_NAMES,
    global_names=gguf_layout.GLOBAL_NAMES,
    hf=Layout(
        architectures=("SmolLM3ForCausalLM",),
        model_types=("smollm3",),
        config=config_from_hf,
        values=values,
        layer_names=checkpoint.LAYER_NAMES,
        global_names=checkpoint.GLOBAL_NAMES,
    ),
)
