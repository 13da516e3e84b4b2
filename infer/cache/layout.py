"""Bytes of a cache, as it is really allocated: every layer, full pages."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from infer.config import ModelConfig


def page_bytes(config: ModelConfig, page_size: int, dtype: DTypeLike) -> int:
    """Return the bytes of one page over all layers: keys and values of `page_size` tokens."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_token * page_size * jnp.dtype(dtype).itemsize
