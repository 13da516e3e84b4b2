"""Mistral and Ministral: Llama with sliding windows, on all layers or by `layer_types`.  Their GGUF
files have the architecture `llama`.
"""

import functools

from infer.config import LayerConfig, ModelConfig
from infer.models import checkpoint
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


def _family(name: str, architecture: str) -> Family:
    return Family(
        name=name,
        hf=Layout(
            architectures=(architecture,),
            model_types=(name,),
            config=functools.partial(config_from_hf, family=name),
            layer_names=checkpoint.LAYER_NAMES,
            global_names=checkpoint.GLOBAL_NAMES,
        ),
    )


MISTRAL = _family("mistral", "MistralForCausalLM")
MINISTRAL = _family("ministral", "MinistralForCausalLM")
