"""Mistral and Ministral: Llama with sliding windows, on all layers or by `layer_types`.  Their GGUF
files have the architecture `llama`.
"""

from collections.abc import Collection

from infer.config import LayerConfig, ModelConfig
from infer.models import hf_layout, llama
from infer.models.family import Family, HfConfig


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `mistral` or `ministral`."""
    fields = hf_layout.common_fields(hf, tensors)
    rope = hf_layout.rope(hf, fields["head_dim"])
    sliding = LayerConfig(rope=rope, window=hf.get("sliding_window"))
    all_slide = ["sliding_attention"] * hf_layout.integer(hf, "num_hidden_layers")
    full = LayerConfig(rope=rope)
    return ModelConfig(**fields, layers=hf_layout.layers(hf, full, sliding, all_slide)).validate()


FAMILY = Family(
    name="mistral",
    model_types=("mistral", "ministral"),
    config_from_hf=config_from_hf,
    hf=llama.HF,
)
