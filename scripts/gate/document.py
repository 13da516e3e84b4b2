"""The tables of docs/kernels.md, from the cases and the gate's table."""

from collections.abc import Sequence
from typing import Any

from infer.hardware import get_chip
from tests.cases.kernels import CHIPS, KernelCase

BEGIN, END = "<!-- tables: make gate writes them -->", "<!-- end of tables -->"
_CHIP = "h200-141gb"


def replace_tables(text: str, cases: Sequence[KernelCase], rows: Sequence[dict[str, Any]]) -> str:
    """Return the page `text` with its tables made anew.

    Raises:
        ValueError: the page has lost its marks.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    tables = f"{_resources(cases, rows)}\n\n{_bounds(cases)}"
    return f"{head}{BEGIN}\n\n{tables}\n\n{END}{tail}"


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
