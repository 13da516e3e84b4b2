"""What the Hopper products share: TMA, wgmma, a fetching warpgroup and two that compute.

The weight [O, I] is the side of wgmma with 64 rows, the tokens are its columns: few tokens are a
narrow product, not one of 64 rows of which most are empty, and a weight can pass through registers
on its way, where it is decoded.  Steps along the inputs pass through `num_stages` slots of shared
memory, each with a barrier "loaded" (TMA has written it) and one "free" (both consumers have read
it).  Sums [64, tokens] are turned over as they go to shared memory, and leave as y [T, O].

Grid (token tiles of a group, out / block_out, groups): a block owns `block_out` rows of the weight
and `block_tokens` tokens.  Up to 16 tiles of tokens form a group that walks the weight together, so
that what runs at one time is about as many tokens as rows of the weight, and both come from L2.
What a tile has past the end of an array TMA reads as zeros, and does not write.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infer.pallas.mosaic_call import MAX_SHARED_BYTES, WARPGROUP, WARPGROUP_ROWS, tile

NUM_CONSUMERS = 2
PRODUCER = NUM_CONSUMERS  # the warpgroup that fetches
# Inputs of a step.
STEP = 128
# Outputs that y must be a multiple of: a row of a swizzled tile of float32.
OUT_MULTIPLE = 32
# Tokens that one store takes to shared memory and out.
_STORED = 32
# Registers a thread: 2 x 232 + 40 <= 65536 / 128.
_CONSUMER_REGISTERS = 232
_PRODUCER_REGISTERS = 40
# Of barriers and scales.
_OTHER_SHARED_BYTES = 4 * 1024
_MOST_STAGES = 8
# Multiprocessors of an H100 and H200.
_PROCESSORS = 132
# Tiles of tokens in a group.
_GROUP = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperMatmulBlocks:
    """Tile of the output, and the slots that steps pass through.

    With `block_out` 128 each consumer has 64 of the rows, with 64 each has half of the tokens.
    """

    block_out: int = 128
    block_tokens: int = 128
    num_stages: int = 4

    def __post_init__(self) -> None:
        """Check what wgmma and the pipeline need."""
        if self.block_out not in (64, 128):
            raise ValueError(f"block_out is {self.block_out}; use 64 or 128")
        if self.block_tokens not in (16, 32, 64, 128, 256):
            raise ValueError(f"block_tokens is {self.block_tokens}; use 16, 32, 64, 128 or 256")
        if self.num_stages < 2:
            raise ValueError(f"num_stages is {self.num_stages}; use 2 or more")

    @property
    def row_parts(self) -> int:
        """Parts of the weight's rows, each of one consumer."""
        return self.block_out // WARPGROUP_ROWS

    @property
    def token_parts(self) -> int:
        """Parts of the tokens, each of one consumer."""
        return NUM_CONSUMERS // self.row_parts

    @property
    def tokens(self) -> int:
        """Tokens of a consumer."""
        return self.block_tokens // self.token_parts

    @property
    def stored(self) -> int:
        """Tokens of one store."""
        return min(_STORED, self.tokens)

    def check(self, where: str, limits: "Limits") -> None:
        """Raise NotImplementedError for what does not fit a multiprocessor."""
        needed, room = limits.shared_bytes(self), MAX_SHARED_BYTES - _OTHER_SHARED_BYTES
        if self.tokens > limits.tokens or needed > room:
            raise NotImplementedError(
                f"{where}: {self} needs {needed} bytes of shared memory of {room}, and"
                f" {self.tokens} tokens a consumer of {limits.tokens}; take fewer stages or tokens"
            )

    @classmethod
    def for_shape(cls, rows: int, out: int, limits: "Limits") -> "HopperMatmulBlocks":
        """Return the sizes for `rows` of x and a weight of `out` rows: the widest tile that still
        gives every multiprocessor one, and as many slots as fit.
        """
        tokens = next((n for n in (16, 32, 64) if n >= rows), 128)
        many = -(-rows // 256) * -(-out // 128) >= _PROCESSORS
        if limits.tokens >= 256 and many and rows > 128:
            tokens = 256
        few = rows <= 64 and -(-out // 128) < _PROCESSORS
        blocks = cls(block_out=64 if few else 128, block_tokens=tokens, num_stages=_MOST_STAGES)
        while limits.shared_bytes(blocks) > MAX_SHARED_BYTES - _OTHER_SHARED_BYTES:
            blocks = dataclasses.replace(blocks, num_stages=blocks.num_stages - 1)
        return blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a form holds: the tokens for which a consumer's registers suffice, and the bytes that a
    step takes of a row of the weight and of a token.
    """

    tokens: int
    row_bytes: int
    token_bytes: int

    def shared_bytes(self, blocks: HopperMatmulBlocks) -> int:
        """Return the bytes of the tiles."""
        step = blocks.block_out * self.row_bytes + blocks.block_tokens * self.token_bytes
        return blocks.num_stages * step + NUM_CONSUMERS * blocks.stored * WARPGROUP_ROWS * 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the output is cut: tiles of tokens in a group, of outputs, and groups."""

    tokens: int
    out: int
    groups: int

    @classmethod
    def of(cls, rows: int, out: int, blocks: HopperMatmulBlocks) -> "Tiles":
        """Return the tiles of y [rows, out]."""
        assert rows > 0 and out > 0, (rows, out)
        tiles = -(-rows // blocks.block_tokens)
        groups = -(-tiles // _GROUP)
        return cls(tokens=-(-tiles // groups), out=-(-out // blocks.block_out), groups=groups)

    @property
    def grid(self) -> dict[str, int]:
        """The grid's axes, the fastest first."""
        return {"tokens": self.tokens, "out": self.out, "groups": self.groups}


@dataclasses.dataclass(frozen=True)
class Corner:
    """The first output and token of a block of the grid, or of a consumer in it."""

    out: Array
    token: Array


def corner_of_block(blocks: HopperMatmulBlocks) -> Corner:
    """Return where this block of the grid begins."""
    tile = lax.axis_index("groups") * lax.axis_size("tokens") + lax.axis_index("tokens")
    return Corner(lax.axis_index("out") * blocks.block_out, tile * blocks.block_tokens)


def produce(
    num_steps: int, num_stages: int, free: Any, fetch: Callable[[Array, Array], None]
) -> None:
    """Fetch every step into its slot, as soon as the slot is free.

    Args:
        num_steps: steps.
        num_stages: slots.
        free: a barrier a slot.
        fetch: (step, slot) -> issues the copies that arrive at the slot's "loaded".
    """
    plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
    slots = jnp.int32(num_stages)

    def step(i: Array, _: None) -> None:
        slot = lax.rem(i, slots)
        pl.when(i >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
        fetch(i, slot)

    lax.fori_loop(jnp.int32(0), jnp.int32(num_steps), step, None)

    # No barrier is left with an arrival that nobody has seen.
    def drain(i: Array, _: None) -> None:
        plgpu.barrier_wait(free.at[lax.rem(i, slots)])

    start = max(num_steps - num_stages, 0)
    lax.fori_loop(jnp.int32(start), jnp.int32(num_steps), drain, None)


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One consumer's part of a block: its index, its part of rows and of tokens, and where these
    begin.
    """

    me: Array
    row_part: Any
    token_part: Any
    corner: Corner

    @classmethod
    def of(cls, block: Corner, blocks: HopperMatmulBlocks) -> "Consumer":
        """Return the part of the warpgroup that asks, and give it the registers."""
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        me = lax.axis_index(WARPGROUP)
        row, token = (me, 0) if blocks.row_parts == NUM_CONSUMERS else (0, me)
        corner = Corner(block.out + row * WARPGROUP_ROWS, block.token + token * blocks.tokens)
        return cls(me, row, token, corner)


def consume(
    num_steps: int,
    num_stages: int,
    loaded: Any,
    free: Any,
    step: Callable[[Array, Array, Array], Array],
    total: Array,
) -> Array:
    """Return `total` after all steps.

    Args:
        num_steps: steps.
        num_stages: slots.
        loaded: a barrier a slot.
        free: a barrier a slot.
        step: (step, slot, total) -> total; what it reads of the slot is there.
        total: before the first.
    """

    def one(i: Array, total: Array) -> Array:
        slot = lax.rem(i, jnp.int32(num_stages))
        plgpu.barrier_wait(loaded.at[slot])
        total = step(i, slot, total)
        plgpu.barrier_arrive(free.at[slot])
        return total

    return lax.fori_loop(jnp.int32(0), jnp.int32(num_steps), one, total)


def stored_tile(blocks: HopperMatmulBlocks) -> Any:
    """Return shared memory float32 [2, tokens, 64] for what `store` takes out."""
    return tile((NUM_CONSUMERS, blocks.stored, WARPGROUP_ROWS), jnp.float32)


def store(
    y_ref: Any,
    shared: Any,
    consumer: Consumer,
    blocks: HopperMatmulBlocks,
    sums: Callable[[int, int], Array],
    *,
    interpret: bool,
) -> None:
    """Write a consumer's part of y.

    Args:
        y_ref: float32 [T, O].
        shared: `stored_tile`.
        consumer: whose part.
        blocks: sizes.
        sums: (first, number) -> float32 [64, number] of these of its tokens.
        interpret: see `mosaic_call`.
    """
    y, corner = shared.at[consumer.me], consumer.corner
    for start in range(0, blocks.tokens, blocks.stored):
        some = sums(start, blocks.stored)
        if start:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if interpret:
            # The interpreter writes to no transposed reference.
            y[...] = some.T
        else:
            y.transpose((1, 0))[...] = plgpu.layout_cast(some, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        rows = pl.ds(corner.token + start, blocks.stored)
        plgpu.copy_smem_to_gmem(y, y_ref.at[rows, pl.ds(corner.out, WARPGROUP_ROWS)])
    plgpu.wait_smem_to_gmem(0)


def by_row(ref: Any) -> Array:
    """Return shared memory [64] in registers that lie as the rows of wgmma's results."""
    return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA.reduce(1))


def by_column(ref: Any) -> Array:
    """Return shared memory [n] in registers that lie as the columns of wgmma's results."""
    return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA.reduce(0))


def down(columns: Array, shape: tuple[int, ...]) -> Array:
    """Return [n] repeated along the rows of `shape`."""
    return lax.broadcast_in_dim(columns, shape, (1,))
