"""KIVI: cached keys and values in 2 or 4 bits under a scale and a least number for each group.

    value = code * scale + low,   scale = (max - min) / (2^bits - 1),   low = min of the group

Keys have outliers in few channels: a group is a channel over the tokens of a page.  Values have
none: a group is 32 channels of one token.  Scale and low are float16, and codes are taken from
them as they are stored.  A group that holds NaN, or numbers beyond float16, is NaN: seen, not
hidden.

Source: Liu et al. 2024, arXiv 2402.02750.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, UInt8

from infer.quant import codes
from infer.quant.rtn import quotient

# The names of `kv_dtype`, and their bits.
KIVI_BITS = {"kivi4": 4, "kivi2": 2}
# Channels of a token's value that share a scale, where they divide the head.
VALUE_GROUP = 32


def value_group(width: int) -> int:
    """Return how many channels of a value share a scale: 32, or the whole head."""
    return VALUE_GROUP if width % VALUE_GROUP == 0 else width


def quantize_pages(
    x: Float[Array, "*N U H"], bits: int, tokens: int, channels: int
) -> tuple[UInt8[Array, "*N U W"], Float[Array, "*N UT HC"], Float[Array, "*N UT HC"]]:
    """Return data, scales and least numbers of pages.

    Args:
        x: keys or values of whole pages.
        bits: 2 or 4.
        tokens: of a group; divides U.
        channels: of a group; divides H.
    """
    *lead, size, width = x.shape
    groups = x.astype(jnp.float32).reshape(
        *lead, size // tokens, tokens, width // channels, channels
    )
    low, high = groups.min((-3, -1)), groups.max((-3, -1))
    low = low.astype(jnp.float16)
    levels = float((1 << bits) - 1)
    scale = quotient(high - low.astype(jnp.float32), levels).astype(jnp.float16)
    by, least = (y.astype(jnp.float32)[..., :, None, :, None] for y in (scale, low))
    y = quotient(groups - least, jnp.where(by == 0, jnp.float32(1), by))
    y = jnp.where(jnp.isfinite(y), jnp.clip(jnp.round(y), 0, levels), 0).astype(jnp.uint8)
    scale = jnp.where(jnp.isfinite(low) & jnp.isfinite(scale), scale, jnp.float16(np.nan))
    return codes.pack(y.reshape(x.shape), bits), scale, low


def dequantize_pages(
    data: UInt8[Array, "*N U W"],
    scale: Float[Array, "*N UT HC"],
    low: Float[Array, "*N UT HC"],
    bits: int,
) -> Float[Array, "*N U H"]:
    """Return the float32 numbers of pages: the definition of the format."""
    *lead, size, packed = data.shape
    width = packed * 8 // bits
    down, across = scale.shape[-2:]
    coded = codes.unpack(data, bits, width).astype(jnp.float32)
    coded = coded.reshape(*lead, down, size // down, across, width // across)
    by, least = (y.astype(jnp.float32)[..., :, None, :, None] for y in (scale, low))
    return (coded * by + least).reshape(*lead, size, width)
