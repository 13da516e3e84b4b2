"""Mistral and Ministral: Llama with sliding windows, on all layers or by `layer_types`.  Their GGUF
files have the architecture `llama`.
"""

import functools
from collections.abc import Callable
from typing import Any

from infer.config import LayerConfig, ModelConfig
from infer.models import checkpoint, config_json
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family


def config_from_hf(hf: HFConfig, family: str) -> ModelConfig:
    """Return the configuration that the config.json of a Mistral or Ministral describes."""
    # Mistral 7B's first version, whose file says little, is what absent keys mean.
    fields = checkpoint.common_fields(
        hf, family, max_position_embeddings=131_072, num_key_value_heads=8
    )
    rope = checkpoint.rope_of(hf, fields["head_dim"])
    full, sliding = (
        LayerConfig(rope=rope, window=window) for window in (None, hf.window("sliding_window"))
    )
    default = [checkpoint.SLIDING] * checkpoint.num_layers(hf)
    return ModelConfig(
        **fields,
        layers=checkpoint.layers_of(hf, full, sliding, default),
        activation=hf.activation("hidden_act", default="silu"),
    ).validate()


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a Mistral, without a list of layers, says."""
    return config_json.common(config) | dict(sliding_window=config_json.window(config))


def values_by_layer(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a Ministral says."""
    return values(config) | dict(layer_types=config_json.layer_types(config))


def _family(
    name: str, architecture: str, values: Callable[[ModelConfig], dict[str, Any]]
) -> Family:
    return Family(
        name=name,
        written_as="llama",
        hf=Layout(
            architectures=(architecture,),
            model_types=(name,),
            config=functools.partial(config_from_hf, family=name),
            values=values,
            layer_names=checkpoint.LAYER_NAMES,
            global_names=checkpoint.GLOBAL_NAMES,
        ),
    )


MISTRAL = _family("mistral", "MistralForCausalLM", values)
MINISTRAL = _family("ministral", "MinistralForCausalLM", values_by_layer)
