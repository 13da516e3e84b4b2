"""The tables of docs/kernels.md, from the cases and the gate's table."""

from collections.abc import Sequence
from typing import Any

from infer.hardware import get_chip
from infer.plan import roofline
from infer.quant.formats import PlanarFormat
from scripts.gate import fused
from tests.cases.kernels import CHIPS, KernelCase
from tests.cases.kernels import quantized_matmul as quantized
from tests.cases.kernels import scaled_matmul as scaled

BEGIN, END = "<!-- tables: make gate writes them -->", "<!-- end of tables -->"
_CHIP = "h200-141gb"


def replace_tables(
    text: str,
    cases: Sequence[KernelCase],
    rows: Sequence[dict[str, Any]],
    programs: Sequence[dict[str, Any]],
) -> str:
    """Return the page `text` with its tables made anew.

    Raises:
        ValueError: the page has lost its marks.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    tables = (
        _resources(cases, rows),
        _programs(programs),
        fused.table(),
        _bounds(cases),
        _products(),
    )
    page = "\n\n".join(tables)
    return f"{head}{BEGIN}\n\n{page}\n\n{END}{tail}"


def _resources(cases: Sequence[KernelCase], rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "Registers and KiB of shared memory of each kernel, the most over its shapes; no kernel "
        "spills. A dash: no such form there.",
        "",
        "| kernel | form | shapes | " + " | ".join(chip.split("-")[0] for chip in CHIPS) + " |",
        "|---|---|---|" + "---|" * len(CHIPS),
    ]
    for kernel, form in dict.fromkeys((case.kernel, case.form) for case in cases):
        mine = [row for row in rows if (row["kernel"], row["form"]) == (kernel, form)]
        cells = []
        for chip in CHIPS:
            kernels = [k for row in mine if row["chip"] == chip for k in row["kernels"]]
            registers = max((k["registers"] for k in kernels), default=0)
            shared = max((k["shared_bytes"] for k in kernels), default=0)
            cells.append(f"{registers}, {shared / 1024:.0f}" if kernels else "-")
        shapes = len({row["shape"] for row in mine})
        lines.append(f"| {kernel} | {form} | {shapes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _programs(programs: Sequence[dict[str, Any]]) -> str:
    lines = [
        "Whole programs at a Llama-3-8B shape, compiled for an H200: each is one command buffer "
        "(CUDA graph) and nothing beside it, its caches are updated in place and never copied. MB "
        "are 10^6 bytes.",
        "",
        "| program | layers | launches in the graph | of them | caches, MB | in place, MB |"
        " temporary, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(programs, key=lambda row: row["program"]):
        kernels = ", ".join(f"{count} {name}" for name, count in row["kernels"].items())
        sizes = (f"{row[key] / 1e6:.2f}" for key in ("pool_bytes", "alias_bytes", "temp_bytes"))
        lines.append(
            f"| {row['name']} | {row['layers']} | {row['launches']} | {kernels} | "
            + " | ".join(sizes)
            + " |"
        )
    return "\n".join(lines)


# What a format is called, how it comes to be, bytes of a number of x, and the tensor cores' type.
_FORMATS = (
    ("int4 g128", quantized.METHODS["int4 g128"], 2, "bf16"),
    ("int8 channel", quantized.METHODS["int8 channel"], 2, "bf16"),
    ("Q4_K", None, 2, "bf16"),
    ("fp8 channel", scaled.METHODS["fp8 channel"], 1, "fp8"),
)
_SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))


def _products() -> str:
    """Return what products at a Llama-3-8B's shapes move and compute, by infer.plan.roofline."""
    chip, rows = get_chip(_CHIP), 16
    lines = [
        f"The least time of products of {rows} rows at a Llama-3-8B's shapes on an "
        f"{_CHIP.split('-')[0].upper()}, by `infer.plan.roofline.product`: the packed weight and x "
        "read once and a float32 result written once, over the bandwidth, or FLOPs over the rate "
        "of x's dtype (bfloat16, for FP8 E4M3); beside it that with a bfloat16 weight.",
        "",
        "| format | inputs to outputs | weight, MB | moved, MB | GFLOP | bound | least time |"
        " with bfloat16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, method, x_bytes, dtype in _FORMATS:
        for out, width in _SHAPES:
            format = method.format_for((out, width)) if method else quantized.FORMATS[name]
            is_planar = isinstance(format, PlanarFormat)
            size = format.num_bytes((out, width)) if is_planar else out * format.row_bytes(width)

            def step(size: float, x_bytes: int, dtype: str, o: int = out, i: int = width) -> Any:
                return roofline.product(
                    rows=rows,
                    out=o,
                    width=i,
                    weight_bytes=size,
                    x_bytes=x_bytes,
                    y_bytes=4,
                    peak_flops=chip.peak_flops(dtype),
                    bandwidth=chip.bandwidth,
                )

            packed, plain = step(size, x_bytes, dtype), step(2 * out * width, 2, "bf16")
            moved, flops = packed.memory_s * chip.bandwidth, 2.0 * rows * out * width
            lines.append(
                f"| {name} | {width} to {out} | {size / 1e6:.2f} | {moved / 1e6:.2f} | "
                f"{flops / 1e9:.2f} | {packed.bound} | {packed.seconds * 1e6:.2f} us | "
                f"{plain.seconds * 1e6:.2f} us |"
            )
    return "\n".join(lines)


def _bounds(cases: Sequence[KernelCase]) -> str:
    chip = get_chip(_CHIP)
    lines = [
        f"The least time of one call on an {_CHIP.split('-')[0].upper()}, by its data sheet: the "
        "larger of bytes over bandwidth and FLOPs over the dense bf16 rate.",
        "",
        "| kernel and shape | MB | GFLOP | bound | least time |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        memory, compute = case.bytes / chip.bandwidth, case.flops / chip.peak_flops("bf16")
        bound = "memory" if memory > compute else "compute"
        lines.append(
            f"| {case.name} | {case.bytes / 1e6:.2f} | {case.flops / 1e9:.2f} | {bound} | "
            f"{max(memory, compute) * 1e6:.1f} us |"
        )
    return "\n".join(lines)
