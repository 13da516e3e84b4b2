"""Decoders of GGUF's packed blocks, written once for numpy and for jax.numpy.

A decoder takes bytes [..., block_bytes] and returns float32 [..., group]:

    Q4_0, Q5_0, Q8_0, Q3_K, Q6_K    w = d * s * (q - zero)       (s = 1 in the first three)
    Q4_1, Q5_1                      w = d * q + m
    Q2_K, Q4_K, Q5_K                w = d * s * q - dmin * m

Every product is exact in float32: a float16 has 11 significant bits, a sub-scale at most 7 and a
code beside it at most 5, 23 of 24 in all.  Only the one addition rounds, so a compiler that
contracts it into a fused multiply-add gives the same bits, and the host, a jitted program and
gguf-py agree.

A new format is one decoder and one line in `DECODERS`.

Source: the block structs and `dequantize_row_*` of ggml (ggml-common.h, ggml-quants.c;
ggml-org/ggml).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt8

from infer.quant.formats import GGML_TYPES, Format

# A numpy array where the namespace `xp` is numpy; a JAX array or tracer where it is jax.numpy.
XpArray = Any

# Weights that one step of the host path decodes: enough to hide numpy's cost per call.  With more,
# the step's temporaries pass the size at which glibc gives freed memory back to the system, and
# faulting it in again at each step made decoding 3 to 8 times slower (measured from 49152 on).
_CHUNK_WEIGHTS = 1 << 15


def _split(xp: Any, blocks: XpArray, *sizes: int) -> list[XpArray]:
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


def _planes(xp: Any, x: XpArray, bits: int) -> XpArray:
    """Split bytes [..., n] into planes [..., 8 / bits, n], the lowest `bits` bits of each first."""
    mask = (1 << bits) - 1
    planes = [(x >> shift) & mask for shift in range(0, 8, bits)]
    if xp is not np:
        return xp.stack(planes, axis=-2)
    out = np.empty((*x.shape[:-1], len(planes)), f"V{x.shape[-1]}")
    for i, plane in enumerate(planes):
        out[..., i] = plane.view(out.dtype)[..., 0]
    return out.view(np.uint8).reshape(*out.shape, x.shape[-1])


def _bitcast(xp: Any, x: XpArray, dtype: Any) -> XpArray:
    """Read the bits of x [..., n * ratio] as `dtype` [..., n], little end first."""
    dtype = np.dtype(dtype)
    if xp is np:
        return x.view(dtype)
    from jax.lax import bitcast_convert_type  # here, because the host path must not load JAX

    ratio = dtype.itemsize // x.dtype.itemsize
    if ratio > 1:
        x = x.reshape(*x.shape[:-1], x.shape[-1] // ratio, ratio)
    return bitcast_convert_type(x, dtype)


def _half(xp: Any, x: XpArray) -> XpArray:
    """Read bytes [..., 2n] as float16, widened to float32 [..., n]."""
    return _bitcast(xp, x, np.float16).astype(np.float32)


def _centred(x: XpArray, zero: int) -> XpArray:
    """Return the codes minus their zero point, as float32."""
    return (x.astype(np.int8) - zero).astype(np.float32)


def _plus(w: XpArray, m: XpArray) -> XpArray:
    """Return w + m, in numpy without a second array of w's size."""
    w += m
    return w


# ---- one weight a block --------------------------------------------------------------------------


def _f32(xp: Any, blocks: XpArray) -> XpArray:
    return _bitcast(xp, blocks, np.float32)


def _f16(xp: Any, blocks: XpArray) -> XpArray:
    return _half(xp, blocks)


def _bf16(xp: Any, blocks: XpArray) -> XpArray:
    # The upper half of a float32.  By bits, not by a cast: numpy has no bfloat16, and a denormal
    # must survive.
    return _bitcast(xp, _bitcast(xp, blocks, np.uint16).astype(np.uint32) << 16, np.float32)


# ---- 32 weights a block --------------------------------------------------------------------------


def _codes4(xp: Any, low: XpArray) -> XpArray:
    """Codes of 4 bits: the low nibbles are weights 0..15, the high ones 16..31."""
    return _planes(xp, low, 4).reshape(*low.shape[:-1], 32)


def _codes5(xp: Any, high: XpArray, low: XpArray) -> XpArray:
    """Codes of 5 bits: nibbles as in `_codes4`, and above weight i's the i-th bit of `high`."""
    return _codes4(xp, low) | (xp.unpackbits(high, axis=-1, bitorder="little") << 4)


def _q4_0(xp: Any, blocks: XpArray) -> XpArray:
    d, low = _split(xp, blocks, 2, 16)
    return _half(xp, d) * _centred(_codes4(xp, low), 8)


def _q4_1(xp: Any, blocks: XpArray) -> XpArray:
    d, m, low = _split(xp, blocks, 2, 2, 16)
    return _plus(_half(xp, d) * _codes4(xp, low).astype(np.float32), _half(xp, m))


def _q5_0(xp: Any, blocks: XpArray) -> XpArray:
    d, high, low = _split(xp, blocks, 2, 4, 16)
    return _half(xp, d) * _centred(_codes5(xp, high, low), 16)


def _q5_1(xp: Any, blocks: XpArray) -> XpArray:
    d, m, high, low = _split(xp, blocks, 2, 2, 4, 16)
    return _plus(_half(xp, d) * _codes5(xp, high, low).astype(np.float32), _half(xp, m))


def _q8_0(xp: Any, blocks: XpArray) -> XpArray:
    d, codes = _split(xp, blocks, 2, 32)
    return _half(xp, d) * _bitcast(xp, codes, np.int8).astype(np.float32)


# ---- 256 weights a block, in 8 sub-blocks of 32 or 16 of 16 --------------------------------------


def _scales_mins(xp: Any, packed: XpArray) -> tuple[XpArray, XpArray]:
    """Unpack Q4_K's and Q5_K's 12 bytes into 8 scales and 8 minima of 6 bits.

    Bytes 0..3 hold scales 0..3 and bytes 4..7 minima 0..3, in 6 bits each.  Scale 4+i is the low
    nibble of byte 8+i under the top 2 bits of byte i; minimum 4+i is its high nibble under the top
    2 bits of byte 4+i.
    """
    a, b, c = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = xp.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1)
    mins = xp.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _affine(d: XpArray, s: XpArray, codes: XpArray, dmin: XpArray, m: XpArray) -> XpArray:
    """Return d * s * q - dmin * m of d, dmin [..., 1], s, m [..., sub] and codes [..., sub, n]."""
    w = _plus((d * s)[..., None] * codes.astype(np.float32), -(dmin * m)[..., None])
    return w.reshape(*w.shape[:-2], 256)


def _q2_k(xp: Any, blocks: XpArray) -> XpArray:
    sm, low, d, dmin = _split(xp, blocks, 16, 64, 2, 2)
    codes = _planes(xp, low.reshape(*low.shape[:-1], 2, 32), 2).reshape(*low.shape[:-1], 16, 16)
    s, m = (sm & 15).astype(np.float32), (sm >> 4).astype(np.float32)
    return _affine(_half(xp, d), s, codes, _half(xp, dmin), m)


def _q3_k(xp: Any, blocks: XpArray) -> XpArray:
    high, low, packed, d = _split(xp, blocks, 32, 64, 12, 2)
    lead = blocks.shape[:-1]
    # Sub-scale i: 4 bits from a nibble of bytes 0..7 (low nibbles first), 2 bits from bytes 8..11
    # (lowest pairs first).
    scales = _planes(xp, packed[..., :8], 4).reshape(*lead, 16)
    scales = scales | (_planes(xp, packed[..., 8:], 2).reshape(*lead, 16) << 4)
    codes = _planes(xp, low.reshape(*lead, 2, 32), 2).reshape(*lead, 256)
    codes = codes | (_planes(xp, high, 1).reshape(*lead, 256) << 2)  # bit set: no 4 is taken off
    w = (_half(xp, d) * _centred(scales, 32))[..., None] * _centred(codes, 4).reshape(*lead, 16, 16)
    return w.reshape(*lead, 256)


def _q4_k(xp: Any, blocks: XpArray) -> XpArray:
    d, dmin, packed, low = _split(xp, blocks, 2, 2, 12, 128)
    lead = blocks.shape[:-1]
    codes = _planes(xp, low.reshape(*lead, 4, 32), 4).reshape(*lead, 8, 32)
    s, m = _scales_mins(xp, packed)
    return _affine(_half(xp, d), s, codes, _half(xp, dmin), m)


def _q5_k(xp: Any, blocks: XpArray) -> XpArray:
    d, dmin, packed, high, low = _split(xp, blocks, 2, 2, 12, 32, 128)
    lead = blocks.shape[:-1]
    codes = _planes(xp, low.reshape(*lead, 4, 32), 4).reshape(*lead, 8, 32)
    codes = codes | (
        _planes(xp, high, 1) << 4
    )  # bit j of byte i belongs to weight i of sub-block j
    s, m = _scales_mins(xp, packed)
    return _affine(_half(xp, d), s, codes, _half(xp, dmin), m)


def _q6_k(xp: Any, blocks: XpArray) -> XpArray:
    low, high, scales, d = _split(xp, blocks, 128, 64, 16, 2)
    lead = blocks.shape[:-1]
    codes = _planes(xp, low.reshape(*lead, 2, 64), 4).reshape(*lead, 256)
    codes = codes | (_planes(xp, high.reshape(*lead, 2, 32), 2).reshape(*lead, 256) << 4)
    s = _half(xp, d) * _bitcast(xp, scales, np.int8).astype(np.float32)
    w = s[..., None] * _centred(codes, 32).reshape(*lead, 16, 16)
    return w.reshape(*lead, 256)


DECODERS: dict[str, Callable[[Any, XpArray], XpArray]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

# The formats that can be decoded, by name.
FORMATS: dict[str, Format] = {f.name: f for f in GGML_TYPES.values() if f.name in DECODERS}


def decode_blocks(xp: Any, blocks: XpArray, format: Format) -> XpArray:
    """Return float32 [..., group], the weights of packed blocks uint8 [..., block_bytes].

    Args:
        xp: `numpy` for arrays on the host, `jax.numpy` for JAX arrays and tracers.
        blocks: Whole blocks along the last axis.
        format: One of `FORMATS`.

    Raises:
        ValueError: The format has no decoder.
    """
    decode = DECODERS.get(format.name)
    if decode is None or format.layout != "blocks":
        raise ValueError(
            f"{format.name} ({format.layout}) has no block decoder; use one of"
            f" {', '.join(DECODERS)}"
        )
    return decode(xp, blocks)


def dequantize_numpy(
    data: UInt8[np.ndarray, "..."],
    format: Format,
    shape: tuple[int, ...],
    dtype: Any = np.float32,
) -> Shaped[np.ndarray, "..."]:
    """Decode a packed tensor on the host, a cache-sized chunk at a time.

    Needs the result and about 1 MiB beside it, whatever the size; `data` may be a view of a mapped
    file.

    Args:
        data: The packed rows, contiguous, whatever axes they are cut into.
        format: One of `FORMATS`.
        shape: The tensor's logical shape; its last axis holds whole blocks.
        dtype: Of the result; the float32 value is cast once.

    Returns:
        The weights [*shape].

    Raises:
        ValueError: The format has no decoder, or `data` does not hold `shape`.
    """
    num_weights = math.prod(shape)
    row_bytes = format.row_bytes(shape[-1] if shape else 1)
    wanted = math.prod(shape[:-1]) * row_bytes
    if data.nbytes != wanted:
        raise ValueError(
            f"{data.nbytes} bytes do not hold {format.name} of shape {shape}, which takes {wanted};"
            " pass the tensor's own bytes and shape"
        )
    blocks = data.reshape(-1, format.block_bytes)
    out = np.empty((num_weights // format.group, format.group), dtype)
    step = max(1, _CHUNK_WEIGHTS // format.group)
    # A broken scale is infinite or NaN, and so are its weights: that is the value, not an event to
    # warn about.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(out), step):
            out[start : start + step] = decode_blocks(np, blocks[start : start + step], format)
    return out.reshape(shape)
