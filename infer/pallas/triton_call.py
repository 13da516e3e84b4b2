"""The one door to Pallas' Triton backend, and the addressing that its kernels share.

Kernels take whole arrays and load tiles by arrays of indices, every edge masked by hand: Triton
checks no bounds (the interpreter, which pads, hides a missing mask).
"""

import contextlib
import contextvars
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

# JAX announces at each lowering that it will drop this backend.  It is the only one that serves
# Ampere, Ada and consumer Blackwell; this module is where a successor goes.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")

# Of a score that a query must not see: finite, so that a row without visible keys gives 0 / tiny
# rather than NaN, and small enough that exp() of it is 0.
MASKED = -1e30

_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "infer_interpreting", default=False
)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Interpret every kernel that is traced inside: any device, slowly.  For tests."""
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def triton_call(
    kernel: Callable[..., None],
    *operands: Array,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> Any:
    """Run `kernel` over `grid` with whole arrays as references: operands first, then outputs.

    Args:
        kernel: of references; stores into the outputs.
        operands: arrays.
        name: of the kernel in profiles and in the gate's table.
        grid: one to three sizes; the first is the fastest.
        out_shape: a pytree of ShapeDtypeStruct.
        num_warps: warps of 32 threads a program.
        num_stages: of Triton's software pipeline.
        aliases: operand index -> output index that shares its memory.
        interpret: run on any device, slowly.

    Raises:
        ValueError: an empty grid or array, or a number of warps that Triton cannot launch.
        NotImplementedError: an array whose addresses Pallas-Triton would compute in 32 signed bits
            and get wrong.
    """
    check_launch(num_warps, num_stages)
    for array in (*operands, *jax.tree.leaves(out_shape)):
        if 0 in array.shape:
            raise ValueError(f"{name} got an array of shape {array.shape}; no dimension may be 0")
        _check_addresses(name, array)
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        input_output_aliases=dict(aliases or {}),
        interpret=interpret or _interpreting.get(),
        name=name,
    )(*operands)


def check_launch(num_warps: int | None, num_stages: int = 1) -> None:
    """Raise ValueError for a number of warps or stages with which Triton would end the process."""
    if num_warps is not None and num_warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"num_warps is {num_warps}; use 1, 2, 4, 8, 16 or 32")
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; use 1 or more")


def at(ref: Any, *indices: Any) -> Any:
    """Return the reference to `ref[indices]`, the indices broadcast against each other to one
    tile.

    Pallas-Triton takes either slices and scalars or arrays of one shape, not both.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in indices))
    spread = lambda i: jnp.broadcast_to(jnp.asarray(i, jnp.int32), shape)
    return ref.at[tuple(spread(i) for i in indices)]


def load(ref: Any, *indices: Any, mask: Any = None, other: Any = None) -> Array:
    """Return the tile `ref[indices]`; where `mask` is False nothing is read and `other` stands."""
    where = at(ref, *indices)
    if mask is None:
        return triton.load(where)
    shape = jnp.broadcast_shapes(jnp.shape(mask), *(jnp.shape(i) for i in indices))
    return triton.load(where, mask=jnp.broadcast_to(mask, shape), other=other)


def store(ref: Any, *indices: Any, value: Array, mask: Any = None) -> None:
    """Write `value` to the tile `ref[indices]` where `mask` is True."""
    if mask is not None:
        mask = jnp.broadcast_to(mask, value.shape)
    triton.store(at(ref, *indices), value, mask=mask)


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `n` and `least`: Triton's tile sizes."""
    return max(least, 1 << (n - 1).bit_length())


def _check_addresses(name: str, array: Any) -> None:
    size = math.prod(array.shape)
    num_bytes = size * jnp.dtype(array.dtype).itemsize
    if size > 2**31 - 1 and num_bytes <= 2**32:
        raise NotImplementedError(
            f"{name} in Triton: an array of {size} elements of {array.dtype} "
            f"({num_bytes / 2**30:.2f} GiB) has offsets past 2^31 that Pallas-Triton computes in "
            "32 bits; make it smaller than 2 GiB or larger than 4 GiB (fewer or more pages), or "
            "use implementation='xla'"
        )
