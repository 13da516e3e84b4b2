"""The one door to jax-triton.

Kernels take whole arrays as pointers, and everything that Triton knows at compile time as keyword
arguments.  Triton checks no bounds: every edge is masked by hand.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from infer.hardware import chip_of_kind, get_chip


def kernel_call(
    kernel: Any,
    *operands: Array,
    name: str,
    grid: tuple[int, ...],
    out_shape: jax.ShapeDtypeStruct,
    num_warps: int,
    num_stages: int = 1,
    **constants: Any,
) -> Array:
    """Run `kernel` over `grid`, on pointers to the operands and to the output, in this order.

    Under `jax.vmap` the calls run one after the other.

    Args:
        kernel: a function under `triton.jit`.
        operands: arrays.
        name: of the call, for messages.
        grid: one to three sizes; the first is the fastest.
        out_shape: of the output.
        num_warps: warps of 32 threads a program.
        num_stages: of Triton's software pipeline.
        constants: the kernel's `tl.constexpr` arguments.

    Raises:
        ValueError: an empty array, or a number of warps or stages that Triton cannot launch.
        NotImplementedError: an array whose offsets do not fit the 32 bits that kernels use.
    """
    check_launch(num_warps, num_stages)
    for array in (*operands, out_shape):
        _check_size(name, array)
    from jax_triton import triton_call  # type: ignore[attr-defined]

    @jax.custom_batching.sequential_vmap
    def call(*operands: Array) -> Array:
        return triton_call(
            *operands,
            kernel=kernel,
            out_shape=out_shape,
            grid=grid,
            num_warps=num_warps,
            num_stages=num_stages,
            compute_capability=_described_capability(),
            **constants,
        )

    return call(*operands)


def check_launch(num_warps: int, num_stages: int = 1) -> None:
    """Raise ValueError for a number of warps or stages that Triton does not launch."""
    if num_warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"num_warps is {num_warps}; use 1, 2, 4, 8, 16 or 32")
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; use 1 or more")


def _check_size(name: str, array: Any) -> None:
    size = math.prod(array.shape)
    if not size:
        raise ValueError(f"{name} got an array of shape {array.shape}; no dimension may be 0")
    if size > 2**31 - 1:
        raise NotImplementedError(
            f"{name} in jax_triton: an array of {size} elements of {jnp.dtype(array.dtype)} has "
            "offsets past 2^31, and the kernel's have 32 bits; split it, or use "
            "implementation='xla'"
        )


def _described_capability() -> int | None:
    """Return the compute capability, as 90 for 9.0, of a GPU that the mesh describes; None leaves
    the question to jax-triton, which asks the driver.
    """
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    chip = chip_of_kind(described.device_kind) if described is not None else None
    capability = get_chip(chip).compute_capability if chip else None
    return capability and 10 * capability[0] + capability[1]
