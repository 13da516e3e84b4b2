"""How a tile of packed weights becomes numbers in registers, a few columns at a time.

The product of activations x with a packed weight is a sum of parts,

    y[o, m] = sum over parts of  scale[o] * sum_j codes[o, j] x[m, columns[j]]
                                 - minus[o] * sum_j x[m, columns[j]]

whose codes are small numbers that a bfloat16 holds exactly (all but NF4's and FP4's levels, which
it rounds).  So the two nibbles of a byte are two parts, whose columns interleave or lie apart, and
no element moves between threads.  Scales are applied to sums, in float32.

| format | a step | parts of it |
|---|---|---|
| planar, 8 bits: int, e4m3, e5m2 | a group, 128 columns at most | 1 |
| planar, 4 bits: int, nf4, fp4, e2m1 | a group, 128 columns at most | 2: even, odd columns |
| planar, 4 bits, groups of 16 | two groups | 2, the codes times their scales |
| Q8_0 | a block of 32 | 1 |
| Q4_0, Q4_1, Q5_0, MXFP4 | a block of 32 | 2: halves |
| Q4_K, Q5_K | a block of 256 | 8 sub-blocks of 32 |
| Q6_K | a block of 256 | 16 sub-blocks of 16 |

The bytes of GGUF's formats are read as they are in the file; their layout is that of
`infer.quant.legacy` and `infer.quant.k_quants`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from infer.pallas.triton_call import load
from infer.quant import codes
from infer.quant.formats import NESTED_GROUP, Format, PlanarFormat
from infer.quant.qarray import NestedScale, QArray

# Columns of a step where the group is wider.
_WIDE = 128


@dataclasses.dataclass(frozen=True)
class Part:
    """Some columns of a tile of weights."""

    codes: Array  # [block_out, J]
    columns: Array  # int32 [J]
    scale: Array | None  # float32 [block_out]; None where the codes are scaled already
    minus: Array | None = None  # float32 [block_out]


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a program reads: references by name, its rows, and the shape of the weight."""

    refs: Mapping[str, Any]
    rows: Array  # int32 [block_out]
    shape: tuple[int, int]

    def bytes(self, at: Array) -> Array:
        """Return bytes [block_out, J] of the rows' data as int32, 0 outside the weight."""
        data = self.refs["data"]
        inside = (self.rows < self.shape[0])[:, None] & (at < data.shape[1])[None, :]
        return load(data, self.rows[:, None], at[None, :], mask=inside, other=0).astype(jnp.int32)

    def vector(self, name: str, row: Array, column: Any) -> Array:
        """Return one entry of `refs[name]` [R, Q] for each row of the tile."""
        ref = self.refs[name]
        inside = (self.rows < self.shape[0]) & (column < ref.shape[1])
        return load(ref, row, column, mask=inside, other=0)

    def half(self, at: Any) -> Array:
        """Return the float16 at byte `at` of each row, float32 [block_out]."""
        data = self.refs["data"]
        inside = (self.rows < self.shape[0]) & (at + 1 < data.shape[1])
        low, high = (
            load(data, self.rows, at + i, mask=inside, other=0).astype(jnp.uint16) for i in (0, 1)
        )
        bits = low | (high << jnp.uint16(8))
        return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)

    def single(self, at: Any) -> Array:
        """Return the byte at `at` of each row, int32 [block_out]."""
        data = self.refs["data"]
        inside = (self.rows < self.shape[0]) & (at < data.shape[1])
        return load(data, self.rows, at, mask=inside, other=0).astype(jnp.int32)


# A format's parts: of a tile and the number of the step.
Parts = Callable[[Tile, Array], Iterator[Part]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a weight is walked through."""

    parts: Parts
    num_steps: int
    operands: Mapping[str, Array]  # what the kernel reads of the weight, by name
    global_scale: Array | None = None  # float32 [], of the whole product


def plan(weight: QArray) -> Plan | None:
    """Return how the weight's parts are read, None for a format that has no such form."""
    format, width = weight.format, weight.shape[1]
    if isinstance(format, PlanarFormat):
        return _planar(weight, format)
    entry = _BLOCKS.get(format.name)
    if entry is None:
        return None
    return Plan(entry, width // format.group, {"data": weight.data})


def plan_of_floats(weight: Array) -> Plan:
    """Return how a float weight [out, in] is read: 64 columns a step, no scales."""
    width = weight.shape[1]

    def parts(tile: Tile, i: Array) -> Iterator[Part]:
        columns = 64 * i + _arange(64)
        inside = (tile.rows < tile.shape[0])[:, None] & (columns < width)[None, :]
        ref = tile.refs["data"]
        codes = load(ref, tile.rows[:, None], columns[None, :], mask=inside, other=0.0)
        yield Part(codes, columns, None)

    return Plan(parts, -(-width // 64), {"data": weight})


def _arange(n: int) -> Array:
    return jnp.arange(n, dtype=jnp.int32)


# ---- planar --------------------------------------------------------------------------------------


def _planar(weight: QArray, format: PlanarFormat) -> Plan | None:
    num_rows, width = weight.shape
    if format.bits not in (4, 8) or format.activations or weight.perm is not None:
        return None
    if format.code not in ("int", "nf4", "fp4", "e2m1", "e4m3", "e5m2"):
        return None
    group = format.group or width
    small = group < 32
    if small and (group != 16 or format.bits != 4 or format.code == "int"):
        return None
    step = 32 if small else min(group, _WIDE)
    if group % step and not small:
        return None
    if step & (step - 1):
        return None
    operands: dict[str, Array] = {"data": weight.data}
    if isinstance(weight.scale, NestedScale):
        operands |= {
            "scale": weight.scale.codes,
            "absmax": weight.scale.absmax,
            "offset": weight.scale.offset.reshape(1),
            "dynamic": jnp.asarray(codes.DYNAMIC),
        }
    else:
        operands["scale"] = weight.scale
    if weight.zero is not None:
        operands["zero"] = weight.zero
    if format.code in ("nf4", "fp4"):
        operands["levels"] = jnp.asarray(codes.LEVELS[format.code])
    span = format.rows or num_rows

    def parts(tile: Tile, i: Array) -> Iterator[Part]:
        first = i * step
        row = tile.rows // span
        number = _numbers(tile, format, row, first // group)
        scale = None if small else _scale(tile, format, row, first // group)
        if format.bits == 8:
            at = first + _arange(step)
            yield Part(number(tile.bytes(at)), at, scale)
            return
        at = _arange(step // 2)
        packed = tile.bytes(first // 2 + at)
        for nibble in (0, 1):
            columns = first + 2 * at + nibble
            coded = number((packed >> (4 * nibble)) & 15)
            if small:
                inside = (tile.rows < num_rows)[:, None] & (columns < width)[None, :]
                each = load(
                    tile.refs["scale"],
                    row[:, None],
                    (columns // group)[None, :],
                    mask=inside,
                    other=0,
                )
                coded = coded * _scale_values(tile, format, each)
            yield Part(coded, columns, scale)

    steps = -(-width // step)
    return Plan(parts, steps, operands, weight.global_scale)


def _numbers(
    tile: Tile, format: PlanarFormat, row: Array, group: Array
) -> Callable[[Array], Array]:
    """Return what turns codes int32 [block_out, J] into numbers float32."""
    if format.code == "int":
        if "zero" in tile.refs:
            zero = tile.vector("zero", row, group).astype(jnp.int32)[:, None]
        else:
            zero = 1 << (format.bits - 1)
        return lambda c: (c - zero).astype(jnp.float32)
    if format.code in ("nf4", "fp4"):
        return lambda c: load(tile.refs["levels"], c)
    return {"e2m1": _e2m1, "e4m3": _e4m3, "e5m2": _e5m2}[format.code]


def _scale(tile: Tile, format: PlanarFormat, row: Array, group: Array) -> Array:
    stored = tile.vector("scale", row, group)
    if format.scale_dtype == "nested":
        index = row * tile.refs["scale"].shape[1] + group
        block = jnp.minimum(index // NESTED_GROUP, tile.refs["absmax"].shape[0] - 1)
        level = load(tile.refs["dynamic"], stored.astype(jnp.int32))
        return level * load(tile.refs["absmax"], block) + load(tile.refs["offset"], 0)
    return _scale_values(tile, format, stored)


def _scale_values(tile: Tile, format: PlanarFormat, stored: Array) -> Array:
    if format.scale_dtype == "e8m0":
        return _e8m0(stored.astype(jnp.int32))
    if format.scale_dtype == "e4m3":
        return _e4m3(stored.astype(jnp.int32))
    return stored.astype(jnp.float32)


# ---- floats from bits ----------------------------------------------------------------------------


def _from_bits(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)


def _e8m0(byte: Array) -> Array:
    """Return 2^(byte - 127); 0 is the subnormal 2^-127, 255 NaN."""
    value = _from_bits(jnp.where(byte == 0, 1 << 22, byte << 23))
    return jnp.where(byte == 255, jnp.float32(np.nan), value)


def _e2m1(code: Array) -> Array:
    """Return the value of a sign, two exponent bits of bias 1 and one mantissa bit."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = _from_bits(((exponent + 126) << 23) | (mantissa << 22))
    value = jnp.where(exponent == 0, mantissa.astype(jnp.float32) * 0.5, normal)
    return jnp.where(code & 8, -value, value)


def _e4m3(byte: Array) -> Array:
    """Return the value of float8_e4m3fn bits: those of a float16 with a bias 8 larger."""
    half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    value = lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
    return jnp.where((byte & 0x7F) == 0x7F, jnp.float32(np.nan), value * 256.0)


def _e5m2(byte: Array) -> Array:
    """Return the value of float8_e5m2 bits: the upper half of a float16's."""
    half = (byte << 8).astype(jnp.uint16)
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)


# ---- GGUF's blocks -------------------------------------------------------------------------------


def _nibbles(packed: Array) -> tuple[Array, Array]:
    return packed & 15, packed >> 4


def _f32(x: Array) -> Array:
    return x.astype(jnp.float32)


def _q8_0(tile: Tile, i: Array) -> Iterator[Part]:
    coded = tile.bytes(34 * i + 2 + _arange(32))
    yield Part(
        _f32(jnp.where(coded > 127, coded - 256, coded)), 32 * i + _arange(32), tile.half(34 * i)
    )


def _q4_0(tile: Tile, i: Array) -> Iterator[Part]:
    scale = tile.half(18 * i)
    for n, coded in enumerate(_nibbles(tile.bytes(18 * i + 2 + _arange(16)))):
        yield Part(_f32(coded - 8), 32 * i + 16 * n + _arange(16), scale)


def _q4_1(tile: Tile, i: Array) -> Iterator[Part]:
    scale, least = tile.half(20 * i), tile.half(20 * i + 2)
    for n, coded in enumerate(_nibbles(tile.bytes(20 * i + 4 + _arange(16)))):
        yield Part(_f32(coded), 32 * i + 16 * n + _arange(16), scale, -least)


def _q5_0(tile: Tile, i: Array) -> Iterator[Part]:
    scale = tile.half(22 * i)
    for n, coded in enumerate(_nibbles(tile.bytes(22 * i + 6 + _arange(16)))):
        # The fifth bits of weights 0..31 are those of four bytes.
        place = 16 * n + _arange(16)
        fifth = (tile.bytes(22 * i + 2 + place // 8) >> (place % 8)[None, :]) & 1
        yield Part(_f32((coded | (fifth << 4)) - 16), 32 * i + place, scale)


def _mxfp4(tile: Tile, i: Array) -> Iterator[Part]:
    # ggml's levels are twice E2M1's, its scale is half of E8M0's.
    scale = _e8m0(tile.single(17 * i))
    for n, coded in enumerate(_nibbles(tile.bytes(17 * i + 1 + _arange(16)))):
        yield Part(_e2m1(coded), 32 * i + 16 * n + _arange(16), scale)


def _scale_min(tile: Tile, base: Array, k: int) -> tuple[Array, Array]:
    """Return sub-block k's scale and minimum of 6 bits, from the 12 bytes at `base`."""
    at = lambda n: tile.single(base + n)
    if k < 4:
        return _f32(at(k) & 63), _f32(at(4 + k) & 63)
    low, s, m = at(4 + k), at(k - 4), at(k)
    return _f32((low & 15) | ((s >> 6) << 4)), _f32((low >> 4) | ((m >> 6) << 4))


def _q4_k(tile: Tile, i: Array) -> Iterator[Part]:
    yield from _q45_k(tile, i, 144, None)


def _q5_k(tile: Tile, i: Array) -> Iterator[Part]:
    yield from _q45_k(tile, i, 176, 16)


def _q45_k(tile: Tile, i: Array, size: int, fifths: int | None) -> Iterator[Part]:
    base = size * i
    d, dmin = tile.half(base), tile.half(base + 2)
    low = base + size - 128
    high = None if fifths is None else tile.bytes(base + fifths + _arange(32))
    for pair in range(4):
        for n, coded in enumerate(_nibbles(tile.bytes(low + 32 * pair + _arange(32)))):
            k = 2 * pair + n
            if high is not None:
                coded = coded | (((high >> k) & 1) << 4)
            scale, least = _scale_min(tile, base + 4, k)
            columns = 256 * i + 32 * k + _arange(32)
            yield Part(_f32(coded), columns, d * scale, dmin * least)


def _q6_k(tile: Tile, i: Array) -> Iterator[Part]:
    base = 210 * i
    d = tile.half(base + 208)
    for k in range(16):
        half, quarter, part = k // 8, k % 8 // 2, k % 2
        place = 16 * part + _arange(16)
        low = tile.bytes(base + 64 * half + 32 * (quarter % 2) + place) >> (4 * (quarter // 2))
        high = tile.bytes(base + 128 + 32 * half + place) >> (2 * quarter)
        coded = (low & 15) | ((high & 3) << 4)
        s = tile.single(base + 192 + k)
        scale = d * _f32(jnp.where(s > 127, s - 256, s))
        yield Part(_f32(coded - 32), 256 * i + 16 * k + _arange(16), scale)


_BLOCKS: dict[str, Parts] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

FORMATS = tuple(_BLOCKS)


def describe(format: Format) -> str:
    """Return a format's name and, where it says more, how its scales lie."""
    if isinstance(format, PlanarFormat):
        return f"{format.name} ({format.bits} bits, group {format.group or 'row'})"
    return format.name
