"""Compile one program of tests/cases/programs.py; print what XLA made of it as one JSON line.

python -m scripts.gate.compile_program generate_loop

"problems" is there if it is not one command buffer, does not work in place, or lacks a kernel.
"""

import json
import re
import sys
from typing import Any

from scripts.gate import compile_for_gpu

compile_for_gpu.prepare_environment()

import jax  # noqa: E402

from tests.cases import programs  # noqa: E402


def main() -> None:
    name = sys.argv[1]
    case = getattr(programs, name)()
    program = compile_for_gpu.compile_for(
        case.run, case.args, case.chip, donate=case.donate, options=case.options
    )
    shape = "bf16\\[" + ",".join(map(str, case.pool_shape)) + "\\]"
    top = [line for line in program.thunks if re.match(r"\s{0,3}\d+: k", line)]
    launched = re.findall(r"\bkCustomKernel +\[.*?\] (\w+)", "\n".join(program.thunks))
    row: dict[str, Any] = {
        "program": name,
        "name": case.name,
        "chip": case.chip,
        "layers": case.layers,
        "command_buffers": program.command_buffers(),
        "alias_bytes": program.alias_bytes,
        "pool_bytes": case.pool_bytes,
        "pool_copies": len(re.findall(rf"= {shape}[^=]* copy\(", program.text)),
        "temp_bytes": program.temp_bytes,
        "launches": len(launched),
        "kernels": {k: sum(one.startswith(k) for one in launched) for k in case.names},
        "compile_s": round(program.compile_s, 1),
        "jax": jax.__version__,
    }
    other = [line.strip() for line in top if "kCommandBuffer" not in line]
    problems = problems_of(row, other)
    print(json.dumps(row | ({"problems": problems} if problems else {})))


def problems_of(row: dict[str, Any], other: list[str]) -> list[str]:
    """Return what is wrong with a compiled program, in words.

    Args:
        row: of the table.
        other: the thunks beside the command buffer.
    """
    rules = {
        f"{row['command_buffers']} command buffers, not one": row["command_buffers"] != 1,
        f"beside the command buffer: {'; '.join(other)[:300]}": bool(other),
        f"aliases {row['alias_bytes']} bytes, fewer than the pools' {row['pool_bytes']}": (
            row["alias_bytes"] < row["pool_bytes"]
        ),
        f"copies a pool {row['pool_copies']} times": row["pool_copies"] > 0,
        f"takes {row['temp_bytes']} bytes for a while, as much as the pools": (
            row["temp_bytes"] >= row["pool_bytes"]
        ),
        f"lacks a kernel: {row['kernels']}": not all(row["kernels"].values()),
    }
    return [words for words, wrong in rules.items() if wrong]


if __name__ == "__main__":
    main()
