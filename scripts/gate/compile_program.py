"""Compile one program of tests/cases/programs.py; print what XLA made of it as one JSON line.

python -m scripts.gate.compile_program generate_loop
"""

import json
import re
import sys

from scripts.gate import compile_for_gpu

compile_for_gpu.prepare_environment()

from tests.cases import programs  # noqa: E402


def main() -> None:
    case = getattr(programs, sys.argv[1])()
    program = compile_for_gpu.compile_for(
        case.run, case.args, case.chip, donate=case.donate, options=case.options
    )
    shape = "bf16\\[" + ",".join(map(str, case.pool_shape)) + "\\]"
    names = {kernel.name for kernel in program.kernels}
    top = [line for line in program.thunks if re.match(r"\s{0,3}\d+: k", line)]
    print(
        json.dumps(
            {
                "program": case.name,
                "chip": case.chip,
                "command_buffers": program.command_buffers(),
                "other_thunks": [line.strip() for line in top if "kCommandBuffer" not in line],
                "alias_bytes": program.alias_bytes,
                "pool_bytes": case.pool_bytes,
                "pool_copies": len(re.findall(rf"= {shape}[^=]* copy\(", program.text)),
                "temp_bytes": program.temp_bytes,
                "missing_kernels": [
                    name for name in case.names if not any(n.startswith(name) for n in names)
                ],
                "launches": {
                    name: sum(f" {name}" in line for line in program.thunks) for name in case.names
                },
                "compile_s": round(program.compile_s, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
