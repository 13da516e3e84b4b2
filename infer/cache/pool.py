"""The page pool of one layer's keys or values: a float array, or quantised numbers with scales.

Pools are pytrees whose leaves all begin with [P, K, U]: what copies, moves or gathers pages does it
to each leaf.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from infer.errors import ConfigError
from infer.pytree import Leaf, pytree_dataclass
from infer.quant.kv import (
    KV_ALIASES,
    KV_FORMATS,
    data_dtype,
    data_width,
    dequantize_kv,
    format_of,
    quantize_kv,
)

# What keys and values can be cached in.
KV_DTYPES = ("float32", "bfloat16", "float16", *KV_FORMATS)


@pytree_dataclass
class QuantizedPool:
    """Keys or values in a format of `infer.quant.kv`."""

    data: Leaf  # int8 or float8_e4m3fn [P, K, U, H]; of int4 uint8 [P, K, U, H/2]
    scale: Leaf  # float32 [P, K, U]

    @property
    def shape(self) -> tuple[int, ...]:
        """(P, K, U, H), H in numbers."""
        width = self.data.shape[-1]
        return (*self.data.shape[:-1], 2 * width if self.kv_dtype == "int4" else width)

    @property
    def kv_dtype(self) -> str:
        """The name of the format."""
        return format_of(self.data)


Pool = Float[Array, "P K U H"] | QuantizedPool


def kv_dtype_name(dtype: Any) -> str | None:
    """Return the name in KV_DTYPES of what keys and values are cached in; None for None.

    Args:
        dtype: a float dtype in any way that JAX knows; int8, int4 and float8_e4m3fn likewise; the
            names of vLLM, "fp8" and "fp8_e4m3".

    Raises:
        ConfigError: it is none of KV_DTYPES.
    """
    if dtype is None:
        return None
    if isinstance(dtype, str):
        name = KV_ALIASES.get(dtype, dtype)
    else:
        try:
            name = jnp.dtype(dtype).name
        except TypeError:
            name = ""
        # JAX's float8_e4m3 is another type than the one cached here, float8_e4m3fn.
        name = KV_ALIASES.get(name, name) if name != "float8_e4m3" else ""
    if name not in KV_DTYPES:
        raise ConfigError(
            f"kv_dtype is {dtype!r:.80}; there are {', '.join(map(repr, KV_DTYPES))}, and None is "
            "the dtype of the activations"
        )
    return name


def create_pool(shape: tuple[int, int, int, int], kv_dtype: DTypeLike) -> Pool:
    """Return a pool [P, K, U, H] of zeros.

    Zeros, not empty memory: a masked key still meets 0 x value in the weighted sum, and 0 x NaN is
    NaN.

    Raises:
        ConfigError: there is no such dtype, or its packing cannot hold heads of this width.
    """
    name = kv_dtype_name(kv_dtype)
    if name not in KV_FORMATS:
        return jnp.zeros(shape, kv_dtype)
    *places, width = shape
    try:
        width = data_width(name, width)
    except ValueError as error:
        raise ConfigError(f"kv_dtype is {name!r}: {error}") from error
    return QuantizedPool(jnp.zeros((*places, width), data_dtype(name)), jnp.zeros(places))


def dtype_of(pool: Pool | jax.ShapeDtypeStruct) -> str:
    """Return the name in KV_DTYPES of a pool."""
    return pool.kv_dtype if isinstance(pool, QuantizedPool) else pool.dtype.name


def encoded(pool: Pool, values: Float[Array, "*A H"]) -> Array | QuantizedPool:
    """Return `values` as the pool stores them: leaves [*A, ...] for its leaves [P, K, U, ...]."""
    if isinstance(pool, QuantizedPool):
        return QuantizedPool(*quantize_kv(values, pool.kv_dtype, pool.scale.dtype))
    return values.astype(pool.dtype)


def read_pages(pool: Pool, ids: Int[Array, "*A"]) -> Float[Array, "*A K U H"]:
    """Return the numbers of pages, float32 from quantised pools; an id outside the pool reads some
    page.
    """
    taken = jax.tree.map(lambda x: x.at[ids].get(mode="clip"), pool)
    return dequantize_kv(taken.data, taken.scale) if isinstance(pool, QuantizedPool) else taken
