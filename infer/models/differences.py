"""Whether two configurations are the same model: what a conversion holds its result against."""

import dataclasses
import math
from typing import Any

import numpy as np

from infer.config import LayerConfig, ModelConfig, RopeConfig, RopeScalingKind
from infer.ops.frequencies import attention_factor, inverse_frequencies

# What is no part of the arithmetic: names, ids, and what is compared in a form of its own.
_APART = ("family", "num_tokens", "bos_id", "eos_ids", "layers", "query_scale")
_FACTORS = ("embedding_scale", "residual_scale", "logit_scale")  # None is 1
_RTOL = 1e-6  # GGUF holds numbers as float32


def differences(want: ModelConfig, have: ModelConfig) -> list[str]:
    """Return in words how `have` would compute something else than `want`; [] for the same model.

    Names of families and token ids do not count.  Numbers may differ as float32 does, and rotary
    embeddings are compared by their frequencies, however they are described.
    """
    found = []
    for field in dataclasses.fields(ModelConfig):
        if field.name not in _APART:
            a, b = (_value(config, field.name) for config in (want, have))
            if not _same(a, b):
                found.append(f"{field.name} {_shown(a)} would become {_shown(b)}")
    if not _same(want.softmax_scale, have.softmax_scale):
        found.append(
            f"the factor on scores {want.softmax_scale:g} would become {have.softmax_scale:g}"
        )
    if want.num_layers != have.num_layers:
        return [*found, f"{want.num_layers} layers would become {have.num_layers}"]
    for i, (a, b) in enumerate(zip(want.layers, have.layers, strict=True)):
        if wrong := _of_layer(a, b, want.head_dim):
            return [*found, f"{wrong} of layer {i} would be lost"]
    return found


def _value(config: ModelConfig, name: str) -> Any:
    value = getattr(config, name)
    return 1.0 if name in _FACTORS and value is None else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_RTOL)
    return a == b


def _shown(value: Any) -> str:
    return str(getattr(value, "value", value))


def _of_layer(a: LayerConfig, b: LayerConfig, head_dim: int) -> str:
    if a.window != b.window:
        return f"the window ({a.window})"
    if (a.rope is None) != (b.rope is None):
        return "the choice whether positions turn"
    if a.rope is not None and b.rope is not None and not _same_rope(a.rope, b.rope, head_dim):
        return "the rotary embedding"
    return ""


def _same_rope(a: RopeConfig, b: RopeConfig, head_dim: int) -> bool:
    if (a.dim or head_dim) != (b.dim or head_dim) or a.by_length != b.by_length:
        return False
    one, other = (inverse_frequencies(rope, head_dim) for rope in (a, b))
    # Divisors of a file are float32, and theta is, to the power of up to one.
    if not np.allclose(one, other, rtol=10 * _RTOL, atol=0):
        return False
    if not math.isclose(
        attention_factor(a.scaling), attention_factor(b.scaling), rel_tol=10 * _RTOL
    ):
        return False
    x, y = a.scaling, b.scaling
    if x is None or y is None or not a.by_length:
        return True
    return (
        x.kind is y.kind
        and x.original_context == y.original_context
        and (x.kind is not RopeScalingKind.DYNAMIC or _same(x.factor, y.factor))
        and np.allclose(x.long_factors, y.long_factors, rtol=_RTOL, atol=0)
    )
