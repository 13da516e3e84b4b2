"""Gemma 3 (text): scaled embeddings, q/k norms, norms on both sides of each block, five sliding
layers to one full.

The two kinds of layer have rotary tables of their own: a frequency scaling applies to the full ones
only.  GGUF stores norm weights with the +1 that Gemma's (1 + w) asks for already added.
"""

import math

from infer.config import Activation, LayerConfig, ModelConfig, QkNorm, RopeConfig
from infer.models.family import GLOBAL_NAMES, LAYER_NAMES, Family, Metadata, common_fields
from infer.models.llama import rope_scaling

# The 27B model alone scales queries by its hidden size per head; GGUF tells the sizes apart by
# their layers.
_LAYERS_OF_27B = 62


def config(meta: Metadata, divisors: tuple[float, ...] = ()) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `gemma3` describes."""
    fields = common_fields(meta, "gemma3")
    num_layers = meta.meta_int("gemma3.block_count")
    pattern = meta.meta_int("gemma3.attention.sliding_window_pattern", 6)
    full = LayerConfig(
        rope=RopeConfig(
            theta=meta.meta_float("gemma3.rope.freq_base", 1e6),
            scaling=rope_scaling(meta, "gemma3", divisors),
        )
    )
    window = meta.meta_int("gemma3.attention.sliding_window", 0)
    sliding = LayerConfig(
        rope=RopeConfig(theta=meta.meta_float("gemma3.rope.freq_base_swa", 1e4)),
        window=window or None,
    )
    hidden, num_heads = fields["hidden_size"], fields["num_heads"]
    softcap = meta.meta_float("gemma3.final_logit_softcapping", 0.0)
    return ModelConfig(
        **fields,
        layers=layer_pattern(full, sliding, num_layers, pattern),
        activation=Activation.GELU_TANH,
        embedding_scale=math.sqrt(hidden),
        query_scale=(hidden // num_heads) ** -0.5 if num_layers == _LAYERS_OF_27B else None,
        qk_norm=QkNorm.HEAD,
        post_norms=True,
        final_softcap=softcap or None,
    ).validate()


def layer_pattern(
    full: LayerConfig, sliding: LayerConfig, num_layers: int, pattern: int
) -> tuple[LayerConfig, ...]:
    """Return the layers: every `pattern`-th one is full, counting from one; the others slide."""
    return tuple(full if (i + 1) % pattern == 0 else sliding for i in range(num_layers))


FAMILY = Family(
    name="gemma3",
    config=config,
    layer_names=LAYER_NAMES
    | {
        "q_norm": "blk.{i}.attn_q_norm.weight",
        "k_norm": "blk.{i}.attn_k_norm.weight",
        "post_attn_norm": "blk.{i}.post_attention_norm.weight",
        "post_mlp_norm": "blk.{i}.post_ffw_norm.weight",
    },
    global_names=GLOBAL_NAMES,
)
