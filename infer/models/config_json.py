"""From a `ModelConfig` to a config.json: what all families write alike.

The spelling is transformers 4's (`rope_theta`, `rope_scaling`), which transformers 5 reads too.  A
family puts its own keys beside these; `infer.models.differences` then holds what is read back
against what was meant, so that nothing is lost without a word.
"""

import math
from typing import Any

import numpy as np

from infer.config import (
    Activation,
    ModelConfig,
    Norm,
    RopeConfig,
    RopeScaling,
    RopeScalingKind,
)
from infer.errors import ConfigError
from infer.models.checkpoint import FULL, SLIDING
from infer.ops.frequencies import attention_factor, inverse_frequencies

_ACTIVATIONS = {
    Activation.SILU: "silu",
    Activation.GELU: "gelu",
    Activation.GELU_TANH: "gelu_pytorch_tanh",
}
# Where a GGUF file has only the divisors that Llama 3's rule gives: original contexts to try.
_ORIGINAL_CONTEXTS = [1 << i for i in range(6, 21)]


def common(config: ModelConfig) -> dict[str, Any]:
    """Return the keys that most families spell alike, those of rotary embedding included.

    Raises:
        ConfigError: a frequency scaling that no config.json can name.
    """
    rope = rope_of(config)
    values: dict[str, Any] = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_act=_ACTIVATIONS[config.activation],
        max_position_embeddings=_positions(config, rope),
        tie_word_embeddings=config.tied_embeddings,
        bos_token_id=config.bos_id,
        eos_token_id=config.eos_ids[0] if config.eos_ids else None,
        # Some classes' default is an id beyond a small vocabulary.
        pad_token_id=None,
    )
    if config.norm is Norm.RMS:
        values["rms_norm_eps"] = shortest(config.norm_eps)
    return values | ({} if rope is None else _rope(rope, config))


def rope_of(config: ModelConfig) -> RopeConfig | None:
    """Return the rotary embedding of the full layers, or where none turns of the others."""
    ropes = [layer.rope for layer in config.layers if layer.rope and layer.window is None]
    ropes += [layer.rope for layer in config.layers if layer.rope]
    return ropes[0] if ropes else None


def window(config: ModelConfig) -> int | None:
    """Return the window of the layers that slide, or None."""
    return next((layer.window for layer in config.layers if layer.window is not None), None)


def layer_types(config: ModelConfig) -> list[str]:
    """Return transformers' `layer_types`."""
    return [FULL if layer.window is None else SLIDING for layer in config.layers]


def scale(value: float | None) -> float:
    """Return a factor as a file has it; None is 1."""
    return 1.0 if value is None else shortest(value)


def shortest(value: float) -> float:
    """Return the shortest number that is the same float32: GGUF's 1e-05 is 9.99999974e-06."""
    short = float(str(np.float32(value)))
    return short if math.isclose(short, value, rel_tol=1e-7) else value


def _positions(config: ModelConfig, rope: RopeConfig | None) -> int:
    """Return max_position_embeddings: of dynamic scaling the length before it stretches."""
    scaling = None if rope is None else rope.scaling
    if scaling is not None and scaling.kind is RopeScalingKind.DYNAMIC:
        return scaling.original_context
    return config.max_context


def _rope(rope: RopeConfig, config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = dict(rope_theta=shortest(rope.theta))
    if rope.dim is not None:
        share = rope.dim / config.head_dim
        if int(config.head_dim * share) != rope.dim:  # readers cut off what is behind the point
            share = math.nextafter(share, 1)
        values["partial_rotary_factor"] = share
    if rope.scaling is not None:
        values |= _scaling(rope.scaling, rope, config)
    return values


def _scaling(s: RopeScaling, rope: RopeConfig, config: ModelConfig) -> dict[str, Any]:
    if s.kind is RopeScalingKind.LONGROPE:
        return _longrope(s, config)
    if s.kind is RopeScalingKind.DIVISORS:
        s = _as_llama3(rope, config.head_dim)
    found: dict[str, Any] = dict(rope_type=s.kind.value, factor=shortest(s.factor))
    if s.kind is RopeScalingKind.LLAMA3:
        found |= dict(
            low_freq_factor=s.low_freq_factor,
            high_freq_factor=s.high_freq_factor,
            original_max_position_embeddings=s.original_context,
        )
    if s.kind is RopeScalingKind.YARN:
        found |= dict(
            original_max_position_embeddings=s.original_context,
            beta_fast=s.beta_fast,
            beta_slow=s.beta_slow,
            truncate=s.truncate,
        )
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(s, key) is not None:
                found[key] = getattr(s, key)
    return dict(rope_scaling=found)


def _longrope(s: RopeScaling, config: ModelConfig) -> dict[str, Any]:
    found: dict[str, Any] = dict(
        rope_type="longrope",
        short_factor=[shortest(x) for x in s.short_factors],
        long_factor=[shortest(x) for x in s.long_factors],
    )
    # transformers 4 takes no key beside these, and works the factor out as below.
    usual = RopeScaling(
        kind=s.kind,
        factor=config.max_context / s.original_context,
        original_context=s.original_context,
    )
    if not math.isclose(attention_factor(s), attention_factor(usual), rel_tol=1e-6):
        found["attention_factor"] = attention_factor(s)
    return dict(rope_scaling=found, original_max_position_embeddings=s.original_context)


def _as_llama3(rope: RopeConfig, head_dim: int) -> RopeScaling:
    """Return the scaling by Llama 3's rule that has the divisors of a GGUF file.

    Raises:
        ConfigError: none has.
    """
    assert rope.scaling is not None
    wanted = inverse_frequencies(rope, head_dim)
    for original in _ORIGINAL_CONTEXTS:
        scaling = RopeScaling(
            kind=RopeScalingKind.LLAMA3,
            factor=round(max(rope.scaling.divisors), 5),
            original_context=original,
        )
        tried = RopeConfig(theta=rope.theta, scaling=scaling, dim=rope.dim)
        if np.allclose(inverse_frequencies(tried, head_dim), wanted, rtol=1e-5, atol=0):
            return scaling
    raise ConfigError(
        "the rotary divisors in rope_freqs.weight follow no rule that config.json can name (Llama"
        " 3's with frequency factors 1 and 4 was tried); keep the GGUF file"
    )
