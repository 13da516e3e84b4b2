"""Moving a scale from a layer's activations into its weights, without changing what it computes.

An input x of some matrices is divided by s and their columns are multiplied by it.  The division is
folded into what writes x: the norm before, or the rows of `up` (which enter the product with the
gate linearly) and of `v` (which attention only averages).
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from infer.config import ModelConfig
from infer.models.params import LayerParams
from infer.quantization.recipe import readers


def can_scale(config: ModelConfig, name: str) -> bool:
    """Return whether input `name` (of `recipe.readers`) has a writer that can be divided."""
    if name in ("attn", "mlp"):
        return config.pre_norms
    if name == "o":  # a head of v serves one head of queries
        return config.num_heads == config.num_kv_heads
    return config.gated_mlp


def scale_input(
    config: ModelConfig, w: LayerParams, name: str, s: Float[Array, " I"]
) -> LayerParams:
    """Return weights that compute the same where input `name` is x / s.

    Args:
        config: of the model.
        w: float weights.
        name: see `can_scale`.
        s: positive.
    """
    change = {m: getattr(w, m) * s[None, :] for m in readers(config)[name]}
    divide = {
        "attn": ("attn_norm", "attn_norm_bias"),
        "mlp": ("mlp_norm", "mlp_norm_bias"),
        "o": ("v", "v_bias"),
        "down": ("up", "up_bias"),
    }[name]
    for writer in divide:
        old = change.get(writer, getattr(w, writer))
        if old is not None:
            by = s[:, None] if old.ndim == 2 else s
            change[writer] = (old.astype(jnp.float32) / by).astype(old.dtype)
    return dataclasses.replace(w, **change)


def smooth_scale(
    most: Float[Array, " I"], weights: list[Float[Array, "_ I"]], alpha: float
) -> Float[Array, " I"]:
    """Return SmoothQuant's s = max|x|^alpha / max|w|^(1 - alpha) for each input.

    Args:
        most: largest magnitude of each input.
        weights: those that read it.
        alpha: share of the range that moves into the weights.
    """
    largest = jnp.stack([jnp.abs(w).max(0) for w in weights]).max(0)
    x, w = jnp.maximum(most, 1e-5), jnp.maximum(largest, 1e-5)
    return jnp.maximum(x**alpha / w ** (1 - alpha), 1e-5)
