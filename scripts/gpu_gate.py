"""Compile every kernel for GPUs that are described, not there, and keep the table of results.

    python scripts/gpu_gate.py                    compile what changed since the table
    python scripts/gpu_gate.py --all              compile everything
    python scripts/gpu_gate.py --only paged --chip h200  some of it; the table stays
    python scripts/gpu_gate.py --check            only compare the table with the sources

A whole run also writes the tables of docs/kernels.md.

A row of benchmarks/results/gate.json is one kernel, form, shape and chip: registers, spills, shared
memory, compile time, hash of the sources, jax version.  A row fails if the kernel does not lower or
assemble for the right architecture, if an expected kernel's name is missing, on spills, and on
shared memory past the chip's.  Each row is compiled in its own process.  The same for the whole
programs of tests/cases/programs.py, for an H200: a row fails if the program is not one CUDA graph,
does not update its caches in place, or lacks a kernel.

Needs Python 3.12, jax with its CUDA plugin wheels, and ptxas; see docs/kernels.md.  Rows of form
jax_triton need jax-triton and triton too, and are skipped without.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
TABLE = ROOT / "benchmarks" / "results" / "gate.json"
PAGE = ROOT / "docs" / "kernels.md"

from scripts.gate import compile_for_gpu  # noqa: E402

if "--worker" in sys.argv:  # before jax is imported
    compile_for_gpu.prepare_environment()

from infer.jax_triton import packages  # noqa: E402
from scripts.gate import document  # noqa: E402
from tests.cases.kernels import KernelCase, all_cases  # noqa: E402

Row = dict[str, Any]
# Functions of tests/cases/programs.py, and the kernels that they hold.
PROGRAMS = {
    "decode_step": ("paged_attention",),
    "decode_step_int4": ("paged_attention", "quantized_matmul"),
    "decode_step_fp8": ("paged_attention", "scaled_matmul"),
    "generate_loop": ("paged_attention", "paged_prefill", "sample"),
}
_PROGRAM_CHIP = "h200-141gb"


def source_hash(case: KernelCase) -> str:
    """Return a hash of the files that make the kernel: its own, its cases', and what it imports
    from its folder, infer/jax_triton or infer/pallas.
    """
    by_hand = case.form == "jax_triton"
    folder, suffix = ("jax_triton", "_jax_triton") if by_hand else ("pallas", "")
    own = ROOT / "tests" / "cases" / "kernels" / f"{case.kernel}{suffix}.py"
    return _hash(own, folder, (case.kernel,))


def program_hash(program: str) -> str:
    """Return a hash of tests/cases/programs.py and of the files that make the program's kernels."""
    return _hash(ROOT / "tests" / "cases" / "programs.py", "pallas", PROGRAMS[program])


def _hash(own: Path, folder: str, kernels: Sequence[str]) -> str:
    digest, files = hashlib.sha256(), {own}
    todo = [ROOT / "infer" / folder / f"{kernel}.py" for kernel in kernels]
    while todo:
        path = todo.pop()
        if path.exists() and path not in files:
            files.add(path)
            todo += _imports(path, f"infer.{folder}")
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _imports(path: Path, package: str) -> list[Path]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [ROOT / (name.replace(".", "/") + ".py") for name in names]
    return found


def key_of(row: Row) -> tuple[str, str]:
    """Return what identifies a row."""
    return (f"{row['kernel']} {row['form']} {row['shape']}", row["chip"])


def compile_row(case: KernelCase, chip: str) -> Row:
    """Compile one case for one chip in this process; return its row, "problems" in it if it
    fails."""
    import jax

    args = jax.eval_shape(case.make, jax.eval_shape(lambda: jax.random.key(0)))
    program = compile_for_gpu.compile_for(case.run, args, chip, donate=case.donate)
    ours = [k for k in program.kernels if any(k.name.startswith(name) for name in case.names)]
    limit = compile_for_gpu.shared_memory_limit(chip)
    problems = [
        f"no kernel is called {name}, only {sorted({k.name for k in program.kernels})}"
        for name in case.names
        if not any(k.name.startswith(name) for k in program.kernels)
    ]
    problems += [f"{k.name} spills {k.spill_bytes} bytes" for k in ours if k.spill_bytes]
    problems += [
        f"{k.name} asks for {k.shared_bytes} bytes of shared memory, {chip} has {limit}"
        for k in ours
        if k.shared_bytes > limit
    ]
    return {
        "kernel": case.kernel,
        "form": case.form,
        "shape": case.shape,
        "chip": chip,
        "kernels": [
            {
                "name": k.name,
                "registers": k.registers,
                "spill_bytes": k.spill_bytes,
                "shared_bytes": k.shared_bytes,
                "threads": k.threads,
            }
            for k in ours
        ],
        "compile_s": round(program.lower_s + program.compile_s, 1),
        "hash": source_hash(case),
        "jax": jax.__version__,
        **({"triton": metadata.version("triton")} if case.form == "jax_triton" else {}),
        **({"problems": problems} if problems else {}),
    }


def run_worker(case: KernelCase, chip: str) -> Row:
    """Compile one row in a process of its own."""
    row: Row = {"kernel": case.kernel, "form": case.form, "shape": case.shape, "chip": chip}
    return _run_process([__file__, "--worker", case.name, chip], row)


def run_program(program: str) -> Row:
    """Compile one whole program in a process of its own."""
    row: Row = {"program": program, "chip": _PROGRAM_CHIP}
    found = _run_process(["-m", "scripts.gate.compile_program", program], row)
    return found | {"hash": program_hash(program)}


def _run_process(arguments: list[str], row: Row) -> Row:
    """Return the row that a process prints, or `row` with what went wrong."""
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=900,
            cwd=ROOT,
            env=os.environ | {"JAX_TRACEBACK_FILTERING": "off"},
        )
    except subprocess.TimeoutExpired:
        return row | {"kernels": [], "problems": ["does not compile within 900 s"]}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    last = (named or lines)[-1:]
    return row | {"kernels": [], "problems": ["does not compile: " + " / ".join(last)[:1500]]}


def line_of(row: Row) -> str:
    """Return a row as one line of text."""
    problems = "".join(f"\n    FAIL {p}" for p in row.get("problems", []))
    if "program" in row:
        words = f"{row['chip']:13} {row['program']}: "
        if "launches" not in row:
            return words + problems
        return (
            f"{words}{row['launches']} kernels in {row['command_buffers']} command buffer,"
            f" {row['alias_bytes']} bytes in place, {row['temp_bytes']} temporary{problems}"
        )
    kernels = ", ".join(
        f"{k['name']} {k['registers']} registers, {k['shared_bytes'] / 1024:.0f} KiB shared"
        for k in row["kernels"]
    )
    return f"{row['chip']:13} {row['kernel']} {row['form']} {row['shape']}: {kernels}{problems}"


def read_table() -> list[Row]:
    """Return the committed rows of kernels."""
    return _read()[0]


def read_programs() -> list[Row]:
    """Return the committed rows of programs."""
    return _read()[1]


def _read() -> tuple[list[Row], list[Row]]:
    if not TABLE.exists():
        return [], []
    try:
        table = json.loads(TABLE.read_text())
        rows, programs = table["rows"], table.get("programs", [])
        for row in rows:
            key_of(row), row["hash"], row["kernels"]
        for row in programs:
            row["program"], row["hash"], row["kernels"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        sys.exit(
            f"gate: {TABLE.relative_to(ROOT)} is broken ({error!r:.80}); restore it from git, or "
            "delete it and compile everything anew"
        )
    return rows, programs


def write_table(rows: list[Row], programs: list[Row]) -> None:
    """Write the table, a row a line, whole or not at all."""
    rows = sorted(rows, key=key_of)
    programs = sorted(programs, key=lambda row: row["program"])
    lines = lambda rows: ",\n".join(json.dumps(row) for row in rows)
    temporary = TABLE.with_suffix(".tmp")
    temporary.write_text(f'{{"rows": [\n{lines(rows)}\n], "programs": [\n{lines(programs)}\n]}}\n')
    os.replace(temporary, TABLE)


def stale(wanted: list[tuple[KernelCase, str]], table: list[Row]) -> list[tuple[KernelCase, str]]:
    """Return the wanted rows that the table lacks or has for other sources."""
    have = {key_of(row): row for row in table}
    cases = {(case.kernel, case.form): case for case, _ in wanted}
    hashes = {key: source_hash(case) for key, case in cases.items()}

    def fresh(case: KernelCase, chip: str) -> bool:
        row = have.get((case.name, chip))
        return row is not None and row["hash"] == hashes[case.kernel, case.form]

    return [(case, chip) for case, chip in wanted if not fresh(case, chip)]


def stale_programs(wanted: Sequence[str], table: list[Row]) -> list[str]:
    """Return the wanted programs that the table lacks or has for other sources."""
    have = {row["program"]: row["hash"] for row in table}
    return [program for program in wanted if have.get(program) != program_hash(program)]


def _passed_programs(table: list[Row], new: list[Row]) -> list[Row]:
    rows = {row["program"]: row for row in [*table, *new] if row["program"] in PROGRAMS}
    return [row for row in rows.values() if "problems" not in row]


def _passed(wanted: list[tuple[KernelCase, str]], table: list[Row], new: list[Row]) -> list[Row]:
    """Return the wanted rows, new ones in the old ones' place, without those that failed."""
    names = {(case.name, chip) for case, chip in wanted}
    rows = {key_of(row): row for row in [*table, *new] if key_of(row) in names}
    return [row for row in rows.values() if "problems" not in row]


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="compile every row")
    parser.add_argument("--check", action="store_true", help="compile nothing; fail on stale rows")
    parser.add_argument("--only", default="", help="rows whose name contains this; no table")
    parser.add_argument("--chip", default="", help="rows of this chip; no table is written")
    parser.add_argument("--jobs", type=int, default=2, choices=range(1, 65), metavar="N")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = all_cases()
    if args.worker:
        case = next(c for c in cases if c.name == args.worker[0])
        print(json.dumps(compile_row(case, args.worker[1])))
        return 0
    wanted = [
        (case, chip)
        for case in cases
        for chip in case.chips
        if args.only in case.name and args.chip in chip
    ]
    programs = [
        name for name in PROGRAMS if args.only in f"program {name}" and args.chip in _PROGRAM_CHIP
    ]
    if not wanted and not programs:
        print("gate: no case has such a name or chip; --check lists stale ones", file=sys.stderr)
        return 2
    partial = bool(args.only or args.chip)
    table, program_table = _read()
    every = args.all or (partial and not args.check)
    todo = wanted if every else stale(wanted, table)
    todo_programs = programs if every else stale_programs(programs, program_table)
    num_wanted = len(wanted) + len(programs)
    if args.check:
        print(f"gate: {num_wanted} rows, {len(todo) + len(todo_programs)} of them stale")
        names = [f"{chip} {case.name}" for case, chip in todo]
        for name in names + [f"program {program}" for program in todo_programs]:
            print(f"  {name}: run `make gate` and commit {TABLE.relative_to(ROOT)}")
        return 1 if todo or todo_programs else 0
    lack = compile_for_gpu.missing()
    if lack:
        print(f"gate: cannot compile here, {lack}", file=sys.stderr)
        return 2
    lack = packages.missing()
    skipped = [pair for pair in todo if lack and pair[0].form == "jax_triton"]
    if skipped:  # the table keeps its rows of them
        print(f"gate: {len(skipped)} rows of form jax_triton skipped: {lack}", flush=True)
        todo = [pair for pair in todo if pair not in skipped]
    new, new_programs = [], []

    def write() -> list[Row]:
        passed = _passed(wanted, table, new)
        write_table(passed, _passed_programs(program_table, new_programs))
        return passed

    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda pair: run_worker(*pair), todo):
            print(line_of(row), flush=True)
            new.append(row)
            if not partial:  # as it goes: an interrupted run has lost nothing
                write()
        for row in pool.map(run_program, todo_programs):
            print(line_of(row), flush=True)
            new_programs.append(row)
            if not partial:
                write()
    done = new + new_programs
    failed = [row for row in done if "problems" in row]
    if not partial:
        passed = write()
        passed_programs = _passed_programs(program_table, new_programs)
        page = document.replace_tables(PAGE.read_text(), cases, passed, passed_programs)
        PAGE.write_text(page)
    print(f"gate: {num_wanted} rows, {len(done)} compiled, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
