"""What the Hopper attention kernels share: two warpgroups that consume blocks of keys and values
while a third fetches them.

    s = cap(scale q k^T);  m' = max(m, rowmax s);  p = exp(s - m');  l' = l exp(m - m') + rowsum p
    o' = o exp(m - m') + p v;          at the end  o / l  and  lse = m + log l

in base 2, with log2(e) folded into the scale.  Source: Dao 2023, arXiv 2307.08691 (algorithm 1);
warp specialisation and the ping-pong of two consumers: Shah et al. 2024, arXiv 2407.08608, sections
3.1 and 3.2.

A block of the grid owns `block_q` = 2 x 64 queries of one head.  Blocks of keys from `start` to
`stop` pass through `num_stages` slots of shared memory; each slot of K and of V has a barrier
"loaded" (the producer's TMA has written it) and one "free" (both consumers have read it).  While
one consumer computes its softmax, the other has the tensor cores: `turn` hands them over.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infer.pallas.mosaic_call import (
    MAX_SHARED_BYTES,
    TILE_ROWS,
    WARPGROUP,
    WARPGROUP_ROWS,
    across,
    add_product,
    full,
    iota,
    rows_times_columns,
    tile,
)

NUM_CONSUMERS = 2
PRODUCER = NUM_CONSUMERS  # the warpgroup that fetches
BLOCK_Q = NUM_CONSUMERS * WARPGROUP_ROWS
# Of a row's maximum before it has seen a key.  Finite, so that a row that sees none stays at
# exp2(-inf - m) = 0 and never meets inf - inf.
_NOTHING_SEEN = -1e30
_LOG2_E = math.log2(math.e)
# Registers a thread: 2 x 232 + 40 <= 65536 / 128.  The producer only computes addresses, yet spills
# at 24.
_CONSUMER_REGISTERS = 232
_PRODUCER_REGISTERS = 40
# Of reductions across warps (2 KiB) and barriers.
_OTHER_SHARED_BYTES = 3 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperBlocks:
    """Keys a block, and the slots of shared memory that blocks pass through."""

    block_k: int = 128
    num_stages: int = 2

    def __post_init__(self) -> None:
        """Check what wgmma and the pipeline need."""
        if self.block_k % 64 or not 64 <= self.block_k <= 256:
            raise ValueError(f"block_k {self.block_k} must be 64, 128, 192 or 256")
        if self.num_stages < 2:
            raise ValueError(f"num_stages {self.num_stages} must be at least 2")

    @classmethod
    def for_shape(cls, width: int) -> "HopperBlocks":
        """Return the sizes for heads of `width`: what fits registers and shared memory."""
        return cls(block_k=128 if width <= 128 else 64)

    def shared_bytes(self, width: int, value_width: int, itemsize: int) -> int:
        """Return the bytes of the tiles."""
        stage = self.block_k * (width + value_width) * itemsize
        tile = width if value_width == width else width + value_width
        return self.num_stages * stage + BLOCK_Q * (tile * itemsize + 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """How a product q·k becomes a logit; static."""

    scale: float
    window: int | None
    softcap: float | None

    def __call__(self, products: Array) -> Array:
        """Return the logits in base 2."""
        if self.softcap is None:
            return products * (self.scale * _LOG2_E)
        return jnp.tanh(products * (self.scale / self.softcap)) * (self.softcap * _LOG2_E)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyRange:
    """Blocks of keys that a tile of queries reads: start <= clear_start <= clear_stop <= stop.

    Between the clear bounds every query sees every key, and nothing is masked.
    """

    start: Array
    clear_start: Array
    clear_stop: Array
    stop: Array

    @classmethod
    def of(cls, first: Array, end: Array, window: int | None, block_k: int) -> "KeyRange":
        """Return the blocks for queries at positions [first, first + BLOCK_Q) over `end` keys."""
        zero = jnp.int32(0)
        blocks = lambda keys: lax.div(keys, jnp.int32(block_k))
        up = lambda keys: blocks(keys + (block_k - 1))
        stop = up(jnp.minimum(first + BLOCK_Q, end))
        start = clear_start = zero
        if window is not None:
            start = jnp.minimum(blocks(jnp.maximum(first - (window - 1), zero)), stop)
            clear_start = up(jnp.maximum(first + (BLOCK_Q - window), zero))
            clear_start = jnp.minimum(jnp.maximum(clear_start, start), stop)
        clear_stop = jnp.maximum(blocks(jnp.minimum(first + 1, end)), clear_start)
        return cls(
            start=start,
            clear_start=clear_start,
            clear_stop=jnp.minimum(clear_stop, stop),
            stop=stop,
        )


@dataclasses.dataclass(frozen=True)
class Shared:
    """References to shared memory and barriers of one block of the grid."""

    q: Any  # [2, 64, H]
    k: Any  # [num_stages, block_k, H]
    v: Any  # [num_stages, block_k, H of values]
    lse: Any  # [2, 64] float32
    o: Any  # [2, 64, H of values]; None where it takes the place of q
    q_loaded: Any
    k_loaded: Any
    v_loaded: Any
    k_free: Any
    v_free: Any
    turn: Any  # of the tensor cores, one barrier a consumer
    v_raw: Any  # a slot of V that the producer must still clear; None where none is stale


def shared_memory(
    blocks: HopperBlocks,
    width: int,
    value_width: int,
    dtype: Any,
    *,
    copies: int = 1,
    stale_values: bool = False,
) -> list[Any]:
    """Return the scratch that `Shared` names, in its order.

    Args:
        blocks: sizes.
        width: of queries and keys.
        value_width: of values.
        dtype: of all three.
        copies: TMA copies that fill a slot of K, and as many of V.
        stale_values: the producer needs `v_raw`.
    """
    slots = blocks.num_stages
    return [
        tile((NUM_CONSUMERS, WARPGROUP_ROWS, width), dtype),
        tile((blocks.num_stages, blocks.block_k, width), dtype),
        tile((blocks.num_stages, blocks.block_k, value_width), dtype),
        plgpu.SMEM((NUM_CONSUMERS, WARPGROUP_ROWS), jnp.float32),
        None if value_width == width else tile((NUM_CONSUMERS, WARPGROUP_ROWS, value_width), dtype),
        plgpu.Barrier(num_barriers=NUM_CONSUMERS),
        plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=slots),
        plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=slots),
        plgpu.Barrier(num_barriers=NUM_CONSUMERS),
        plgpu.Barrier(num_arrivals=copies) if stale_values else None,
    ]


def produce(
    keys: KeyRange,
    shared: Shared,
    fetch_k: Callable[[Array, Array], None],
    fetch_v: Callable[[Array, Array], None],
) -> None:
    """Fetch every block of keys and values into its slot, as soon as the slot is free.

    Args:
        keys: the blocks.
        shared: of this block of the grid.
        fetch_k: (block, slot) -> issues the copies of K that arrive at `k_loaded`.
        fetch_v: the same of V.
    """
    plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
    num_stages = jnp.int32(shared.k.shape[0])
    count = keys.stop - keys.start

    def step(i: Array, _: None) -> None:
        slot = lax.rem(i, num_stages)
        for free, fetch in ((shared.k_free, fetch_k), (shared.v_free, fetch_v)):
            pl.when(i >= num_stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
            fetch(keys.start + i, slot)

    lax.fori_loop(jnp.int32(0), count, step, None)

    # No barrier is left with an arrival that nobody has seen.
    def drain(i: Array, _: None) -> None:
        slot = lax.rem(i, num_stages)
        plgpu.barrier_wait(shared.k_free.at[slot])
        plgpu.barrier_wait(shared.v_free.at[slot])

    lax.fori_loop(jnp.maximum(count - num_stages, 0), count, drain, None)


def consume(
    keys: KeyRange,
    first: Array,
    end: Array,
    scores: Scores,
    sink: Array | None,
    shared: Shared,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return the output [64, H of values] and the log-sum-exp [64] of this consumer's queries.

    Args:
        keys: the blocks that the producer fetches.
        first: position of the tile's first query (of both consumers).
        end: keys that count: a key at `end` or after is masked, and its value must be finite.
        scores: from products to logits.
        sink: logit that joins the denominator only, or None.
        shared: of this block of the grid; q is being loaded.
        interpret: see `mosaic_call`.
    """
    plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
    me = lax.axis_index(WARPGROUP)
    other = 1 - me
    num_stages, block_k, _ = shared.k.shape
    value_width = shared.v.shape[2]
    tile_shape = (WARPGROUP_ROWS, block_k)
    row = first + me * WARPGROUP_ROWS
    hand_over = lambda: plgpu.barrier_arrive(shared.turn.at[other])
    take_turn = lambda: plgpu.barrier_wait(shared.turn.at[me])

    def masked(s: Array, block: Array) -> Array:
        # Bounds a row, two values a thread; a mask of differences would be 64 hoisted registers.
        position = row - block * block_k + iota((WARPGROUP_ROWS,), 0)
        key = iota(tile_shape, 1)
        seen = key <= across(jnp.minimum(position, end - 1 - block * block_k), tile_shape)
        if scores.window is not None:
            seen = seen & (key > across(position - scores.window, tile_shape))
        return jnp.where(seen, s, -jnp.inf)

    def step(block: Array, carry: tuple[Array, ...], *, clear: bool) -> tuple[Array, ...]:
        acc, m, total = carry
        slot = lax.rem(block - keys.start, jnp.int32(num_stages))
        plgpu.barrier_wait(shared.k_loaded.at[slot])
        products = rows_times_columns(shared.q.at[me], shared.k.at[slot], interpret=interpret)
        plgpu.barrier_arrive(shared.k_free.at[slot])
        hand_over()
        s = scores(products)
        if not clear:
            s = masked(s, block)
        m_new = jnp.maximum(m, s.max(axis=1))
        p = jnp.exp2(s - across(m_new, tile_shape))
        decay = jnp.exp2(m - m_new)
        total = total * decay + p.sum(axis=1)
        acc = acc * across(decay, acc.shape)
        p = p.astype(shared.v.dtype)
        plgpu.barrier_wait(shared.v_loaded.at[slot])
        take_turn()
        acc = add_product(acc, p, shared.v.at[slot], interpret=interpret)
        plgpu.barrier_arrive(shared.v_free.at[slot])
        return acc, m_new, total

    plgpu.barrier_wait(shared.q_loaded.at[me])
    pl.when(me == 1)(hand_over)
    take_turn()
    carry = (
        full((WARPGROUP_ROWS, value_width), 0.0),
        full((WARPGROUP_ROWS,), _NOTHING_SEEN if sink is None else sink * _LOG2_E),
        # The sum begins with the sink, exp(sink - m) = 1: counted once, whatever the blocks.
        full((WARPGROUP_ROWS,), 0.0 if sink is None else 1.0),
    )
    edge = lambda block, carry: step(block, carry, clear=False)
    clear = lambda block, carry: step(block, carry, clear=True)
    if scores.window is not None:
        carry = lax.fori_loop(keys.start, keys.clear_start, edge, carry)
    carry = lax.fori_loop(keys.clear_start, keys.clear_stop, clear, carry)
    acc, m, total = lax.fori_loop(keys.clear_stop, keys.stop, edge, carry)
    pl.when(me == 0)(hand_over)
    # A row that saw nothing has total = 0 and acc = 0: it gives 0, and a log-sum-exp of -inf.
    inverse = 1.0 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return acc * across(inverse, acc.shape), (m + jnp.log2(total)) * (1 / _LOG2_E)


def columns_of(head: Array, width: int) -> Any:
    """Return a head's columns of [B, T, N H]: one axis, as TMA of a tile has 5 in all."""
    return pl.ds(head * width, width)


def whole_tiles(x: Array) -> Array:
    """Return x [B, T, N, H] as [B, T, N H], T padded to tiles of TMA; most lengths need no copy."""
    pad = -x.shape[1] % TILE_ROWS
    x_BTX = x.reshape(*x.shape[:2], -1)
    return jnp.pad(x_BTX, ((0, 0), (0, pad), (0, 0))) if pad else x_BTX


def check_attention(
    name: str,
    q: Any,
    k: Any,
    v: Any,
    num_kv: int,
    blocks: HopperBlocks,
) -> None:
    """Raise for shapes that no attention has, and for those that this form does not serve.

    Args:
        name: of the op, for messages.
        q: [B, T, N, H].
        k: keys, their width last.
        v: values; may differ from k in the width.
        num_kv: K.
        blocks: sizes.
    """
    shapes = f"q {q.shape} {q.dtype}, k {k.shape} {k.dtype}, v {v.shape} {v.dtype}"
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{name}: q and k must have heads of one width; got {shapes}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{name}: k and v may differ in the last axis only; got {shapes}")
    if q.shape[2] % num_kv:
        raise ValueError(
            f"{name}: q has {q.shape[2]} heads, not a multiple of k's {num_kv}; "
            "give a divisor of q's as key/value heads"
        )
    refused = f"{name} in Mosaic: {shapes}: "
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(refused + "wgmma takes bfloat16 or float16, one for all three")
    width, value_width = q.shape[-1], v.shape[-1]
    if width % 16 or value_width % 16 or not value_width <= width <= 256:
        raise NotImplementedError(
            refused + "heads must be multiples of 16 wide, up to 256, values not wider than keys"
        )
    needed = blocks.shared_bytes(width, value_width, q.dtype.itemsize)
    if needed > MAX_SHARED_BYTES - _OTHER_SHARED_BYTES:
        raise NotImplementedError(
            refused + f"{blocks} needs {needed} bytes of shared memory; take fewer stages or keys"
        )
