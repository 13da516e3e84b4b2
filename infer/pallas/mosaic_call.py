"""The one door to Pallas' Mosaic GPU backend, and what its kernels for Hopper share.

Only here is `plgpu.kernel` called, so that a change of that experimental interface is one edit.
Bodies see whole arrays in device memory and move tiles themselves: TMA copies into shared memory,
counted by barriers; matrix products by wgmma.  TMA fills with zeros what lies outside an array, and
drops it in stores.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# The name of the axis over warpgroups: 128 threads that run one program together.
WARPGROUP = "warpgroup"
# Threads a warpgroup, and rows of a tile of wgmma: each warpgroup multiplies 64 rows at a time.
WARPGROUP_ROWS = 64
# Rows of one swizzled tile of shared memory.  TMA of tiled memory needs multiples of it.
TILE_ROWS = 8
# Shared memory that one block may use on Hopper (CUDA C programming guide, compute capability 9.0).
MAX_SHARED_BYTES = 227 * 1024


def mosaic_call(
    kernel: Callable[..., None],
    *operands: Array,
    name: str,
    grid: Mapping[str, int],
    out_shape: Any,
    scratch: Sequence[Any],
    num_warpgroups: int,
    interpret: bool = False,
) -> Any:
    """Run `kernel` over `grid` with references to the operands, the outputs, then the scratch.

    Args:
        kernel: of references; every warpgroup runs it (`lax.axis_index(WARPGROUP)`).
        operands: arrays.
        name: of the kernel in profiles and in the gate's table.
        grid: axis name -> size; the first is the fastest.
        out_shape: a list or tuple of ShapeDtypeStruct.
        scratch: shared memory and barriers.
        num_warpgroups: of 128 threads, a block.
        interpret: run on any device, slowly; barriers and copies are simulated.  On a machine with
            fewer cores than warpgroups the environment variable NPROC must give XLA:CPU one more
            thread than those, as each blocks one at a barrier.
    """
    return plgpu.kernel(
        kernel,
        out_type=out_shape,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=num_warpgroups,
        thread_name=WARPGROUP,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=_interpreter() if interpret else None,
        kernel_name=name,
    )(*operands)


def has_interpreter() -> bool:
    """Return whether this version of JAX can run such kernels without a GPU."""
    return hasattr(plgpu, "InterpretGPUParams")


def tile_columns(columns: int, dtype: Any) -> int:
    """Return the columns of a swizzled tile: 16 to 128 bytes, a divisor of `columns`."""
    bits = jnp.dtype(dtype).itemsize * 8
    return plgpu.find_swizzle(columns * bits) * 8 // bits


def tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return shared memory [..., rows, columns] in the layout that TMA writes and wgmma reads."""
    columns = tile_columns(shape[-1], dtype)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            plgpu.TilingTransform((TILE_ROWS, columns)),
            plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize),
        ),
    )


def rows_times_columns(a_ref: Any, b_ref: Any, *, interpret: bool) -> Array:
    """Return a [m, H] times the transpose of b [n, H], both in shared memory, in float32."""
    if interpret:
        # The interpreter checks loads for races, which it does not do for wgmma.
        return _dot(_as_wgmma_reads(a_ref), _as_wgmma_reads(b_ref).T)

    def product(acc_ref: Any) -> Array:
        plgpu.wgmma(acc_ref, a_ref, b_ref.transpose((1, 0)))
        return acc_ref[...]

    shape = (a_ref.shape[0], b_ref.shape[0])
    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def add_product(acc: Array, a: Array, b_ref: Any, *, interpret: bool) -> Array:
    """Return acc [m, H] + a [m, n] in registers times b [n, H] in shared memory, in float32."""
    if interpret:
        # The interpreter's wgmma takes no operand in registers.
        return acc + _dot(a, _as_wgmma_reads(b_ref))

    def product(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, a, b_ref)

    # Typed as what it is given, the reference; it returns the array.
    run: Any = pl.run_state(product)
    return run(plgpu.WGMMAAccumulatorRef.init(acc))


def full(shape: tuple[int, ...], value: Any) -> Array:
    """Return float32 registers [m, n] or [m], laid out as wgmma's results or their rows."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), _layout(shape))


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """Return int32 indices along `axis` of [m, n] or [m], laid out like `full`."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_layout(shape))


def across(rows: Array, shape: tuple[int, ...]) -> Array:
    """Return [m] repeated along the columns of `shape`."""
    return jax.lax.broadcast_in_dim(rows, shape, (0,))


def _as_wgmma_reads(ref: Any) -> Array:
    """Return what `ref` holds, read like wgmma does: ordered with TMA without a fence."""
    value = ref[...]
    plgpu.commit_smem()
    return value


def _layout(shape: tuple[int, ...]) -> Any:
    layout = plgpu.Layout.WGMMA
    return layout if len(shape) == 2 else layout.reduce(1)


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(
        a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )


def _interpreter() -> Any:
    if not has_interpreter():
        raise NotImplementedError(
            f"Mosaic GPU kernels cannot be interpreted by jax {jax.__version__}; use jax 0.11 or "
            "later, or a Hopper GPU"
        )
    return getattr(plgpu, "InterpretGPUParams")()  # noqa: B009  # jax 0.10 has none
