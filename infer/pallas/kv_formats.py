"""How paged kernels read keys and values: floats, or 8 and 4 bits with a scale a token and head.

| pool dtype | data | scales |
|---|---|---|
| bfloat16, float16, float32 | [P, K, U, H] | none |
| int8, float8_e4m3fn | [P, K, U, H] | [P, K, U] |
| uint8 (int4) | [P, K, U, H/2] | [P, K, U] |

What data and scales stand for: `infer.quant.kv`.  Scales are float32 or bfloat16.  A tile of int4
bytes becomes two tiles of numbers without moving any element.  A product with data is scaled after
its sum: q·k = scale (q·data), and p·v = (p scale)·data, both exact but for the rounding of
(p scale) to q's dtype.
"""

import jax.numpy as jnp
from jax import Array, lax


def num_parts(dtype: jnp.dtype) -> int:
    """Return the tiles of numbers that one tile of data holds."""
    return 2 if dtype == jnp.uint8 else 1


def unpack(data: Array, dtype: jnp.dtype) -> tuple[Array, ...]:
    """Return a tile's numbers before scaling, in `dtype`; inside a kernel."""
    if data.dtype == jnp.uint8:
        bits = data.astype(jnp.int32)
        number = lambda nibble: (nibble - 8).astype(jnp.float32).astype(dtype)
        return number(bits & 15), number(bits >> 4)
    if data.dtype == jnp.int8:
        return (data.astype(jnp.float32).astype(dtype),)
    if data.dtype == jnp.float8_e4m3fn:
        return (_e4m3(data).astype(dtype),)
    return (data.astype(dtype),)


def _e4m3(data: Array) -> Array:
    """Return e4m3 as float32 by its bits: GPUs before 8.9 have no instruction for it.

    The four exponent and three mantissa bits stand in float16's places; 2^8 makes up for the
    difference of the exponents' biases, subnormals included.
    """
    bits = lax.bitcast_convert_type(data, jnp.uint8).astype(jnp.uint16)
    half = ((bits & jnp.uint16(0x80)) << jnp.uint16(8)) | (
        (bits & jnp.uint16(0x7F)) << jnp.uint16(7)
    )
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * 256.0


def check_pools(
    op: str,
    k_pages: Array,
    v_pages: Array,
    k_scales: Array | None,
    v_scales: Array | None,
    width: int,
) -> None:
    """Check that pools and scales are of one format and hold heads of `width`.

    Raises:
        ValueError: they do not fit each other.
        NotImplementedError: a dtype that kernels do not read.
    """
    floats = (jnp.float32, jnp.bfloat16, jnp.float16)
    quantised = (jnp.int8, jnp.uint8, jnp.float8_e4m3fn)
    if k_pages.dtype not in (*floats, *quantised):
        raise NotImplementedError(
            f"{op} in Triton reads no pools of {k_pages.dtype}, "
            f"shape {k_pages.shape}; see infer.pallas.kv_formats"
        )
    if v_pages.dtype != k_pages.dtype or v_pages.shape != k_pages.shape:
        raise ValueError(
            f"{op}: k_pages are {k_pages.dtype}{list(k_pages.shape)}, v_pages "
            f"{v_pages.dtype}{list(v_pages.shape)}; give both one dtype and shape"
        )
    if k_pages.shape[-1] * num_parts(k_pages.dtype) != width:
        raise ValueError(
            f"{op}: pools of {k_pages.dtype} {k_pages.shape[-1]} wide do not hold "
            f"heads of {width}; q's last axis and the pools' must agree"
        )
    need = k_pages.dtype in quantised
    if need != (k_scales is not None) or need != (v_scales is not None):
        raise ValueError(
            f"{op}: pools of {k_pages.dtype} need "
            f"{'k_scales and v_scales' if need else 'no scales'}"
        )
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is not None and scales.shape != k_pages.shape[:3]:
            raise ValueError(
                f"{op}: {name} are {list(scales.shape)}, not "
                f"{list(k_pages.shape[:3])}: one scale a token and head"
            )
