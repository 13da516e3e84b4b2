"""Bits and bytes, written once for numpy and for jax.numpy: what the block decoders are made of."""

from typing import Any

import numpy as np

# A numpy array where the namespace `xp` is numpy; a JAX array or tracer where it is jax.numpy.
XpArray = Any


def split(xp: Any, blocks: XpArray, *sizes: int) -> list[XpArray]:
    """Cut blocks [..., sum(sizes)] into fields [..., size].

    On the host each field is copied out as one strided run of opaque items, several times faster
    than by rows of bytes.
    """
    lead, starts = blocks.shape[:-1], [sum(sizes[:i]) for i in range(len(sizes))]
    if xp is not np:
        return [
            blocks[..., start : start + size] for start, size in zip(starts, sizes, strict=True)
        ]
    names = [f"f{i}" for i in range(len(sizes))]
    formats = [f"V{size}" for size in sizes]
    struct = np.dtype({"names": names, "formats": formats, "offsets": starts})
    items = np.ascontiguousarray(blocks).reshape(-1).view(struct)
    return [
        np.ascontiguousarray(items[name]).view(np.uint8).reshape(*lead, size)
        for name, size in zip(names, sizes, strict=True)
    ]


def planes(xp: Any, x: XpArray, bits: int) -> XpArray:
    """Split bytes [..., n] into planes [..., 8 / bits, n], the lowest `bits` bits of each first."""
    mask = (1 << bits) - 1
    planes = [(x >> shift) & mask for shift in range(0, 8, bits)]
    if xp is not np:
        return xp.stack(planes, axis=-2)
    out = np.empty((*x.shape[:-1], len(planes)), f"V{x.shape[-1]}")
    for i, plane in enumerate(planes):
        out[..., i] = plane.view(out.dtype)[..., 0]
    return out.view(np.uint8).reshape(*out.shape, x.shape[-1])


def bitcast(xp: Any, x: XpArray, dtype: Any) -> XpArray:
    """Read the bits of x [..., n * ratio] as `dtype` [..., n], little end first."""
    dtype = np.dtype(dtype)
    if xp is np:
        return x.view(dtype)
    from jax.lax import bitcast_convert_type  # here, because the host path must not load JAX

    ratio = dtype.itemsize // x.dtype.itemsize
    if ratio > 1:
        x = x.reshape(*x.shape[:-1], x.shape[-1] // ratio, ratio)
    return bitcast_convert_type(x, dtype)


def half(xp: Any, x: XpArray) -> XpArray:
    """Read bytes [..., 2n] as float16, widened to float32 [..., n]."""
    return bitcast(xp, x, np.float16).astype(np.float32)


def centred(x: XpArray, zero: int) -> XpArray:
    """Return the codes minus their zero point, as float32."""
    return (x.astype(np.int8) - zero).astype(np.float32)


def plus(w: XpArray, m: XpArray) -> XpArray:
    """Return w + m, in numpy without a second array of w's size."""
    w += m
    return w


def fields(xp: Any, x: XpArray, bits: int, count: int) -> XpArray:
    """Split integers [..., n] into fields [..., n * count] of `bits` bits, each integer's in order.

    The lowest bits come first.  (In `planes` all first fields come before all second ones.)
    """
    mask = (1 << bits) - 1
    parts = xp.stack([(x >> (bits * i)) & mask for i in range(count)], axis=-1)
    return parts.reshape(*x.shape[:-1], x.shape[-1] * count)


def lookup(xp: Any, table: np.ndarray, index: XpArray) -> XpArray:
    """Return the entries [...] or rows [..., n] of a table at unsigned `index` [...]."""
    if xp is not np:
        return xp.take(xp.asarray(table), index, axis=0, mode="clip")
    if table.ndim == 1:
        return table.take(index)
    # A row is taken as one number, several times faster than by items.
    rows = table.view(f"u{table.itemsize * table.shape[1]}")[:, 0]
    return rows.take(index)[..., None].view(table.dtype)
