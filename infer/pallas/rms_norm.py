"""RMSNorm, alone or with the residual addition before it, in one pass.  Pallas-Triton.

    s = x + r                                   (in the stream's dtype; written back)
    y = s / sqrt(mean(s^2) + eps) * gain        (in float32, one cast)

Source: Zhang and Sennrich 2019, arXiv 1910.07467.

Grid (rows / block_rows).  A program owns `block_rows` rows, whole: the mean needs them.
Bytes: x (and r) once in, y (and s) once out: 2 T D or 4 T D elements.  FLOPs: about 5 T D.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float

from infer.pallas.triton_call import check_launch, load, power_of_two, store, triton_call

# Values of a row that one program holds: 64 registers of 8 warps' threads.
_MAX_WIDTH = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsNormBlocks:
    """Rows a program owns, and its warps."""

    block_rows: int = 1
    num_warps: int = 4

    def __post_init__(self) -> None:
        """Check what Triton asks for."""
        if self.block_rows < 1 or self.block_rows & (self.block_rows - 1):
            raise ValueError(f"block_rows is {self.block_rows}; use a power of two")
        check_launch(self.num_warps)

    @classmethod
    def for_shape(cls, width: int) -> "RmsNormBlocks":
        """Return the sizes for rows of `width`: at least 16 values a thread where there are."""
        warps = max(1, min(8, power_of_two(width) // 512))
        return cls(block_rows=max(1, 2048 // power_of_two(width)), num_warps=max(4, warps))


def _kernel(*refs: Any, eps: float, block_rows: int, with_residual: bool) -> None:
    if with_residual:
        # inputs                       outputs
        # [T, D]  [T, D]      [D]      [T, D]  [T, D]
        x_ref, residual_ref, gain_ref, y_ref, sum_ref = refs
    else:
        x_ref, gain_ref, y_ref = refs
        residual_ref = sum_ref = None
    num_rows, width = x_ref.shape
    t = pl.program_id(0) * block_rows + jnp.arange(block_rows, dtype=jnp.int32)[:, None]
    d = jnp.arange(power_of_two(width), dtype=jnp.int32)[None, :]
    inside = (t < num_rows) & (d < width)
    x = load(x_ref, t, d, mask=inside, other=0.0)
    if residual_ref is not None:
        x = x + load(residual_ref, t, d, mask=inside, other=0.0)
        store(sum_ref, t, d, value=x, mask=inside)
    x32 = x.astype(jnp.float32)
    mean = jnp.sum(x32 * x32, axis=1) / width
    gain = load(gain_ref, d[0], mask=d[0] < width, other=0.0).astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(mean + eps)[:, None] * gain[None, :]
    store(y_ref, t, d, value=y.astype(y_ref.dtype), mask=inside)


def rms_norm(
    x: Float[Array, "T D"],
    gain: Float[Array, " D"],
    eps: float,
    residual: Float[Array, "T D"] | None = None,
    *,
    blocks: RmsNormBlocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Return the norm of x (+ residual), and x (+ residual) itself, both in x's dtype.

    Args:
        x: rows; a row's result does not depend on the others.
        gain: the effective factor.
        eps: added to the mean square.
        residual: added to x first, or None.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: gain or residual do not fit x.
        NotImplementedError: rows wider than one program holds.
    """
    num_rows, width = x.shape
    if gain.shape != (width,) or (residual is not None and residual.shape != x.shape):
        raise ValueError(
            f"x is {x.shape}, gain {gain.shape}, residual "
            f"{None if residual is None else residual.shape}; gain must be ({width},), residual "
            "like x"
        )
    if width > _MAX_WIDTH:
        raise NotImplementedError(
            f"rms_norm in Triton: shape {x.shape} of {x.dtype} has rows wider than {_MAX_WIDTH}"
        )
    blocks = blocks or RmsNormBlocks.for_shape(width)
    operands = (x, gain) if residual is None else (x, residual, gain)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    outputs = triton_call(
        functools.partial(
            _kernel,
            eps=eps,
            block_rows=blocks.block_rows,
            with_residual=residual is not None,
        ),
        *operands,
        name="rms_norm",
        grid=(-(-num_rows // blocks.block_rows),),
        out_shape=(out,) if residual is None else (out, out),
        num_warps=blocks.num_warps,
        interpret=interpret,
    )
    return (outputs[0], x) if residual is None else (outputs[0], outputs[1])


def rms_norm_reference(x: Array, gain: Array, eps: float, residual: Array | None = None) -> Any:
    """Compute the same in plain jnp, in float32 after the addition."""
    total = x if residual is None else x + residual
    wide = total.astype(jnp.float32)
    root = jnp.sqrt(jnp.mean(jnp.square(wide), axis=1, keepdims=True) + eps)
    return (wide / root * gain.astype(jnp.float32)[None, :]).astype(x.dtype), total
