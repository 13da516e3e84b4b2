"""Bytes of a cache as it is really allocated: every layer, full pages, a sliding window or not."""

from jax.typing import DTypeLike

from infer.cache.pool import kv_dtype_name
from infer.config import ModelConfig
from infer.plan.capacity import kv_bytes
from infer.plan.shape import AttentionShape, bytes_per_number


def cached_layers(
    config: ModelConfig, dtype: DTypeLike, page_size: int = 16
) -> tuple[AttentionShape, ...]:
    """Return what each layer caches for a token, as the formulas of `infer.plan` take it.

    Args:
        config: gives layers, key/value heads and head width.
        dtype: of the cache, a name of `infer.cache.pool.KV_DTYPES` or a dtype.
        page_size: tokens of a page.
    """
    name = kv_dtype_name(dtype)
    assert name is not None, dtype
    return tuple(
        AttentionShape(
            num_kv_heads=config.num_kv_heads,
            k_head_dim=config.head_dim,
            v_head_dim=config.head_dim,
            window=layer.window,
            kv_bytes=bytes_per_number(name, config.head_dim, page_size),
        )
        for layer in config.layers
    )


def pool_bytes(config: ModelConfig, num_pages: int, page_size: int, dtype: DTypeLike) -> int:
    """Return the bytes of a pool of `num_pages` pages, keys and values of all layers."""
    layers = cached_layers(config, dtype, page_size)
    return round(kv_bytes(layers, num_pages * page_size, page_size=page_size))
