"""OLMo 2: norms only after each block, and on the full width of q and k."""

from typing import Any

from infer.config import LayerConfig, ModelConfig, QkNorm
from infer.errors import ConfigError
from infer.models import checkpoint, config_json, gguf_layout, llama
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata

_NORMS: dict[str, Any] = dict(pre_norms=False, post_norms=True, qk_norm=QkNorm.FULL)


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `olmo2` describes."""
    if gguf_layout.window(meta, "olmo2"):
        raise ConfigError("olmo2 with a sliding window is OLMo 3, which this version does not run")
    fields = gguf_layout.common_fields(meta, "olmo2")
    layer = LayerConfig(rope=gguf_layout.rope(meta, "olmo2", fields["head_dim"]))
    num_layers = meta.meta_int("olmo2.block_count")
    return ModelConfig(**fields, **_NORMS, layers=(layer,) * num_layers).validate()


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of an OLMo 2 describes."""
    fields = checkpoint.common_fields(hf, "olmo2", max_position_embeddings=2048, rms_norm_eps=1e-5)
    layer = LayerConfig(rope=checkpoint.rope_of(hf, fields["head_dim"]))
    return ModelConfig(
        **fields,
        **_NORMS,
        **llama.biases_of_hf(hf),
        layers=(layer,) * checkpoint.num_layers(hf),
        activation=hf.activation("hidden_act", default="silu"),
    ).validate()


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of an OLMo 2 says."""
    return config_json.common(config) | llama.bias_values(config)


FAMILY = Family(
    name="olmo2",
    config=config,
    layer_names=gguf_layout.LAYER_NAMES,
    global_names=gguf_layout.GLOBAL_NAMES,
    hf=Layout(
        architectures=("Olmo2ForCausalLM",),
        model_types=("olmo2",),
        config=config_from_hf,
        values=values,
        layer_names=checkpoint.LAYER_NAMES | checkpoint.SANDWICH_NAMES,
        global_names=checkpoint.GLOBAL_NAMES,
    ),
)
