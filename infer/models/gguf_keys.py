"""From a `ModelConfig` to GGUF: the keys of an architecture, and the tensors that are a part of the
configuration.

Names and meanings are llama.cpp's (`gguf-py/gguf/constants.py`).  A family puts its own keys beside
these; `infer.models.differences` then holds what is read back against what was meant.
"""

from typing import Any

import numpy as np

from infer.config import ModelConfig, Norm, RopeConfig, RopeScalingKind
from infer.errors import ConfigError
from infer.models.config_json import rope_of, window
from infer.models.gguf_layout import DIVISORS, LONG_FACTORS, SHORT_FACTORS
from infer.ops.frequencies import attention_factor, inverse_frequencies


def common(config: ModelConfig) -> dict[str, Any]:
    """Return the keys that architectures spell alike, without the architecture in front.

    Raises:
        ConfigError: a frequency scaling that GGUF has no keys for.
    """
    values: dict[str, Any] = {
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "vocab_size": config.vocab_size,
    }
    eps = "layer_norm_rms_epsilon" if config.norm is Norm.RMS else "layer_norm_epsilon"
    values[f"attention.{eps}"] = float(config.norm_eps)
    if config.head_dim * config.num_heads != config.hidden_size:
        values |= {
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
        }
    if (size := window(config)) is not None:
        values["attention.sliding_window"] = size
    for key, cap in (("attn", config.attn_softcap), ("final", config.final_softcap)):
        if cap is not None:
            values[f"{key}_logit_softcapping"] = float(cap)
    rope = rope_of(config)
    return values | ({} if rope is None else _rope(rope, config))


def window_pattern(config: ModelConfig) -> dict[str, Any]:
    """Return the key that says layer by layer which of them slide.  Where an architecture's own
    pattern is the same, files leave it out.
    """
    slides = np.array([layer.window is not None for layer in config.layers])
    return {"attention.sliding_window_pattern": slides}


def tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the tensors of divisors of rotary frequencies, by name."""
    rope = rope_of(config)
    scaling = None if rope is None else rope.scaling
    if rope is None or scaling is None:
        return {}
    if scaling.kind is RopeScalingKind.LONGROPE:
        lists = {LONG_FACTORS: scaling.long_factors, SHORT_FACTORS: scaling.short_factors}
        return {name: np.asarray(values, np.float32) for name, values in lists.items()}
    if scaling.kind in (RopeScalingKind.LLAMA3, RopeScalingKind.DIVISORS):
        plain = RopeConfig(theta=rope.theta, dim=rope.dim)
        divisors = inverse_frequencies(plain, config.head_dim) / inverse_frequencies(
            rope, config.head_dim
        )
        return {DIVISORS: divisors.astype(np.float32)}
    return {}


def _rope(rope: RopeConfig, config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rope.dimension_count": rope.dim or config.head_dim,
        "rope.freq_base": float(rope.theta),
    }
    s = rope.scaling
    if s is None or s.kind in (RopeScalingKind.LLAMA3, RopeScalingKind.DIVISORS):
        return values
    if s.kind is RopeScalingKind.DYNAMIC:
        raise ConfigError("GGUF has no key for dynamic rotary scaling; keep the folder")
    if s.kind is RopeScalingKind.LONGROPE:
        values["rope.scaling.attn_factor"] = attention_factor(s)
    else:
        values |= {"rope.scaling.type": s.kind.value, "rope.scaling.factor": float(s.factor)}
    if s.kind is not RopeScalingKind.LINEAR:
        values["rope.scaling.original_context_length"] = s.original_context
    return values
