"""8-bit products on Hopper: the projections of Llama-3-8B for a decode batch, a chunk and a long
prefill.
"""

from infer.pallas.scaled_matmul_mosaic import scaled_matmul_mosaic, scaled_matmul_mosaic_reference
from tests.cases.kernels import KernelCase
from tests.cases.kernels.scaled_matmul import arrays

# Inputs and outputs of the attention's projections, of gate and up, and of down.
_PROJECTIONS = ((4096, 4096), (4096, 14336), (14336, 4096))
_ROWS = (64, 512, 4096)


def _case(name: str, rows: int, width: int, out: int) -> KernelCase:
    return KernelCase(
        kernel="scaled_matmul_mosaic",
        form="mosaic",
        shape=f"{name} {rows}x{width}x{out}",
        make=lambda key: arrays(name, rows, out, width, key),
        run=scaled_matmul_mosaic,
        reference=scaled_matmul_mosaic_reference,
        names=("scaled_matmul_mosaic",),
        flops=2.0 * rows * out * width,
        bytes=float(out * width + rows * width + 4 * rows * out),
        chips=("h200-141gb",),
    )


CASES = (
    *(_case("int8", rows, width, out) for rows in _ROWS for width, out in _PROJECTIONS),
    *(
        _case(name, rows, width, out)
        for name in ("fp8 channel", "fp8 128x128")
        for rows, (width, out) in zip(_ROWS, _PROJECTIONS, strict=True)
    ),
    # A scale for the whole matrix; a number of tokens that fills no tile.
    _case("fp8 tensor", 512, 4096, 4096),
    _case("int8", 1000, 4096, 4096),
)
