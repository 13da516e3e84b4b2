"""Temperature, top-k, top-p, min-p and the draw for a whole vocabulary in one kernel.  Triton,
through jax-triton.

    s_v = (x_v - max x) / T
    kept: the k largest s; of those the smallest set of likeliest whose mass reaches top_p;
          of those s_v >= log(min_p)
    token = argmax over the kept v of s_v + gumbel_v

The sets are exact, without sorting: the edge of each is the largest threshold t with
count(s >= t) >= k, or mass(s >= t) >= top_p mass, found by a search over float32 bit patterns with
seven thresholds a pass over the row; the search ends as soon as a threshold splits off exactly the
set.  Ties at an edge are kept from the lowest id up.  The noise is what `jax.random.gumbel(key,
(V,))` gives, from threefry at the token's id (Salmon et al. 2011), so a token does not depend on
which form drew it; only blocks that hold a kept token compute any.

Source of the draw: Gumbel 1954, Maddison et al. 2014, arXiv 1411.0030.

Grid (B,): a program owns a row, whose passes after the first come from the L2 cache.
Bytes: V floats once from memory; about 2 + 5 passes a filter in use from L2.  FLOPs: about 15 V a
pass.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array
from jaxtyping import Float, Int, UInt32
from triton.language.extra import libdevice

from infer.jax_triton.kernel_call import check_launch, kernel_call

# int32 in which float32 keep their order: the least, the largest (of no id), and those of -inf.
# The largest scaled logit, 0, is 0.
_LOWEST = tl.constexpr(-(2**31))
_NO_ID = tl.constexpr(2**31 - 1)
_MINUS_INF = tl.constexpr(-0x7F800000)
_TINY = tl.constexpr(float(np.finfo(np.float32).tiny))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleBlocks:
    """Logits that a program reads at a time, and its warps."""

    block_vocab: int = 2048
    num_warps: int = 16

    def __post_init__(self) -> None:
        """Check what Triton asks for."""
        if self.block_vocab < 32 or self.block_vocab & (self.block_vocab - 1):
            raise ValueError(f"block_vocab is {self.block_vocab}; use a power of two, 32 or more")
        check_launch(self.num_warps)

    @classmethod
    def for_shape(cls, vocab: int) -> "SampleBlocks":
        """Return the sizes for a vocabulary: small ones need no large block."""
        return cls() if vocab > 4096 else cls(block_vocab=1024, num_warps=4)


@triton.jit
def _logits(row_ptr, start, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return ids and logits of the block at `start`; -inf past the end."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf"))
    return ids, x.to(tl.float32)


@triton.jit
def _scaled(row_ptr, start, top, temperature, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return ids, s = (x - top) / temperature, and bits: int32 with the order of s, where -0.0 and
    0.0 tie and all past the end is lowest.
    """
    ids, x = _logits(row_ptr, start, V, BLOCK)
    s = (x - top) / temperature
    bits = tl.where(s == 0, 0, s.to(tl.int32, bitcast=True))
    bits = tl.where(bits < 0, _LOWEST - bits, bits)
    return ids, s, tl.where(ids < V, bits, _LOWEST)


@triton.jit
def _value(bits):
    """Return the float32 that has these ordered bits; the lowest stand for -inf."""
    raw = tl.where(bits < 0, _LOWEST - bits, bits)
    return tl.where(bits <= _MINUS_INF, -float("inf"), raw.to(tl.float32, bitcast=True))


@triton.jit
def _best(value, ids):
    """Return the lowest id of the largest value."""
    return tl.min(tl.where(value == tl.max(value, 0), ids, _NO_ID), 0)


@triton.jit
def _maximum(row_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit and its lowest id."""
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_ids = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        ids, x = _logits(row_ptr, start, V, BLOCK)
        better = x > best  # never a NaN: no id would equal it
        best = tl.where(better, x, best)
        best_ids = tl.where(better, ids, best_ids)
    return tl.max(best, 0), _best(best, best_ids)


@triton.jit
def _edge(
    row_ptr,
    active,
    lowest,
    want,
    top,
    temperature,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    MASS: tl.constexpr,
):
    """Return the largest t >= lowest whose set of bits >= t has the wanted count, or mass;
    `lowest` if not active.
    """
    low = lowest
    high = tl.where(active, 0, lowest)
    j = tl.arange(0, 8)  # a vector of seven thresholds, and one that is not looked at
    while low < high:
        width = (high - low).to(tl.uint32, bitcast=True)
        stride = width // 8 + 1
        ups = (j + 1).to(tl.uint32) * stride
        thresholds = low + ups.to(tl.int32, bitcast=True)
        sums = tl.zeros([8, BLOCK], tl.float32 if MASS else tl.int32)
        for start in range(0, V, BLOCK):
            _, s, bits = _scaled(row_ptr, start, top, temperature, V, BLOCK)
            reached = bits[None, :] >= thresholds[:, None]
            if MASS:
                sums += tl.where(reached, libdevice.exp(s)[None, :], 0.0)
            else:
                sums += reached.to(tl.int32)
        totals = tl.sum(sums, axis=1)
        inside = (ups <= width) & (j < 7)
        holding = tl.sum((inside & (totals >= want)).to(tl.int32), 0)
        exact = tl.max(tl.where(inside & (totals == want), thresholds, _LOWEST), 0)
        low += holding * stride.to(tl.int32, bitcast=True)
        # Past the last threshold the interval ends where it did.
        room = (high - low).to(tl.uint32, bitcast=True)
        high = tl.where(room < stride, high, low + (stride - 1).to(tl.int32, bitcast=True))
        low = tl.where(exact > _LOWEST, exact, low)
        high = tl.where(exact > _LOWEST, exact, high)
    return low


@triton.jit
def _above(row_ptr, active, threshold, top, temperature, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return count and mass of what reaches `threshold`; zeros, without a pass, if not active."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tl.where(active, V, 0), BLOCK):
        _, s, bits = _scaled(row_ptr, start, top, temperature, V, BLOCK)
        count += (bits >= threshold).to(tl.int32)
        mass += tl.where(bits >= threshold, libdevice.exp(s), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _last_tie(row_ptr, active, edge, room, top, temperature, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the id of the `room`-th entry that ties with the edge; all ids if there are fewer."""
    seen = tl.full([], 0, tl.int32)
    last = tl.full([], -1, tl.int32)
    for start in range(0, tl.where(active, V, 0), BLOCK):
        ids, _, bits = _scaled(row_ptr, start, top, temperature, V, BLOCK)
        tie = (bits == edge).to(tl.int32)
        fitting = (tie > 0) & (seen + tl.cumsum(tie, 0) <= room)
        last = tl.maximum(last, tl.max(tl.where(fitting, ids, -1), 0))
        seen += tl.sum(tie, 0)
    return tl.where(active & (seen > room), last, _NO_ID)


@triton.jit
def _round(x0, x1, rotation: tl.constexpr):
    """Return the two words after a round of threefry."""
    x0 += x1
    return x0, x0 ^ ((x1 << rotation) | (x1 >> (32 - rotation)))


@triton.jit
def _four_rounds(x0, x1, r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr):
    x0, x1 = _round(x0, x1, r0)
    x0, x1 = _round(x0, x1, r1)
    x0, x1 = _round(x0, x1, r2)
    return _round(x0, x1, r3)


@triton.jit
def _gumbel(key0, key1, ids):
    """Return the noise of tokens `ids`: threefry2x32 of the counter (0, id), its words xored."""
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x1 = ids.to(tl.uint32) + key1
    x0 = tl.zeros_like(x1) + key0
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = _four_rounds(x0 + key1, x1 + key2 + 1, 17, 29, 16, 24)
    x0, x1 = _four_rounds(x0 + key2, x1 + key0 + 2, 13, 15, 26, 6)
    x0, x1 = _four_rounds(x0 + key0, x1 + key1 + 3, 17, 29, 16, 24)
    x0, x1 = _four_rounds(x0 + key1, x1 + key2 + 4, 13, 15, 26, 6)
    word = (x0 + key2) ^ (x1 + key0 + 5)
    uniform = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    # The logarithm that Pallas calls, so that both forms draw alike.
    return -libdevice.log(-libdevice.log(tl.maximum(uniform, _TINY)))


@triton.jit
def _draw(
    row_ptr,
    active,
    edge,
    last,
    floor,
    key0,
    key1,
    top,
    temperature,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the kept id with the largest s + noise."""
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_ids = tl.arange(0, BLOCK)
    for start in range(0, tl.where(active, V, 0), BLOCK):
        ids, s, bits = _scaled(row_ptr, start, top, temperature, V, BLOCK)
        kept = (bits > edge) | ((bits == edge) & (ids <= last))
        kept = kept & (s >= floor) & (ids < V)
        if tl.max(kept.to(tl.int32), 0) > 0:
            score = tl.where(kept, s + _gumbel(key0, key1, ids), -float("inf"))
            better = score > best
            best = tl.where(better, score, best)
            best_ids = tl.where(better, ids, best_ids)
    return _best(best, best_ids)


@triton.jit
def sample_kernel(
    # inputs
    logits_ptr,  # [B, V]
    floats_ptr,  # f32 [B, 3]: temperature, top_p, log(min_p)
    top_k_ptr,  # int32 [B], V or more is off
    key_ptr,  # uint32 [B, 2]
    # outputs
    token_ptr,  # int32 [B]
    # constants
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
):
    """Store the token of one row."""
    b = tl.program_id(0)
    row_ptr = logits_ptr + b * V
    temperature = tl.load(floats_ptr + 3 * b)
    top_p = tl.load(floats_ptr + 3 * b + 1)
    floor = tl.load(floats_ptr + 3 * b + 2)
    top_k = tl.load(top_k_ptr + b)
    random = temperature >= GREEDY_BELOW
    top, greedy = _maximum(row_ptr, V, BLOCK)
    t = tl.where(random, temperature, 1.0)

    uses_k = random & (top_k < V)
    lowest = tl.full([], _LOWEST, tl.int32)
    edge_k = _edge(row_ptr, uses_k, lowest, top_k, top, t, V, BLOCK, MASS=False)
    # Thresholds one apart: what lies strictly above an edge, and its ties.
    next_k = tl.where(edge_k < _NO_ID, edge_k + 1, edge_k)
    above_k, mass_k = _above(row_ptr, uses_k, next_k, top, t, V, BLOCK)
    room_k = tl.where(uses_k, top_k - above_k, _NO_ID)

    uses_p = random & (top_p < 1.0)
    ties_k = tl.where(uses_k, room_k.to(tl.float32) * libdevice.exp(_value(edge_k)), 0.0)
    # Ties that are there may be fewer than the room for them: no set holds more than all.
    _, everything = _above(row_ptr, uses_p, edge_k, top, t, V, BLOCK)
    total = tl.where(uses_k, tl.minimum(everything, mass_k + ties_k), everything)
    want = tl.maximum(top_p, _TINY) * total
    edge = _edge(row_ptr, uses_p, edge_k, want, top, t, V, BLOCK, MASS=True)
    next_p = tl.where(edge < _NO_ID, edge + 1, edge)
    _, mass = _above(row_ptr, uses_p, next_p, top, t, V, BLOCK)
    fits = tl.ceil((want - mass) / tl.maximum(libdevice.exp(_value(edge)), _TINY))
    fits = tl.minimum(tl.maximum(fits, 0.0), 2.0**30).to(tl.int32)
    room_p = tl.where(uses_p, fits, _NO_ID)

    room = tl.minimum(room_p, tl.where(edge == edge_k, room_k, _NO_ID))
    last = _last_tie(row_ptr, random & (uses_k | uses_p), edge, room, top, t, V, BLOCK)
    key0 = tl.load(key_ptr + 2 * b)
    key1 = tl.load(key_ptr + 2 * b + 1)
    drawn = _draw(row_ptr, random, edge, last, floor, key0, key1, top, t, V, BLOCK)
    tl.store(token_ptr + b, tl.where(random, drawn, greedy))


def sample(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    key_data: UInt32[Array, "B 2"],
    *,
    greedy_below: float = 1e-5,
    blocks: SampleBlocks | None = None,
) -> Int[Array, " B"]:
    """Return one token a row.

    Args:
        logits: processed logits, -inf for what must not be drawn.
        temperature: of each row; below `greedy_below` the row's token is the argmax, lowest id
            first.
        top_k: keep so many; below 1 or V or more keeps all.
        top_p: keep the likeliest up to this mass; 1 keeps all.
        min_p: keep what is at least so likely relative to the likeliest; 0 keeps all.
        key_data: threefry key of each row's draw.
        greedy_below: temperatures under this are 0.
        blocks: the kernel's sizes.

    Raises:
        NotImplementedError: `jax_threefry_partitionable` is off, whose noise this does not draw.
        ValueError: an argument has another number of rows than `logits`.
    """
    if not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"sample in jax_triton: logits {logits.shape} of {logits.dtype} with "
            "jax_threefry_partitionable=False; turn it on (JAX's default) or use "
            "implementation='xla'"
        )
    batch, vocab = logits.shape
    columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, column in columns.items():
        if column.shape != (batch,):
            raise ValueError(f"{name} is {column.shape}; give one a row of logits, ({batch},)")
    if key_data.shape != (batch, 2):
        raise ValueError(f"key_data is {key_data.shape}; give two words a row, ({batch}, 2)")
    blocks = blocks or SampleBlocks.for_shape(vocab)
    off = (top_k < 1) | (top_k >= vocab)
    return kernel_call(
        sample_kernel,
        logits,
        jnp.stack([temperature, top_p, jnp.log(min_p)], axis=1),
        jnp.where(off, vocab, top_k),
        key_data,
        name="sample",
        grid=(batch,),
        out_shape=jax.ShapeDtypeStruct((batch,), jnp.int32),
        num_warps=blocks.num_warps,
        V=vocab,
        BLOCK=blocks.block_vocab,
        GREEDY_BELOW=greedy_below,
    )
