"""Cached keys and values in 8 and 4 bits, with one scale for each token and key/value head.

| name | data | value |
|---|---|---|
| int8 | int8 [..., H] | data * scale, data in -127..127 |
| float8_e4m3 | float8_e4m3fn [..., H] | data * scale, data in -448..448, never NaN |
| int4 | uint8 [..., H/2] | (nibble - 8) * scale, nibble in 1..15 |

    scale = (1 / L) max_h |x_h|,   data_h = round(x_h / scale),   L = 127, 448 or 7

all in float32, ties to even.  The low nibbles of an int4 row are the first half of the head's
width, the high nibbles the second: bytes become two runs of numbers without moving any.

What is written depends on the token's own numbers alone, and is written once: no bit of a token
depends on its chunk, its batch or what came after it.  The scale is float32: in float16 it would
end at 65,504 and lose bits below 6e-5, and the two bytes it would save are 3% of an int8 head of 64
numbers and 6% of an int4 one.  Where a head holds NaN or infinity, its scale is not finite, and so
is every number read from it: a row that overflows is seen, not hidden.

Source: per-token-per-head scales as in KIVI's values, Liu et al. 2024, arXiv 2402.02750; e4m3:
Micikevicius et al. 2022, arXiv 2209.05433.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Shaped

KV_FORMATS = ("int8", "int4", "float8_e4m3")
# Other names of them, JAX's and vLLM's.
KV_ALIASES = {"float8_e4m3fn": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8": "float8_e4m3"}

_LARGEST = {"int8": 127, "float8_e4m3": 448, "int4": 7}
_DATA = {"int8": jnp.int8, "float8_e4m3": jnp.float8_e4m3fn, "int4": jnp.uint8}
# The smallest normal number: what hardware that flushes subnormals would make of a smaller scale is
# made of it everywhere.
_TINY = float(np.finfo(np.float32).tiny)


def data_dtype(kv_format: str) -> jnp.dtype:
    """Return the dtype of a format's data."""
    return jnp.dtype(_DATA[kv_format])


def data_width(kv_format: str, width: int) -> int:
    """Return the elements of data that a head of `width` numbers takes.

    Raises:
        ValueError: int4 of an odd width.
    """
    if kv_format != "int4":
        return width
    if width % 2:
        raise ValueError(f"int4 needs an even head width, not {width}; use int8")
    return width // 2


def format_of(data: Array) -> str:
    """Return the name of the format whose data have this dtype."""
    return next(name for name, dtype in _DATA.items() if data.dtype == dtype)


def quantize_kv(
    x: Float[Array, "*A H"], kv_format: str, scale_dtype: jnp.dtype | type = jnp.float32
) -> tuple[Shaped[Array, "*A W"], Float[Array, "*A"]]:
    """Return data and scales of keys or values.

    Args:
        x: keys or values.
        kv_format: one of KV_FORMATS, or of their aliases.
        scale_dtype: of the scales; a narrower one is rounded first, and data are taken from it.

    Raises:
        ValueError: another format, or int4 of an odd width.
    """
    kv_format = KV_ALIASES.get(kv_format, kv_format)
    if kv_format not in KV_FORMATS:
        raise ValueError(f"kv_format is {kv_format!r}; use {', '.join(KV_FORMATS)}")
    data_width(kv_format, x.shape[-1])
    largest = _LARGEST[kv_format]
    y = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(y), axis=-1) * np.float32(1 / largest)
    scale = jnp.where(scale < _TINY, 0, scale)
    # Rounded first, so that data fit it; one rounded down pushes the largest value out of range:
    # clip.
    scale = scale.astype(scale_dtype)
    divisor = scale.astype(jnp.float32)[..., None]
    y = jnp.where(divisor == 0, 0, y / jnp.where(divisor == 0, 1, divisor))
    y = jnp.where(jnp.isnan(y), 0, jnp.clip(y, -largest, largest))
    if kv_format == "float8_e4m3":
        return y.astype(jnp.float8_e4m3fn), scale
    y = jnp.round(y)
    if kv_format == "int8":
        return y.astype(jnp.int8), scale
    low, high = jnp.split((y + 8).astype(jnp.uint8), 2, axis=-1)
    return low | (high << jnp.uint8(4)), scale


def dequantize_kv(data: Shaped[Array, "*A W"], scale: Float[Array, "*A"]) -> Float[Array, "*A H"]:
    """Return the float32 numbers that data and scales stand for: the definition of the formats."""
    if data.dtype == jnp.uint8:
        nibbles = jnp.concatenate([data & jnp.uint8(15), data >> jnp.uint8(4)], axis=-1)
        numbers = nibbles.astype(jnp.float32) - 8
    else:
        numbers = data.astype(jnp.float32)
    return numbers * scale.astype(jnp.float32)[..., None]
