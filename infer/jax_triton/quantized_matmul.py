"""Products with a packed 4-bit weight, decoded in registers.  Triton, through jax-triton.

    y = x @ dequantize(w).T

for few rows of x (decoding) and, with larger tiles, many.  The weight is symmetric planar int4 with
groups of 32, 64 or 128 (two codes a byte, even columns in the low halves), or GGUF's Q4_0 (blocks
of 32 weights: a float16, then 16 bytes with weights 0 to 15 in their low halves).  So a group is
two products, of the low and of the high halves, and no code moves between threads.  Codes less 8
are exact in x's dtype; a group's scale multiplies its sum, in float32.

Grid (out / block_out, splits, rows / block_rows).  A program owns `block_out` rows of the weight, a
part of its columns, and `block_rows` rows of x.  The splits are summed afterwards, in order.  Their
number and the tiles depend on the weight's shape alone: up to 16 rows the bits of one do not depend
on how many there are.

Bytes: the packed weight once, x once for each `block_out` rows (from the L2 cache), y once, and
8 splits T O of partial sums.  FLOPs: 2 T O I.

Source: the decoding in registers as in Frantar et al. 2024, arXiv 2408.11743 (Marlin); splits of
the inner dimension: Hoque et al. 2024, arXiv 2402.00025.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from jaxtyping import Float

from infer.jax_triton.kernel_call import check_launch, kernel_call
from infer.quant.formats import Format, PlanarFormat
from infer.quant.qarray import QArray

# Programs that keep a large GPU busy with loads: about four for each of its processors.
_PROGRAMS = 512
_GROUPS = (32, 64, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatmulBlocks:
    """Tile of the output, splits of the inner dimension, warps and stages."""

    block_out: int = 64
    block_rows: int = 16
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        """Check what Triton asks for."""
        for name in ("block_out", "block_rows"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} is {size}; use a power of two, 16 or more")
        if self.splits < 1:
            raise ValueError(f"splits is {self.splits}; use 1 or more")
        check_launch(self.num_warps, self.num_stages)

    @classmethod
    def for_shape(cls, rows: int, out: int, num_groups: int) -> "QuantizedMatmulBlocks":
        """Return the sizes for `rows` of x and a weight of `out` rows of `num_groups` groups.

        Few rows: splits until there are 512 programs, of two groups at least.  Many rows: tiles of
        64 x 32.
        """
        if rows > 16:
            return cls(block_rows=32, num_warps=8)
        tiles = -(-out // 64)
        return cls(num_warps=8, splits=max(1, min(_PROGRAMS // tiles, num_groups // 2, 16)))


@triton.jit
def quantized_matmul_kernel(
    # inputs
    x_ptr,  # [T, I]
    data_ptr,  # uint8 [O, ROW_BYTES]
    scale_ptr,  # [O, NUM_GROUPS]; not read of Q4_0, whose scales are in the data
    # outputs
    y_ptr,  # f32 [SPLITS, T, O]
    # constants
    ROWS: tl.constexpr,  # T
    OUT: tl.constexpr,  # O
    WIDTH: tl.constexpr,  # I
    ROW_BYTES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SHARE: tl.constexpr,  # groups of a split
    GROUP: tl.constexpr,
    IS_Q4_0: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Store one split's sums of one tile of y."""
    HALF: tl.constexpr = GROUP // 2
    o = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    split = tl.program_id(1)
    t = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    lane = tl.arange(0, HALF)
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for group in range(split * SHARE, tl.minimum(split * SHARE + SHARE, NUM_GROUPS)):
        row_ptr = data_ptr + o * ROW_BYTES
        if IS_Q4_0:
            byte0 = tl.load(row_ptr + 18 * group, mask=o < OUT, other=0).to(tl.uint16)
            byte1 = tl.load(row_ptr + 18 * group + 1, mask=o < OUT, other=0).to(tl.uint16)
            scale = (byte0 | (byte1 << 8)).to(tl.float16, bitcast=True)
            at = 18 * group + 2 + lane
            low = GROUP * group + lane  # columns of the codes in low halves, and in high ones
            high = low + HALF
        else:
            scale = tl.load(scale_ptr + o * NUM_GROUPS + group, mask=o < OUT, other=0.0)
            at = HALF * group + lane
            low = GROUP * group + 2 * lane
            high = low + 1
        inside = (o < OUT)[:, None] & (at < ROW_BYTES)[None, :]
        packed = tl.load(row_ptr[:, None] + at[None, :], mask=inside, other=0)
        row = x_ptr + t[None, :] * WIDTH
        x_low = tl.load(
            row + low[:, None], mask=(t < ROWS)[None, :] & (low < WIDTH)[:, None], other=0.0
        )
        x_high = tl.load(
            row + high[:, None], mask=(t < ROWS)[None, :] & (high < WIDTH)[:, None], other=0.0
        )
        w_low = ((packed & 15).to(tl.int32) - 8).to(x_low.dtype)
        w_high = ((packed >> 4).to(tl.int32) - 8).to(x_low.dtype)
        # [BLOCK_OUT, BLOCK_ROWS]: the weights are the side that is read once.
        sums = tl.dot(w_low, x_low, input_precision="ieee")
        sums = tl.dot(w_high, x_high, acc=sums, input_precision="ieee")
        total += sums * scale.to(tl.float32)[:, None]
    inside = (t < ROWS)[None, :] & (o < OUT)[:, None]
    tl.store(y_ptr + (split * ROWS + t)[None, :] * OUT + o[:, None], total, mask=inside)


def quantized_matmul(
    x: Float[Array, "T I"], weight: QArray, *, blocks: QuantizedMatmulBlocks | None = None
) -> Float[Array, "T O"]:
    """Return x @ dequantize(weight).T in float32.

    Args:
        x: activations, bfloat16, float16 or float32.
        weight: packed [O, I], in one of the two formats.
        blocks: the kernel's sizes.

    Raises:
        ValueError: x and the weight do not fit.
        NotImplementedError: a format or dtype that has no kernel.
    """
    if len(weight.shape) != 2 or x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x is {x.shape}, weight {weight.shape}; x must be [T, I], weight (O, I)")
    _check_formats(x, weight)
    (num_rows, width), out = x.shape, weight.shape[0]
    group = weight.format.group
    num_groups = -(-width // group)
    blocks = blocks or QuantizedMatmulBlocks.for_shape(num_rows, out, num_groups)
    share = -(-num_groups // min(blocks.splits, num_groups))
    splits = -(-num_groups // share)  # so that the last split is not empty
    partial = kernel_call(
        quantized_matmul_kernel,
        x,
        weight.data,
        weight.data if weight.scale is None else weight.scale,
        name="quantized_matmul",
        grid=(-(-out // blocks.block_out), splits, -(-num_rows // blocks.block_rows)),
        out_shape=jax.ShapeDtypeStruct((splits, num_rows, out), jnp.float32),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        ROWS=num_rows,
        OUT=out,
        WIDTH=width,
        ROW_BYTES=weight.data.shape[1],
        NUM_GROUPS=num_groups,
        SHARE=share,
        GROUP=group,
        IS_Q4_0=weight.scale is None,
        BLOCK_OUT=blocks.block_out,
        BLOCK_ROWS=blocks.block_rows,
    )
    y = partial[0]
    for split in range(1, splits):  # in this order, whatever the shape
        y = y + partial[split]
    return y


def _check_formats(x: Array, weight: QArray) -> None:
    where = f"quantized_matmul in jax_triton: {weight.format.name} of shape {weight.shape}"
    if str(x.dtype) not in ("bfloat16", "float16", "float32"):
        raise NotImplementedError(f"{where} with x of {x.dtype}; it takes floats of 16 and 32 bits")
    if not _takes(weight.format) or weight.perm is not None:
        raise NotImplementedError(
            f"{where} is not decoded there; it takes Q4_0, and symmetric planar int4 in groups of "
            f"{', '.join(map(str, _GROUPS))} with float scales, without an order of columns and "
            "without rounding of activations; 'triton' takes more formats, 'xla' all"
        )


def _takes(format: Format) -> bool:
    if not isinstance(format, PlanarFormat):
        return format.name == "Q4_0"
    codes = format.bits == 4 and format.code == "int" and format.symmetric
    groups = format.rows == 1 and format.group in _GROUPS
    floats = format.scale_dtype in ("float32", "float16", "bfloat16")
    return codes and groups and floats and not format.activations
