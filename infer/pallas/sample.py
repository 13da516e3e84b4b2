"""Temperature, top-k, top-p, min-p and the draw for a whole vocabulary in one kernel.
Pallas-Triton.

    s_v = (x_v - max x) / T
    kept: the k largest s; of those the smallest set of likeliest whose mass reaches top_p;
          of those s_v >= log(min_p)
    token = argmax over the kept v of s_v + gumbel_v

The sets are exact, without sorting: the edge of each is the largest threshold t with
count(s >= t) >= k, or mass(s >= t) >= top_p mass, found by a search over float32 bit patterns with
seven thresholds a pass over the row, 3 bits each; the search ends as soon as a threshold splits off
exactly the set.  Ties at an edge are kept from the lowest id up.  The noise is what
`jax.random.gumbel(key, (V,))` gives, from threefry at the token's id (Salmon et al. 2011), so a
token does not depend on which form drew it; only blocks that hold a kept token compute any.

Source of the draw: Gumbel 1954, Maddison et al. 2014, arXiv 1411.0030.

Grid (B,): a program owns a row, whose passes after the first come from the L2 cache.
Bytes: V floats once from memory; about 2 + 5 passes a filter in use from L2.  FLOPs: about 15 V a
pass.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int, UInt32

from infer.pallas.triton_call import check_launch, load, store, triton_call

# Thresholds tried in one pass: the search interval shrinks by one more than this.
_PIVOTS = 7
_LOWEST = np.int32(-(2**31))
_NO_ID = np.int32(2**31 - 1)
# Ordered bits of 0, the largest scaled logit, and of -inf.
_MAXIMUM = np.int32(0)
_MINUS_INF = np.int32(-0x7F800000)


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


def _ordered(x: Array) -> Array:
    """Return int32 whose order is that of the float32 `x`; -0.0 and 0.0 tie."""
    bits = jnp.where(x == 0, 0, lax.bitcast_convert_type(x, jnp.int32))
    return jnp.where(bits < 0, _LOWEST - bits, bits)


def _gumbel(key0: Array, key1: Array, ids: Array) -> Array:
    """Return the noise of tokens `ids`: threefry2x32 of the counter (0, id), its words xored."""
    rotate = lambda x, r: (x << np.uint32(r)) | (x >> np.uint32(32 - r))
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = jnp.zeros_like(ids, jnp.uint32) + keys[0], ids.astype(jnp.uint32) + keys[1]
    for i in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = x0 ^ rotate(x1, r)
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + np.uint32(i + 1)
    mantissa = ((x0 ^ x1) >> np.uint32(9)) | np.uint32(0x3F800000)
    uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    uniform = jnp.maximum(uniform, np.float32(np.finfo(np.float32).tiny))
    return -jnp.log(-jnp.log(uniform))


class _Row:
    """Passes of one program over its row of logits."""

    def __init__(self, ref: Any, block: int) -> None:
        self.ref, self.block, self.vocab = ref, block, ref.shape[1]
        self.b = pl.program_id(0)
        self.top, self.temperature = jnp.float32(0), jnp.float32(1)

    def logits(self, i: Array) -> tuple[Array, Array]:
        """Return ids and logits of block `i`; -inf past the end."""
        ids = i * self.block + jnp.arange(self.block, dtype=jnp.int32)
        x = load(self.ref, self.b, ids, mask=ids < self.vocab, other=-jnp.inf)
        return ids, x.astype(jnp.float32)

    def scaled(self, i: Array) -> tuple[Array, Array, Array]:
        """Return ids, (x - max) / temperature, and its ordered bits, of block `i`."""
        ids, x = self.logits(i)
        s = (x - self.top) / self.temperature
        return ids, s, jnp.where(ids < self.vocab, _ordered(s), _LOWEST)

    def num_blocks(self, active: Array) -> Array:
        """Return the trips of a loop over the row; 0 if not active."""
        # Not jnp.where, whose choice between two constants Pallas-Triton types as a bool.
        return active.astype(jnp.int32) * pl.cdiv(self.vocab, self.block)

    def fold(self, body: Callable[[Array, Any], Any], start: Any) -> Any:
        """Return `body` folded over all blocks of the row, in order."""
        return lax.fori_loop(0, pl.cdiv(self.vocab, self.block), body, start)

    def sums(self, weight: Callable[[Array], Array], thresholds: list[Array]) -> list[Array]:
        """Return, for each threshold, the sum of `weight(s)` over s whose bits reach it."""

        def body(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            _, s, bits = self.scaled(i)
            w = weight(s)
            return tuple(
                total + jnp.where(bits >= t, w, jnp.zeros_like(w))
                for total, t in zip(totals, thresholds, strict=True)
            )

        zero = jnp.zeros((self.block,), weight(jnp.zeros((1,), jnp.float32)).dtype)
        return [jnp.sum(x) for x in self.fold(body, (zero,) * len(thresholds))]


def _best(value: Array, ids: Array) -> Array:
    """Return the lowest id of the largest value."""
    return jnp.min(jnp.where(value == jnp.max(value), ids, _NO_ID))


def _maximum(row: _Row) -> tuple[Array, Array]:
    """Return the largest logit and its lowest id."""

    def body(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        ids, x = row.logits(i)
        better = x > best[0]  # never a NaN: no id would equal it
        return jnp.where(better, x, best[0]), jnp.where(better, ids, best[1])

    lanes = jnp.arange(row.block, dtype=jnp.int32)
    x, ids = row.fold(body, (jnp.full((row.block,), -jnp.inf, jnp.float32), lanes))
    return jnp.max(x), _best(x, ids)


def _edge(
    row: _Row, active: Array, lowest: Array, weight: Callable[[Array], Array], want: Array
) -> Array:
    """Return the largest t >= lowest with sum of weight(s >= t) >= want; `lowest` if not active."""

    def step(span: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = span
        width = (high - low).astype(jnp.uint32)
        stride = width // np.uint32(_PIVOTS + 1) + np.uint32(1)
        ups = [np.uint32(j + 1) * stride for j in range(_PIVOTS)]
        thresholds = [low + up.astype(jnp.int32) for up in ups]
        sums = row.sums(weight, thresholds)
        lowest_bits = jnp.zeros((), jnp.int32) + _LOWEST
        holding, exact = jnp.int32(0), lowest_bits
        for up, threshold, total in zip(ups, thresholds, sums, strict=True):
            inside = up <= width
            holding = holding + (inside & (total >= want)).astype(jnp.int32)
            exact = jnp.where(inside & (total == want), threshold, exact)
        low = low + holding * stride.astype(jnp.int32)
        last = (stride - np.uint32(1)).astype(jnp.int32)
        # Past the last threshold the interval ends where it did.
        room = (high - low).astype(jnp.uint32)
        high = jnp.where(room < stride, high, low + last)
        found = exact > _LOWEST
        return jnp.where(found, exact, low), jnp.where(found, exact, high)

    high = jnp.where(active, _MAXIMUM, lowest)
    return lax.while_loop(lambda span: span[0] < span[1], step, (lowest, high))[0]


def _kernel(
    # inputs
    logits_ref,  # [B, V]
    floats_ref,  # f32 [B, 3]: temperature, top_p, log(min_p)
    top_k_ref,  # int32 [B], V or more is off
    key_ref,  # uint32 [B, 2]
    # outputs
    token_ref,  # int32 [B]
    *,
    block: int,
    greedy_below: float,
) -> None:
    row = _Row(logits_ref, block)
    b = row.b
    temperature, top_p, floor = (load(floats_ref, b, i) for i in range(3))
    top_k = load(top_k_ref, b)
    random = temperature >= greedy_below
    row.top, greedy = _maximum(row)
    row.temperature = jnp.where(random, temperature, 1.0)

    count = lambda s: jnp.ones_like(s, jnp.int32)
    lowest = jnp.zeros((), jnp.int32) + _LOWEST
    uses_k = random & (top_k < row.vocab)
    edge_k = _edge(row, uses_k, lowest, count, top_k)
    next_up = lambda t: jnp.where(t < _NO_ID, t + 1, t)
    # Thresholds one apart: what lies strictly above an edge, and its ties.
    above_k, mass_k = _above(row, uses_k, next_up(edge_k))
    room_k = jnp.where(uses_k, top_k - above_k, _NO_ID)

    uses_p = random & (top_p < 1.0)
    value_k = _value(edge_k)
    ties_k = jnp.where(uses_k, room_k.astype(jnp.float32) * jnp.exp(value_k), 0.0)
    # Ties that are there may be fewer than the room for them: no set holds more than all.
    everything = _mass(row, uses_p, edge_k)
    total = jnp.where(uses_k, jnp.minimum(everything, mass_k + ties_k), everything)
    want = jnp.maximum(top_p, np.float32(np.finfo(np.float32).tiny)) * total
    edge = _edge(row, uses_p, edge_k, jnp.exp, want)
    above, mass = _above(row, uses_p, next_up(edge))
    share = jnp.exp(_value(edge))
    fits = jnp.ceil((want - mass) / jnp.maximum(share, np.float32(1e-38)))
    room_p = jnp.where(uses_p, jnp.clip(fits, 0.0, 2.0**30).astype(jnp.int32), _NO_ID)
    del above
    room = jnp.minimum(room_p, jnp.where(edge == edge_k, room_k, _NO_ID))
    last = _last_tie(row, random & (uses_k | uses_p), edge, room)
    drawn = _draw(row, random, edge, last, floor, load(key_ref, b, 0), load(key_ref, b, 1))
    store(token_ref, b, value=jnp.where(random, drawn, greedy))


def _value(bits: Array) -> Array:
    """Return the float32 that has these ordered bits; the lowest stand for -inf."""
    raw = jnp.where(bits < 0, _LOWEST - bits, bits)
    value = lax.bitcast_convert_type(raw, jnp.float32)
    return jnp.where(bits <= _MINUS_INF, -jnp.inf, value)


def _above(row: _Row, active: Array, threshold: Array) -> tuple[Array, Array]:
    """Return count and mass of what reaches `threshold`; zeros, without a pass, if not active."""

    def body(i: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        _, s, bits = row.scaled(i)
        kept = bits >= threshold
        return totals[0] + kept.astype(jnp.int32), totals[1] + jnp.where(kept, jnp.exp(s), 0.0)

    start = jnp.zeros((row.block,), jnp.int32), jnp.zeros((row.block,), jnp.float32)
    end = row.num_blocks(active)
    count, mass = lax.fori_loop(0, end, body, start)
    return jnp.sum(count), jnp.sum(mass)


def _mass(row: _Row, active: Array, threshold: Array) -> Array:
    return _above(row, active, threshold)[1]


def _last_tie(row: _Row, active: Array, edge: Array, room: Array) -> Array:
    """Return the id of the `room`-th entry that ties with the edge; all ids if there are fewer."""

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        seen, last = carry
        ids, _, bits = row.scaled(i)
        tie = (bits == edge).astype(jnp.int32)
        rank = seen + jnp.cumsum(tie)
        fitting = (tie > 0) & (rank <= room)
        last = jnp.maximum(last, jnp.max(jnp.where(fitting, ids, -1)))
        return seen + jnp.sum(tie), last

    end = row.num_blocks(active)
    seen, last = lax.fori_loop(0, end, body, (jnp.int32(0), jnp.int32(-1)))
    return jnp.where(active & (seen > room), last, _NO_ID)


def _draw(
    row: _Row, active: Array, edge: Array, last: Array, floor: Array, key0: Array, key1: Array
) -> Array:
    """Return the kept id with the largest s + noise."""

    def body(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        ids, s, bits = row.scaled(i)
        kept = (bits > edge) | ((bits == edge) & (ids <= last))
        kept = kept & (s >= floor) & (ids < row.vocab)

        def look(best: tuple[Array, Array]) -> tuple[Array, Array]:
            score = jnp.where(kept, s + _gumbel(key0, key1, ids), -jnp.inf)
            better = score > best[0]
            return jnp.where(better, score, best[0]), jnp.where(better, ids, best[1])

        return lax.cond(jnp.max(kept.astype(jnp.int32)) > 0, look, lambda best: best, best)

    lanes = jnp.arange(row.block, dtype=jnp.int32)
    start = jnp.full((row.block,), -jnp.inf, jnp.float32), lanes
    end = row.num_blocks(active)
    score, ids = lax.fori_loop(0, end, body, start)
    return _best(score, ids)


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
    interpret: bool = False,
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
        interpret: run on any device, slowly.

    Raises:
        NotImplementedError: `jax_threefry_partitionable` is off, whose noise this does not draw.
        ValueError: an argument has another number of rows than `logits`.
    """
    if not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"sample in Triton: logits {logits.shape} of {logits.dtype} with "
            "jax_threefry_partitionable=False; turn it on (JAX's default) or use "
            "implementation='xla'"
        )
    batch, vocab = logits.shape
    if not batch or not vocab:
        raise ValueError(f"logits is {logits.shape}; give at least one row and one id")
    columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, column in columns.items():
        if column.shape != (batch,):
            raise ValueError(f"{name} is {column.shape}; give one a row of logits, ({batch},)")
    if key_data.shape != (batch, 2):
        raise ValueError(f"key_data is {key_data.shape}; give two words a row, ({batch}, 2)")
    blocks = blocks or SampleBlocks.for_shape(vocab)
    off = (top_k < 1) | (top_k >= vocab)
    return triton_call(
        functools.partial(_kernel, block=blocks.block_vocab, greedy_below=greedy_below),
        logits,
        jnp.stack([temperature, top_p, jnp.log(min_p)], axis=1),
        jnp.where(off, vocab, top_k),
        key_data,
        name="sample",
        grid=(batch,),
        out_shape=jax.ShapeDtypeStruct((batch,), jnp.int32),
        num_warps=blocks.num_warps,
        interpret=interpret,
    )


def sample_reference(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    key_data: Array,
) -> Array:
    """Compute the same by sorting, in plain jnp; equal values keep the order of their ids."""

    def one(x: Array, t: Array, k: Array, p: Array, low: Array, key: Array) -> Array:
        vocab = x.shape[0]
        s = (x - jnp.max(x)) / jnp.where(t < 1e-5, 1.0, t)
        order = jnp.argsort(-s, stable=True)
        rank = jnp.zeros_like(order).at[order].set(jnp.arange(vocab, dtype=order.dtype))
        s = jnp.where(rank < jnp.where((k < 1) | (k > vocab), vocab, k), s, -jnp.inf)
        mass = jax.nn.softmax(s)
        before = (jnp.cumsum(mass[order]) - mass[order])[rank]
        s = jnp.where((before < p) | (p >= 1), s, -jnp.inf)
        s = jnp.where(jnp.exp(s) >= low, s, -jnp.inf)
        noise = jax.random.gumbel(jax.random.wrap_key_data(key), (vocab,), jnp.float32)
        return jnp.where(t < 1e-5, jnp.argmax(x), jnp.argmax(s + noise)).astype(jnp.int32)

    return jax.vmap(one)(logits, temperature, top_k, top_p, min_p, key_data)
