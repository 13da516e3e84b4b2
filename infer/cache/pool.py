"""The page pool of one layer's keys or values: a float array, or quantised numbers with scales.

Pools are pytrees whose leaves all begin with [P, K]: what copies, moves or gathers pages does it to
each leaf.  Those that tokens are written into one by one have U, the token in the page, after it;
a `GroupedPool` is written by whole pages.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from infer.errors import ConfigError
from infer.pytree import Leaf, pytree_dataclass, static
from infer.quant.kivi import KIVI_BITS, dequantize_pages, quantize_pages, value_group
from infer.quant.kv import (
    KV_ALIASES,
    KV_FORMATS,
    data_dtype,
    data_width,
    dequantize_kv,
    format_of,
    quantize_kv,
)
from infer.quant.paley import factor

# What keys and values can be cached in.  "int4_hadamard" is int4 of heads that a Hadamard matrix
# has turned (`infer.models.paged_forward`): outliers of single channels are spread over all.
_TURNED = "int4_hadamard"
KV_DTYPES = ("float32", "bfloat16", "float16", *KV_FORMATS, _TURNED, *KIVI_BITS)


@pytree_dataclass
class QuantizedPool:
    """Keys or values in a format of `infer.quant.kv`."""

    data: Leaf  # int8 or float8_e4m3fn [P, K, U, H]; of int4 uint8 [P, K, U, H/2]
    scale: Leaf  # float32 [P, K, U]
    turned: bool = static(default=False)  # what is written and read are turned heads

    @property
    def shape(self) -> tuple[int, ...]:
        """(P, K, U, H), H in numbers."""
        width = self.data.shape[-1]
        return (*self.data.shape[:-1], 2 * width if format_of(self.data) == "int4" else width)

    @property
    def kv_dtype(self) -> str:
        """The name in KV_DTYPES."""
        return _TURNED if self.turned else format_of(self.data)


@pytree_dataclass
class GroupedPool:
    """Keys or values of whole pages in the format of `infer.quant.kivi`; those of the page in
    progress lie in `PagedCache.recent`.
    """

    data: Leaf  # uint8 [P, K, U, H * bits / 8]
    scale: Leaf  # float16 [P, K, groups along the page, groups along the head]
    low: Leaf  # likewise
    bits: int = static(kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """(P, K, U, H), H in numbers."""
        return (*self.data.shape[:-1], self.data.shape[-1] * 8 // self.bits)

    @property
    def kv_dtype(self) -> str:
        """The name in KV_DTYPES."""
        return next(name for name, bits in KIVI_BITS.items() if bits == self.bits)


Pool = Float[Array, "P K U H"] | QuantizedPool  # tokens are written into it one by one
AnyPool = Pool | GroupedPool


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


def writes_pages(kv_dtype: Any) -> bool:
    """Return whether a cache in this dtype is written by whole pages (`GroupedPool`): requests
    share full pages only then.
    """
    return kv_dtype_name(kv_dtype) in KIVI_BITS


def create_pools(shape: tuple[int, int, int, int], kv_dtype: DTypeLike) -> tuple[AnyPool, AnyPool]:
    """Return pools [P, K, U, H] of keys and of values, see `create_pool`.

    Raises:
        ConfigError: there is no such dtype, or its packing cannot hold heads of this width.
    """
    name = kv_dtype_name(kv_dtype)
    if name not in KIVI_BITS:
        return create_pool(shape, kv_dtype), create_pool(shape, kv_dtype)
    *places, size, width = shape
    if width % 8:
        raise ConfigError(f"kv_dtype is {name!r}: heads of {width} numbers fill no whole bytes")
    bits = KIVI_BITS[name]

    def pool(groups: tuple[int, int]) -> GroupedPool:
        halves = jnp.zeros((*places, *groups), jnp.float16)
        data = jnp.zeros((*places, size, width * bits // 8), jnp.uint8)
        return GroupedPool(data, halves, halves + 0, bits=bits)

    return pool((1, width)), pool((size, width // value_group(width)))


def create_pool(shape: tuple[int, int, int, int], kv_dtype: DTypeLike) -> Pool:
    """Return a pool [P, K, U, H] of zeros.

    Zeros, not empty memory: a masked key still meets 0 x value in the weighted sum, and 0 x NaN is
    NaN.

    Raises:
        ConfigError: there is no such dtype, or its packing cannot hold heads of this width.
    """
    name = kv_dtype_name(kv_dtype)
    turned = name == _TURNED
    if name not in KV_FORMATS and not turned:
        return jnp.zeros(shape, kv_dtype)
    of = "int4" if turned else name
    assert of is not None
    *places, width = shape
    try:
        if turned:
            factor(width)
        width = data_width(of, width)
    except ValueError as error:
        raise ConfigError(f"kv_dtype is {name!r}: {error}") from error
    return QuantizedPool(jnp.zeros((*places, width), data_dtype(of)), jnp.zeros(places), turned)


def dtype_of(pool: AnyPool | jax.ShapeDtypeStruct) -> str:
    """Return the name in KV_DTYPES of a pool."""
    return pool.kv_dtype if isinstance(pool, (QuantizedPool, GroupedPool)) else pool.dtype.name


def encoded(pool: Pool, values: Float[Array, "*A H"]) -> Array | QuantizedPool:
    """Return `values` as the pool stores them: leaves [*A, ...] for its leaves [P, K, U, ...].

    A `GroupedPool` takes whole pages, see `write_whole_pages`.
    """
    if isinstance(pool, QuantizedPool):
        data, scale = quantize_kv(values, format_of(pool.data), pool.scale.dtype)
        return dataclasses.replace(pool, data=data, scale=scale)
    return values.astype(pool.dtype)


def read_pages(pool: AnyPool, ids: Int[Array, "*A"]) -> Float[Array, "*A K U H"]:
    """Return the numbers of pages, float32 from quantised pools; an id outside the pool reads some
    page.
    """
    taken = jax.tree.map(lambda x: x.at[ids].get(mode="clip"), pool)
    if isinstance(taken, GroupedPool):
        return dequantize_pages(taken.data, taken.scale, taken.low, taken.bits)
    return dequantize_kv(taken.data, taken.scale) if isinstance(pool, QuantizedPool) else taken


def write_whole_pages(
    pool: GroupedPool, x: Float[Array, "*A K U H"], ids: Int[Array, "*A"]
) -> GroupedPool:
    """Write whole pages; an id of P writes nothing."""
    down, across = pool.scale.shape[-2:]
    parts = quantize_pages(x, pool.bits, x.shape[-2] // down, x.shape[-1] // across)
    put = lambda pages, new: pages.at[ids].set(new, mode="drop")
    data, scale, low = (
        put(pages, new) for pages, new in zip((pool.data, pool.scale, pool.low), parts, strict=True)
    )
    return dataclasses.replace(pool, data=data, scale=scale, low=low)
