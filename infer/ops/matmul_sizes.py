"""Block sizes of the GPU's matmul kernels, for the chip that a program is traced for: the measured
ones (`infer.pallas.tuned`), else the kernel's own choice (`for_shape` of its sizes).

A table's key is the weight's format and shape, the dtype of x and a class of rows, 1 to 16, 17 to
64, 65 to 512 and more; of experts' weights the rows are an expert's mean share.  So within a class
nothing depends on how many rows there are, and a row has the same bits alone and among others.
Beyond that a table may set what does not enter the sum of a row at all, the tiles, warps and
stages; and the splits of the inner dimension, whose order of sums is a row's bits, only in the
class of 1 to 16 rows, the one that the kernel's own choice splits.  (Tiles and warps choose the
tensor cores' instruction, and no interpreter can promise that all of them round alike: that is why
they, too, are constant within a class.)
"""

from typing import Any

from jax import Array
from jax.typing import DTypeLike

from infer.ops.choice import target_gpu
from infer.pallas.grouped_matmul import GroupedMatmulBlocks
from infer.pallas.quantized_matmul import QuantizedMatmulBlocks
from infer.pallas.scaled_matmul import ScaledMatmulBlocks
from infer.pallas.tuned import tuned
from infer.pallas.weight_parts import plan
from infer.quant.qarray import QArray

# The most rows of each class but the last.
CLASSES = (16, 64, 512)
_TILES = ("block_out", "block_rows", "num_warps", "num_stages")
# What a table may set, by kernel; of quantized_matmul `fields_of` knows.
_FEW_ROWS = ("block_out", "splits", "num_warps", "num_stages")


def fields_of(kernel: str, rows: int) -> tuple[str, ...]:
    """Return the fields that a table may set for a product of `rows` rows in `kernel`."""
    return _FEW_ROWS if kernel == "quantized_matmul" and rows <= CLASSES[0] else _TILES


def key_of(weight: Any, rows: int, dtype: DTypeLike, *, gated: bool = False) -> str:
    """Return a product's key in a table.

    Args:
        weight: [out, in] or [E, out, in], a QArray, or floats of which the shape is enough.
        rows: of x; of experts an expert's mean share.
        dtype: of x.
        gated: whether the gate's product is in the same pass.
    """
    name = weight.format.name if isinstance(weight, QArray) else str(weight.dtype)
    shape = "x".join(map(str, weight.shape))
    return f"{name} {shape} {dtype} {_class(rows)}{' gated' if gated else ''}"


def _class(rows: int) -> str:
    least = 1
    for most in CLASSES:
        if rows <= most:
            return f"{least}-{most} rows"
        least = most + 1
    return f"{least}+ rows"


def _chip() -> str | None:
    gpu = target_gpu()
    return gpu.chip if gpu else None


def quantized_sizes(x: Array, weight: QArray) -> QuantizedMatmulBlocks | None:
    """Return the sizes of `quantized_matmul(x, weight)`; None for a format that it refuses."""
    steps = plan(weight)
    if steps is None:
        return None
    rows, kernel = x.shape[0], "quantized_matmul"
    sizes = QuantizedMatmulBlocks.for_shape(rows, weight.shape[0], steps.num_steps)
    key = key_of(weight, rows, x.dtype)
    return tuned(sizes, kernel, _chip(), key, fields_of(kernel, rows))


def scaled_sizes(x: Array, weight: QArray) -> ScaledMatmulBlocks:
    """Return the sizes of `scaled_matmul(x, scales, weight)`, x being codes."""
    rows, kernel = x.shape[0], "scaled_matmul"
    sizes = ScaledMatmulBlocks.for_shape(rows)
    return tuned(sizes, kernel, _chip(), key_of(weight, rows, x.dtype), fields_of(kernel, rows))


def grouped_sizes(x: Array, weight: Array | QArray, *, gated: bool = False) -> GroupedMatmulBlocks:
    """Return the sizes of `grouped_matmul(x, weight, ...)`, x being all experts' rows."""
    (rows, experts), kernel = (x.shape[0], weight.shape[0]), "grouped_matmul"
    share = -(-rows // experts)
    sizes = GroupedMatmulBlocks.for_shape(rows, experts, gated)
    key = key_of(weight, share, x.dtype, gated=gated)
    return tuned(sizes, kernel, _chip(), key, fields_of(kernel, share))
