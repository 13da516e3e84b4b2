"""The parts of `scripts/gpu_check.py`: what to run on a GPU, and how it is timed.

A time is that of one call inside a program that makes many: the median of a few such programs,
divided by their calls.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from infer.compiling import COMMAND_BUFFERS
from infer.hardware import chip_of_kind
from infer.jax_triton import packages
from infer.pallas.triton_call import interpreted
from tests.cases import programs
from tests.cases import tuning as tuning_products
from tests.cases.kernels import CHIPS, KernelCase, all_cases

_GRAPHS = {
    "default": {},
    "off": {"xla_gpu_enable_command_buffer": ""},
    "whole": dict(COMMAND_BUFFERS),
}


@dataclass
class Run:
    """One run of the check: what is asked, and what was found so far."""

    smoke: bool
    only: str
    end: float  # time.monotonic() at which no new measurement begins
    found: dict[str, Any] = field(default_factory=dict)
    tuned_folder: Path | None = None  # where tuned sizes go, by chip; None: nowhere

    @functools.cached_property
    def chip(self) -> str:
        """The chip's name in infer.hardware, else JAX's name for it."""
        kind = jax.devices()[0].device_kind
        return chip_of_kind(kind) or kind.lower().replace(" ", "-")

    @property
    def out_of_time(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() > self.end

    def cases(self) -> list[KernelCase]:
        """Return the kernels' cases to run here, without those that `skipped` speaks of."""
        cases = [c for c in all_cases(smoke=self.smoke) if self.only in c.name]
        return self.here([c for c in cases if c.form != "jax_triton" or not self.skipped])

    def here(self, cases: Iterable[KernelCase]) -> list[KernelCase]:
        """Return those that this chip can run: Triton ends the process at some that it cannot."""
        # A chip that the gate does not list runs what a relative of it does.
        relative = {"h100-80gb": "h200-141gb"}.get(self.chip, "a100-80gb")
        chip = self.chip if self.chip in CHIPS else relative
        return [c for c in cases if self.smoke or chip in c.chips]

    @property
    def skipped(self) -> str:
        """Why cases of form jax_triton are left out, in words; empty if they are not."""
        lack = packages.missing()
        return f"cases of form jax_triton: {lack}" if lack else ""

    def interpreting(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which kernels run here."""
        return interpreted() if self.smoke else contextlib.nullcontext()


def repeated(
    fn: Callable[..., Any], calls: int, donate: tuple[int, ...] = ()
) -> Callable[[Any], Any]:
    """Return a function of a tuple of argument tuples that calls `fn` with each of them, `calls`
    times over, and returns the last results.

    The results go around the loop: what nobody takes from a loop XLA leaves out of it, however it
    is fenced.  The arguments `donate` come back as the last outputs and go into the next call.
    """

    def once(args: Any) -> tuple[Any, Any]:
        y = fn(*args)
        back = dict(zip(donate, y[len(y) - len(donate) :], strict=True)) if donate else {}
        rest = y[: len(y) - len(donate)] if donate else y
        return tuple(back.get(i, x) for i, x in enumerate(args)), rest

    def body(_: Any, carry: Any) -> Any:
        many, _ = lax.optimization_barrier(carry)
        done = [once(args) for args in many]
        return tuple(args for args, _ in done), tuple(y for _, y in done)

    def run(many: Any) -> Any:
        shapes = jax.eval_shape(lambda many: tuple(once(args)[1] for args in many), many)
        empty = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), shapes)
        return lax.fori_loop(0, calls, body, (many, empty))

    return run


def seconds_per_call(
    fn: Callable[..., Any],
    args: Any,
    calls: int = 20,
    runs: int = 5,
    donate: tuple[int, ...] = (),
    copies: int = 1,
) -> float:
    """Return the median time of one call of `fn(*args)`.

    Args:
        fn: of arrays.
        args: its arguments.
        calls: calls in one program, a multiple of `copies`.
        runs: of the program.
        donate: arguments that come back as the last outputs and go into the next call.
        copies: of the arguments, taken in turn: so many that a cache does not hold them.
    """
    many = tuple(args if i == 0 else jax.tree.map(jnp.copy, args) for i in range(copies))
    program = jax.jit(repeated(fn, calls // copies, donate))
    jax.block_until_ready(program(many))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(program(many))
        times.append(time.perf_counter() - start)
    return float(np.median(times)) / (calls // copies * copies)


# ---- parts ---------------------------------------------------------------------------------------


def target(run: Run) -> Any:
    """Return what XLA says of the GPU: the truth for scripts/gate/targets."""
    from jax._src.lib import _jax

    device = jax.devices()[0]
    names = ("device_kind", "compute_capability", "core_count", "shared_memory_per_block_optin")
    found: dict[str, Any] = {n: str(getattr(device, n)) for n in names if hasattr(device, n)}
    if not run.smoke:
        topology = _jax.get_topology_for_devices(jax.devices())
        found["target_config"] = str(getattr(topology, "target_config", ""))[:6000]
    return found


def peaks(run: Run) -> Any:
    """Return the copy and matrix-product rates of this machine, now."""
    size, side, calls = (1 << 12, 64, 2) if run.smoke else (1 << 29, 8192, 10)
    x = jnp.ones((size,), jnp.bfloat16)
    copy = jax.jit(lambda x: lax.fori_loop(0, calls, lambda _, x: x * jnp.bfloat16(1.01), x))
    a = jnp.ones((side, side), jnp.bfloat16)
    product = lambda a: (a @ a).astype(jnp.bfloat16) * jnp.bfloat16(1 / side)
    many = jax.jit(lambda a: lax.fori_loop(0, calls, lambda _, c: product(c), a))

    def best(fn: Callable[[Any], Any], x: Any) -> float:
        jax.block_until_ready(fn(x))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(fn(x))
            times.append(time.perf_counter() - start)
        return min(times) / calls

    return {
        "copy_bytes_per_s": 4 * size / best(copy, x),
        "bf16_flops_per_s": 2 * side**3 / best(many, a),
    }


def _difference(case: KernelCase, got: Any, want: Any) -> float:
    """Return the norm of the difference relative to the reference's, over all outputs."""
    worst = 0.0
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    if len(got) < len(want):
        return float("inf")
    for y, reference in zip(got, want, strict=False):  # a kernel may return more, such as its lse
        y, reference = case.compare(y), case.compare(reference)
        if jnp.issubdtype(reference.dtype, jnp.integer):
            worst = max(worst, float(jnp.mean((y != reference).astype(jnp.float32))))
            continue
        y, reference = y.astype(jnp.float32), reference.astype(jnp.float32)
        norm = jnp.maximum(jnp.linalg.norm(reference), 1e-30)
        # Not max(), which drops a NaN on its right.
        worst = float(np.maximum(worst, float(jnp.linalg.norm(y - reference) / norm)))
    return worst if np.isfinite(worst) else float("inf")


def _equal_bits(a: jax.Array, b: jax.Array) -> bool:
    """Return whether two arrays are equal, NaN to NaN."""
    return bool(jnp.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.floating)))


def numerics(run: Run) -> Any:
    """Return each kernel's error against its reference, and whether two runs have equal bits."""
    rows = []
    seed = time.time_ns() % 2**31
    for case in run.cases():
        row: dict[str, Any] = {"case": case.name, "allowed": case.error}
        try:
            args = jax.jit(case.make)(jax.random.key(seed))
            with run.interpreting():
                kernel = jax.jit(case.run)
                y, again = kernel(*args), kernel(*args)
            row["error"] = _difference(case, y, jax.jit(case.reference)(*args))
            row["equal_bits"] = jax.tree.all(jax.tree.map(_equal_bits, y, again))
            row["ok"] = row["error"] <= case.error and row["equal_bits"]
        except Exception as error:
            row |= {"ok": False, "exception": f"{type(error).__name__}: {error}"[:300]}
        rows.append(row)
    failed = [r["case"] for r in rows if not r["ok"]]
    return {"seed": seed, "rows": rows, "failed": failed, "skipped": run.skipped}


def timings(run: Run) -> Any:
    """Return each kernel's time, beside the bound of its bytes and FLOPs at the measured peaks."""
    found = run.found.get("peaks") or peaks(run)
    rows = []
    for case in run.cases():
        if run.out_of_time:
            rows.append({"case": case.name, "skipped": "out of time"})
            continue
        try:
            args = jax.jit(case.make)(jax.random.key(1))
            with run.interpreting():
                calls, repeats = (2, 1) if run.smoke else (20, 5)
                seconds = seconds_per_call(case.run, args, calls, repeats, case.donate)
            memory_s = case.bytes / found["copy_bytes_per_s"]
            compute_s = case.flops / found["bf16_flops_per_s"]
            rows.append(
                {
                    "case": case.name,
                    "time_s": seconds,
                    "bytes_per_s": case.bytes / seconds,
                    "flops_per_s": case.flops / seconds,
                    "fraction_of_bound": max(memory_s, compute_s) / seconds,
                    "bound": "memory" if memory_s > compute_s else "compute",
                }
            )
        except Exception as error:
            rows.append({"case": case.name, "exception": f"{type(error).__name__}: {error}"[:300]})
    return {"rows": rows}


def _filled(shapes: Any, seed: int = 0) -> Any:
    """Return small random arrays of these shapes; integers are zeros."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def leaf(key: jax.Array, x: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return 0.02 * jax.random.normal(key, x.shape, x.dtype)
        return jnp.zeros(x.shape, x.dtype)

    make = jax.jit(lambda keys: [leaf(k, x) for k, x in zip(keys, leaves, strict=True)])
    return jax.tree.unflatten(tree, make(keys))


def decode(run: Run) -> Any:
    """Return the time of a decode step by batch, implementation and graph, and the bytes it needs
    at least.
    """
    rows = []
    batches, layers = ([2], 1) if run.smoke else ([1, 32, 256], 32)
    names: tuple[str | None, ...] = ("xla",) if run.smoke else (None, "xla", "triton")
    for batch, name in itertools.product(batches, names):
        case = programs.decode_step(name, batch=batch, layers=layers, small=run.smoke)
        params, cache, tokens = _filled(case.args)
        context = cache.page_table.shape[1] * cache.page_size // 2
        pages = jnp.arange(cache.page_table.size, dtype=jnp.int32) % cache.num_pages
        cache = dataclasses.replace(
            cache,
            page_table=pages.reshape(cache.page_table.shape),
            lengths=jnp.full_like(cache.lengths, context - 1),
        )
        for graph, options in _GRAPHS.items():
            if run.out_of_time or (run.smoke and graph != "default"):
                continue
            row: dict[str, Any] = {"batch": batch, "implementation": name, "graph": graph}
            try:
                step = jax.jit(case.run, compiler_options=options, donate_argnums=1)
                copy = jax.tree.map(jnp.copy, cache)
                tokens, copy = jax.block_until_ready(step(params, copy, tokens))
                times = []
                for _ in range(3 if run.smoke else 20):
                    start = time.perf_counter()
                    tokens, copy = jax.block_until_ready(step(params, copy, tokens))
                    times.append(time.perf_counter() - start)
                read = sum(x.nbytes for x in jax.tree.leaves(params))
                read += 2 * context * batch * case.pool_bytes // _tokens_in(case)
                row |= {"time_s": float(np.median(times)), "bytes": read}
                row["bytes_per_s"] = read / row["time_s"]
            except Exception as error:
                row["exception"] = f"{type(error).__name__}: {error}"[:300]
            rows.append(row)
    return {"rows": rows, "layers": layers}


def _tokens_in(case: programs.ProgramCase) -> int:
    """Return twice the tokens that a case's pools hold: keys and values are two pools."""
    return 2 * case.pool_shape[0] * case.pool_shape[2]


def loop(run: Run) -> Any:
    """Return the time a token of the whole generate loop, with each kind of graph, and whether the
    tokens agree.
    """
    from infer.generation import host, prepare

    config = programs.llama_3_8b(1 if run.smoke else 8, small=run.smoke)
    params = _filled(programs.weights(config))
    requests, caps = programs.requests_for(
        config, count=4 if run.smoke else 64, prompt=20 if run.smoke else 300, small=run.smoke
    )
    rows, tokens = [], {}
    for graph, options in _GRAPHS.items():
        if run.out_of_time or (run.smoke and graph != "default"):
            continue
        row: dict[str, Any] = {"graph": graph}
        try:
            program = jax.jit(
                functools.partial(host.traced_run, caps=caps),
                donate_argnums=2,
                compiler_options=options,
            )
            times = []
            for _ in range(1 if run.smoke else 3):
                state = prepare.fresh_state(params, requests, caps, pad_id=0)
                first = program(params, requests, state, jnp.int32(0), jnp.zeros((), bool))
                jax.block_until_ready(first)
                start = time.perf_counter()
                final = program(params, requests, first, jnp.int32(2**31 - 1), jnp.zeros((), bool))
                jax.block_until_ready(final)
                times.append(time.perf_counter() - start)
            tokens[graph] = np.asarray(final.output.tokens)
            count = int(jnp.sum(final.output.lengths))
            row |= {"time_s": float(np.median(times)), "tokens": count}
            row["tokens_per_s"] = count / row["time_s"]
            row["decode_passes"] = int(final.counters.decode_passes)
        except Exception as error:
            row["exception"] = f"{type(error).__name__}: {error}"[:300]
        rows.append(row)
    same = {name: bool((y == next(iter(tokens.values()))).all()) for name, y in tokens.items()}
    return {"rows": rows, "same_tokens": same}


def peers(run: Run) -> Any:
    """Return prefill attention of cuDNN and PyTorch, causal, Llama-3-8B at 2 x 8192 tokens."""
    batch, length, heads, kv, width = (1, 64, 4, 2, 16) if run.smoke else (2, 8192, 32, 8, 128)
    flops = 2 * batch * heads * length * length * width
    key = jax.random.key(0)
    draw = lambda n: jax.random.normal(key, (batch, length, n, width), jnp.bfloat16)
    args = draw(heads), draw(kv), draw(kv)
    found: dict[str, Any] = {}
    for name in ("xla",) if run.smoke else ("cudnn",):
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=name
        )
        try:
            found[name] = flops / seconds_per_call(attend, args, 2 if run.smoke else 10)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
    if not run.smoke and importlib.util.find_spec("torch"):
        found["torch"] = _torch_attention(args, flops)
    return found


def _torch_attention(args: Any, flops: float) -> Any:
    import torch  # type: ignore[import-not-found]

    if not torch.cuda.is_available():
        return "no CUDA in this PyTorch"
    q, k, v = (
        torch.randn(x.shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for x in args
    )
    run = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True
    )
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return flops / float(np.median(times))


# More than the L2 cache of any GPU here holds.
_PAST_CACHES = 1 << 28
# By how much other sizes must be faster than the kernel's own choice: less is noise.
_GAIN = 0.02


def tuning_cases(run: Run) -> list[KernelCase]:
    """Return the cases of `run` that have sizes to try, then those of tests/cases/tuning.py."""
    cases = [case for case in run.cases() if case.tuning]
    products = tuning_products.SMOKE if run.smoke else tuning_products.CASES
    return cases + run.here(case for case in products if run.only in case.name)


def tuning(run: Run, show: Callable[[str, dict[str, Any]], None] = lambda name, entry: None) -> Any:
    """Time the candidate sizes of each kernel that has a choice; write the best of each shape.

    Args:
        run: says which, how long, and where they are written.
        show: called with each case's name and what was found, as it ends.
    """
    found: dict[str, Any] = {}
    for case in tuning_cases(run):
        entry = {"stopped": "out of time"} if run.out_of_time else tune(run, case)
        found[case.name] = entry
        show(case.name, entry)
        if run.tuned_folder and "fields" in entry:
            assert case.tuning
            write_tuned(run.tuned_folder, run.chip, case.kernel, {case.tuning.key: entry})
    return found


def tune(run: Run, case: KernelCase) -> dict[str, Any]:
    """Return what a tuned file says of a case's shape (see infer/pallas/tuned), or without "fields"
    why it says nothing: out of time, or the kernel's own sizes do not run.
    """
    assert case.tuning is not None
    args = jax.block_until_ready(jax.jit(case.make)(jax.random.key(2)))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args))
    copies = 2 if run.smoke else min(16, max(1, -(-_PAST_CACHES // size)))

    def seconds(fn: Callable[..., Any]) -> float | str:
        try:
            with run.interpreting():
                calls, repeats = (2, 1) if run.smoke else (4 * copies, 3)
                return seconds_per_call(fn, args, calls, repeats, case.donate, copies)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]

    entry: dict[str, Any] = {"case": case.name, "default_s": seconds(case.run), "tried": []}
    for sizes in case.tuning.sizes:
        if run.out_of_time:
            return entry | {"stopped": "out of time"}
        entry["tried"].append([_fields(case, sizes), seconds(case.tuning.run(sizes))])
    if not isinstance(entry["default_s"], float):
        return entry
    fields, time_s = _best(run, case, args, entry)
    return entry | {
        "fields": fields,
        "time_s": time_s,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _fields(case: KernelCase, sizes: Any) -> dict[str, Any]:
    assert case.tuning is not None
    fields = dataclasses.asdict(sizes)
    may = fields if case.tuning.fields is None else case.tuning.fields
    return {name: fields[name] for name in may}


def _best(
    run: Run, case: KernelCase, args: Any, entry: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """Return the fastest fields whose results are right, and their time; no fields where the
    kernel's own choice is as fast.
    """
    assert case.tuning is not None
    default_s = entry["default_s"]
    timed = [
        (s, sizes)
        for sizes, (_, s) in zip(case.tuning.sizes, entry["tried"], strict=True)
        if isinstance(s, float) and s < (1 - _GAIN) * default_s
    ]
    with run.interpreting():
        want = jax.jit(case.run)(*args) if timed else None
        for time_s, sizes in sorted(timed, key=lambda pair: pair[0]):
            if _difference(case, jax.jit(case.tuning.run(sizes))(*args), want) <= case.error:
                return _fields(case, sizes), time_s
            entry["tried"].append([_fields(case, sizes), "wrong numbers"])
    return {}, default_s


def write_tuned(folder: Path, chip: str, kernel: str, entries: dict[str, Any]) -> None:
    """Write entries into <folder>/<chip>/<kernel>.json, whole or not at all; others stay.

    Raises:
        ValueError: the file that is there is broken.
    """
    path = folder / chip / f"{kernel}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        old = json.loads(path.read_text())["shapes"] if path.exists() else {}
        shapes = dict(sorted((old | entries).items()))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is broken ({error!r:.80}); remove it") from error
    rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in shapes.items())
    head = f'"chip": {json.dumps(chip)}, "kernel": {json.dumps(kernel)}'
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f'{{{head}, "shapes": {{\n{rows}\n}}}}\n')
    os.replace(temporary, path)


# ---- the end -------------------------------------------------------------------------------------


def failed(run: Run) -> bool:
    """Return whether a part failed or a kernel's numbers are wrong."""
    broken = any("error" in part for part in run.found.values() if isinstance(part, dict))
    return broken or bool(run.found.get("numerics", {}).get("failed"))


def table(run: Run) -> str:
    """Return a short table of what was found."""
    lines = [f"{run.chip}"]
    if run.skipped and not run.smoke:  # whose cases none of them are
        lines.append(f"skipped {run.skipped}")
    if "copy_bytes_per_s" in run.found.get("peaks", {}):
        p = run.found["peaks"]
        lines.append(
            f"peaks: {p['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
            f"{p['bf16_flops_per_s'] / 1e12:.0f} TFLOP/s bf16"
        )
    errors = {r["case"]: r for r in run.found.get("numerics", {}).get("rows", [])}
    times = {r["case"]: r for r in run.found.get("timings", {}).get("rows", [])}
    for name in errors | times:
        e, t = errors.get(name, {}), times.get(name, {})
        error = e.get("exception") or f"error {e.get('error', float('nan')):.1e}"
        speed = (
            ""
            if "time_s" not in t
            else (f"{t['time_s'] * 1e6:9.1f} us {t['fraction_of_bound']:5.0%} of {t['bound']}")
        )
        lines.append(f"{'ok  ' if e.get('ok', True) else 'FAIL'} {name:60} {error} {speed}")
    for part in ("decode", "loop"):
        for row in run.found.get(part, {}).get("rows", []):
            lines.append(f"{part}: {json.dumps(row)}")
    return "\n".join(lines)
