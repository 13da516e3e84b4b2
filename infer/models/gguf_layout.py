"""What GGUF architectures share: names of tensors and keys, rotary scalings, window patterns."""

from typing import Any

import numpy as np

from infer.config import LayerConfig, RopeConfig, RopeScaling, RopeScalingKind
from infer.errors import ConfigError
from infer.models import rows
from infer.models.family import Metadata
from infer.models.rows import Part

# Tensors that are part of the configuration: divisors of rotary frequencies.
DIVISORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
CONFIG_TENSORS = (DIVISORS, LONG_FACTORS, SHORT_FACTORS)

GLOBAL_NAMES: dict[str, str | Part] = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "final_norm_bias": "output_norm.bias",
    "lm_head": "output.weight",
    "positions": "position_embd.weight",
}

LAYER_NAMES: dict[str, str | Part] = {
    "attn_norm": "blk.{i}.attn_norm.weight",
    "attn_norm_bias": "blk.{i}.attn_norm.bias",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "q_bias": "blk.{i}.attn_q.bias",
    "k_bias": "blk.{i}.attn_k.bias",
    "v_bias": "blk.{i}.attn_v.bias",
    "o_bias": "blk.{i}.attn_output.bias",
    "q_norm": "blk.{i}.attn_q_norm.weight",
    "k_norm": "blk.{i}.attn_k_norm.weight",
    "post_attn_norm": "blk.{i}.post_attention_norm.weight",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "mlp_norm_bias": "blk.{i}.ffn_norm.bias",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
    "gate_bias": "blk.{i}.ffn_gate.bias",
    "up_bias": "blk.{i}.ffn_up.bias",
    "down_bias": "blk.{i}.ffn_down.bias",
    "post_mlp_norm": "blk.{i}.post_ffw_norm.weight",
}

QKV_NAME, QKV_BIAS_NAME = "blk.{i}.attn_qkv.weight", "blk.{i}.attn_qkv.bias"
QKV = rows.stacked(QKV_NAME, "q", "k", "v") | rows.stacked(
    QKV_BIAS_NAME, "q_bias", "k_bias", "v_bias"
)
GATE_UP = rows.stacked("blk.{i}.ffn_up.weight", "gate", "up")


def common_fields(meta: Metadata, arch: str) -> dict[str, Any]:
    """Return the ModelConfig fields that every GGUF architecture spells alike."""
    num_heads = count(meta, f"{arch}.attention.head_count")
    hidden = count(meta, f"{arch}.embedding_length")
    # Every layer has tensors: a larger number is a lie, and layers are built from it.
    num_layers, most = meta.meta_int(f"{arch}.block_count"), len(meta.tensors)
    if not 1 <= num_layers <= most:
        raise ConfigError(
            f"{arch}.block_count is {num_layers}, must be 1 to {most}, the tensors of the file"
        )
    key_length = meta.meta_int(f"{arch}.attention.key_length", hidden // max(num_heads, 1))
    embedding = meta.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None else 0
    eos = meta.meta_int("tokenizer.ggml.eos_token_id", -1)
    bos = meta.meta_int("tokenizer.ggml.bos_token_id", -1)
    # Architectures with LayerNorm have the other key.
    eps = meta.meta_float(f"{arch}.attention.layer_norm_epsilon", -1.0)
    if eps < 0:
        eps = meta.meta_float(f"{arch}.attention.layer_norm_rms_epsilon")
    return dict(
        family=arch,
        vocab_size=rows,
        num_tokens=len(meta.meta_strs("tokenizer.ggml.tokens", [])) or rows,
        hidden_size=hidden,
        intermediate_size=count(meta, f"{arch}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=count(meta, f"{arch}.attention.head_count_kv", num_heads),
        head_dim=key_length,
        max_context=meta.meta_int(f"{arch}.context_length"),
        norm_eps=eps,
        tied_embeddings="output.weight" not in meta.tensors,
        bos_id=bos if bos >= 0 else None,
        eos_ids=(eos,) if eos >= 0 else (),
    )


def count(meta: Metadata, key: str, *default: int) -> int:
    """Return a number of things, at least 1; ConfigError names the key otherwise."""
    value = meta.meta_int(key, *default)
    if value < 1:
        raise ConfigError(f"{key} is {value}, must be at least 1")
    return value


def has_bias(meta: Metadata, *parts: str) -> bool:
    """Return whether the first layer has a bias on one of these tensors."""
    return any(f"blk.0.{part}.bias" in meta.tensors for part in parts)


def rope(meta: Metadata, arch: str, head_dim: int) -> RopeConfig:
    """Return base, scaling and number of turned dimensions of an architecture's full layers."""
    dim = meta.meta_int(f"{arch}.rope.dimension_count", head_dim)
    return RopeConfig(
        theta=meta.meta_float(f"{arch}.rope.freq_base", 10000.0),
        scaling=rope_scaling(meta, arch),
        dim=None if dim == head_dim else dim,
    )


def rope_scaling(meta: Metadata, arch: str) -> RopeScaling | None:
    """Return the frequency scaling of a GGUF file: the divisor tensors where there are any, else
    its metadata.
    """
    values = lambda name: tuple(meta.array(name, np.float32).reshape(-1).tolist())
    original = meta.meta_int(f"{arch}.rope.scaling.original_context_length", 8192)
    factor = meta.meta_float(f"{arch}.rope.scaling.factor", 1.0)
    if LONG_FACTORS in meta.tensors and SHORT_FACTORS in meta.tensors:
        return RopeScaling(
            kind=RopeScalingKind.LONGROPE,
            short_factors=values(SHORT_FACTORS),
            long_factors=values(LONG_FACTORS),
            original_context=original,
            attention_factor=meta.meta_float(f"{arch}.rope.scaling.attn_factor", 1.0),
        )
    if DIVISORS in meta.tensors:
        return RopeScaling(kind=RopeScalingKind.DIVISORS, divisors=values(DIVISORS))
    kind = meta.meta_str(f"{arch}.rope.scaling.type", "none")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return RopeScaling(kind=RopeScalingKind.LINEAR, factor=factor)
    if kind == "yarn":
        return RopeScaling(kind=RopeScalingKind.YARN, factor=factor, original_context=original)
    raise ConfigError(
        f"rope scaling type is {kind!r}; this version has none, linear, yarn, and longrope with "
        "its two factor tensors"
    )


def layers(
    meta: Metadata,
    arch: str,
    full: LayerConfig,
    sliding: LayerConfig,
    default_period: int | None = None,
) -> tuple[LayerConfig, ...]:
    """Return the layers by the file's window pattern.

    The pattern is a number (every n-th layer is full) or one bool a layer (true slides).

    Args:
        meta: the file.
        arch: its architecture.
        full: a layer without window.
        sliding: a layer with window; where its window is None, all layers are `full`.
        default_period: the number where the file has none; None: all layers slide.
    """
    num_layers = meta.meta_int(f"{arch}.block_count")
    key = f"{arch}.attention.sliding_window_pattern"
    pattern = meta.metadata.get(key)
    if isinstance(pattern, (list, np.ndarray)):
        slides = [bool(value) for value in pattern]
        if len(slides) != num_layers:
            raise ConfigError(f"{key} has {len(slides)} entries for {num_layers} layers")
    else:
        period = meta.meta_int(key, default_period or 0)
        slides = [period == 0 or (i + 1) % period != 0 for i in range(num_layers)]
    return tuple(sliding if slide else full for slide in slides)


def window(meta: Metadata, arch: str) -> int | None:
    """Return the number of keys that sliding layers see, or None."""
    return meta.meta_int(f"{arch}.attention.sliding_window", 0) or None
