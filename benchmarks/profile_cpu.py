"""Where the time of a decode step and of a prefill goes on a CPU, by operation, with its bound.

    python benchmarks/profile_cpu.py --write       # docs/performance.md, both models
    python benchmarks/profile_cpu.py --model smollm2-135m --batch 8

XLA's own trace of one run of `generate`, whose events bear the names of the compiled program's
instructions; the program's text says what each of these is.  Each model and batch has a process of
its own.  The bound of an operation is the larger of two times: to read its weights and cached keys
and values once, at the bandwidth that is measured here with the same threads; and to do its
multiply-adds in 8 bits, two instructions a cycle and core.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import mmap
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

import numpy as np  # noqa: E402

_DOC = _ROOT / "docs" / "performance.md"
_BEGIN, _END = "<!-- profile_cpu.py begin -->", "<!-- profile_cpu.py end -->"
_MODELS = ("smollm2-135m", "gemma3-270m")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = parser().parse_args(arguments)
    if options.one:
        print(json.dumps(profile(*options.one[:1], *map(int, options.one[1:]))))
        return 0
    found = []
    for model in options.model:
        for batch in options.batch:
            found.append(in_process(model, batch, options))
            print(table(found[-1]), flush=True)
    if options.write:
        write(found)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    p = argparse.ArgumentParser(description="Where a step's time goes on a CPU.")
    p.add_argument("--model", nargs="+", default=list(_MODELS), help="what infer.load takes")
    p.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    p.add_argument("--prompt", type=int, default=512, help="tokens of the prefill [512]")
    p.add_argument("--context", type=int, default=64, help="prompt tokens before decoding [64]")
    p.add_argument("--steps", type=int, default=48, help="decode steps [48]")
    p.add_argument("--write", action="store_true", help=f"put the tables into {_DOC.name}")
    p.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    return p


def in_process(model: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the profile of one model and batch, taken in a new process."""
    sizes = [str(n) for n in (batch, options.prompt, options.context, options.steps)]
    command = [sys.executable, __file__, "--one", model, *sizes]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


# ---- measuring -----------------------------------------------------------------------------------


def profile(model: str, batch: int, prompt: int, context: int, steps: int) -> dict[str, Any]:
    """Return the times of a prefill of one prompt and of a decode step of a batch."""
    import infer
    from infer import native

    loaded = infer.load(model, packed=True)
    bandwidth = read_bandwidth(native.num_threads())
    parts = {}
    # A prefill does one prompt after the other: a batch of them costs so much more.
    for part, rows, length, turns in (
        ("prefill", 1, prompt, 1),
        ("decode", batch, context, steps),
    ):
        if part == "prefill" and batch > 1:
            continue
        parts[part] = measured(loaded.params, part, rows, length, turns, bandwidth)
    return dict(
        model=model,
        batch=batch,
        prompt=prompt,
        context=context,
        steps=steps,
        threads=native.num_threads(),
        isa=native.isa(),
        bandwidth=bandwidth,
        int8_macs=int8_macs(native.num_threads(), native.isa()),
        parts=parts,
    )


def measured(
    params: Any, part: str, batch: int, length: int, steps: int, bandwidth: float
) -> dict[str, Any]:
    """Return one part's seconds on the clock without a trace, and its operations from a trace."""
    import jax

    from infer import native
    from infer.generation import host
    from infer.generation.host import Job
    from infer.generation.prepare import RunOptions
    from infer.sampling import SamplingParams

    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 4000, length).tolist() for _ in range(batch)]
    sampling = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=steps + 1 if part == "decode" else 1
    )
    options = RunOptions(num_slots=batch)

    def run(traced: str | None) -> float:
        job = Job.prepare(params, prompts, None, None, sampling, None, options)
        job.compile()
        if part == "decode":
            job.run_to_first_tokens()
        with jax.profiler.trace(traced) if traced else contextlib.nullcontext():
            return job._run(np.int32(2**31 - 1), False)

    run(None)
    clock = statistics.median(run(None) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        traced = run(folder)
        events = collections.Counter[str](), collections.Counter[str]()
        for name, seconds in events_of(folder):
            events[0][name] += seconds
            events[1][name] += 1
    job = Job.prepare(params, prompts, None, None, sampling, None, options)
    program = host._run_plain.lower(
        params, job.requests, job.state, np.int32(0), np.bool_(False), caps=job.caps
    )
    operations = operations_of(program.compile().as_text(), params)
    macs = int8_macs(native.num_threads(), native.isa())
    kv = kv_bytes(params, batch, length + steps / 2) if part == "decode" else 0.0
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in events[0].items():
        op = operations.get(name)
        if op is None:
            continue
        row = rows.setdefault(op.label, dict(seconds=0.0, count=0.0, bound=0.0))
        row["seconds"] += seconds / steps
        row["count"] += events[1][name] / steps
        row["bound"] += op.bound(bandwidth, macs) * events[1][name] / steps
    for label, row in rows.items():
        if label == "paged attention":
            row["bound"] = kv / bandwidth
    return dict(clock=clock / steps, traced=traced / steps, rows=rows)


def events_of(folder: str) -> Iterator[tuple[str, float]]:
    """Yield the name and the seconds of each event of a trace."""
    import jax

    for path in Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    yield event.name, event.duration_ns * 1e-9


def kv_bytes(params: Any, batch: int, context: float) -> float:
    """Return the bytes of cached keys and values that a decode step reads at most: no window."""
    config = params.config
    per_token = 2 * config.num_kv_heads * config.head_dim * np.dtype(params.dtype).itemsize
    return batch * context * per_token * len(params.layers)


# ---- the program's text --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An instruction of the compiled program: what it is, and the least it must do."""

    label: str
    weight_bytes: int = 0
    macs: int = 0  # in 8 bits

    def bound(self, bandwidth: float, macs: float) -> float:
        """Return the least seconds that it takes."""
        return max(self.weight_bytes / bandwidth, self.macs / macs)


_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (?:\S+|\([^=]*?\)) ([\w\-]+)\((.*)$", re.M)
_CONTAINERS = {"while", "call", "conditional", "parameter", "constant", "tuple", "bitcast"}
_CONTAINERS.add("get-tuple-element")


def operations_of(text: str, params: Any) -> dict[str, Operation]:
    """Return the instructions of a compiled program that do work, by name."""
    import jax

    from infer.native.repack import Packed

    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed))
    packed = {x.data.shape: x for x in leaves if isinstance(x, Packed)}
    found = {}
    for m in _LINE.finditer(text):
        name, opcode, rest = m.groups()
        if opcode in _CONTAINERS:
            continue
        if opcode != "custom-call":
            found[name] = Operation(label=f"XLA: {scope(rest)}")
            continue
        target = re.search(r'custom_call_target="infer_(\w+)"', rest)
        if target is None:
            found[name] = Operation(label=f"XLA: {scope(rest)}")
            continue
        operands = re.search(r"operand_layout_constraints={(.*?)}, api_version", rest)
        sizes = dims(operands[1]) if operands else []
        weights = [packed[s] for s in sizes if s in packed]
        # Tokens that go through: the rows of the first operand.
        rows = math.prod(sizes[0][:-1]) if sizes and sizes[0] else 1
        kind = target[1].replace("_", " ")
        if kind == "linear":
            kind = linear_kind(weights, params.config.vocab_size, rest)
        takes = kind not in ("embed",)
        found[name] = Operation(
            label=kind,
            weight_bytes=sum(w.nbytes for w in weights) if takes else 0,
            macs=rows * sum(math.prod(w.shape) for w in weights) if takes else 0,
        )
    return found


def linear_kind(weights: list[Any], vocab: int, rest: str) -> str:
    """Return which product of the model a linear operation is."""
    if any(w.shape[0] >= vocab for w in weights):
        return "head"
    if len(weights) > 1:
        return "norm, query, key and value products"
    return "attention's output product" if "attention" in rest else "product"


def scope(rest: str) -> str:
    """Return the block of the forward pass that an instruction of XLA's belongs to."""
    name = re.search(r'op_name="([^"]*)"', rest)
    parts = name[1].split("/") if name else []
    for block in ("attention", "mlp", "embed", "head", "sample"):
        if block in parts:
            return block
    return "slots, masks and positions"


def dims(shapes: str) -> list[tuple[int, ...]]:
    """Return the sizes of the arrays in a list of shapes as HLO writes it."""
    found = re.findall(r"\w+\[([\d,]*)\]", shapes)
    return [tuple(int(n) for n in sizes.split(",") if n) for sizes in found]


# ---- the machine ---------------------------------------------------------------------------------


def read_bandwidth(threads: int, size: int = 128 << 20) -> float:
    """Return the bytes a second that so many threads read together, from huge pages."""
    parts = []
    for _ in range(threads):
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        parts.append(np.frombuffer(memory, np.int32))
        parts[-1][:] = 1
    times = []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(15):
            start = time.perf_counter()
            list(pool.map(lambda part: part.max(), parts))
            times.append(time.perf_counter() - start)
    return threads * size / min(times)


def int8_macs(threads: int, isa: str) -> float:
    """Return the multiply-adds in 8 bits a second at the clock that the system reports: two
    instructions a cycle and core, or with AMX 16 by 16 by 64 in 16 cycles.
    """
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        megahertz = [float(x.split(":")[1]) for x in file if x.startswith("cpu MHz")]
    return threads * max(megahertz) * 1e6 * {"avx2": 2 * 16, "avx512": 2 * 64, "amx": 1024}[isa]


# ---- writing -------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    """Return a profile as tables of Markdown."""
    return "\n\n".join(one_table(found, part) for part in found["parts"])


def one_table(found: dict[str, Any], part: str) -> str:
    p = found["parts"][part]
    what = (
        f"prefill of {found['prompt']} tokens"
        if part == "prefill"
        else f"decode step, batch {found['batch']}, context {found['context']} to "
        f"{found['context'] + found['steps']}"
    )
    rows = sorted(p["rows"].items(), key=lambda item: -item[1]["seconds"])
    inside = sum(row["seconds"] for _, row in rows)
    lines = [
        f"**{found['model']}, {what}: {p['clock'] * 1e3:.2f} ms** "
        f"({p['traced'] * 1e3:.2f} ms while traced)",
        "",
        "| operation | ms | share | times | bound, ms | bound / measured |",
        "|---|---|---|---|---|---|",
    ]
    for label, row in rows:
        lines.append(line(label, row["seconds"], p["traced"], row["count"], row["bound"]))
    rest = p["traced"] - inside
    lines.append(line("between operations", rest, p["traced"], 0, 0))
    lines.append(line("all", p["traced"], p["traced"], 0, sum(r["bound"] for _, r in rows)))
    return "\n".join(lines)


def line(label: str, seconds: float, whole: float, count: float, bound: float) -> str:
    times = f"{count:.0f}" if count else ""
    least = f"{bound * 1e3:.3f} | {bound / seconds:.0%}" if bound else " | "
    return f"| {label} | {seconds * 1e3:.3f} | {seconds / whole:.0%} | {times} | {least} |"


def write(found: list[dict[str, Any]]) -> None:
    """Put the tables between the marks of the document."""
    import jax

    from benchmarks.decode import cpu_name

    first = found[0]
    head = (
        f"Measured on {cpu_name()}, {os.cpu_count()} cores, {first['threads']} threads, "
        f"{first['isa']}, JAX {jax.__version__}, {time.strftime('%Y-%m-%d')}. Read bandwidth "
        f"{first['bandwidth'] / 1e9:.1f} GB/s; 8-bit multiply-adds at most "
        f"{first['int8_macs'] / 1e12:.2f} T/s."
    )
    before, _, rest = _DOC.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    body = "\n\n".join([head, *(table(one) for one in found)])
    _DOC.write_text(f"{before}{_BEGIN}\n{body}\n{_END}{after}")


if __name__ == "__main__":
    sys.exit(main())
