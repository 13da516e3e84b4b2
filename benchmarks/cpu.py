"""The tables of docs/cpu.md: our native operations against peers on the same files.

    python benchmarks/cpu.py --peers .venv-peers --save         # all of it, about twelve minutes
    python benchmarks/cpu.py --only decode-b1,prefill --model gemma3-270m --save
    python benchmarks/cpu.py --types Q4_0,Q8_0 --only types --save
    python benchmarks/cpu.py --write-docs                       # from the newest saved results

Engines answer in turns, in processes of their own but for ours; three counted rounds, medians and
ranges.  llama.cpp runs with its defaults: flash attention "auto" and keys and values in float16.
transformers takes part where it does not take minutes.  See benchmarks/README.md.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from benchmarks import cpu_accuracy, cpu_tables  # noqa: E402
from infer.bench import peers  # noqa: E402
from infer.bench.cases import TEXT, DecodeCase  # noqa: E402
from infer.bench.machine import use_threads  # noqa: E402
from infer.cli.loading import use_compilation_cache  # noqa: E402

MODELS = cpu_accuracy.MODELS
TYPES = ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16")
LLAMA, F32, BF16 = "llama.cpp", "transformers f32", "transformers bf16"
# Section -> its case and the peers that take part.
SECTIONS = {
    "prefill": (DecodeCase(batch=1, prompt_tokens=512, new_tokens=1), (LLAMA, F32, BF16)),
    "decode-b1": (DecodeCase(batch=1, prompt_tokens=32, new_tokens=64), (LLAMA, F32, BF16)),
    "decode-b8": (DecodeCase(batch=8, prompt_tokens=32, new_tokens=64), (LLAMA,)),
    "decode-b32": (DecodeCase(batch=32, prompt_tokens=32, new_tokens=48), (LLAMA, BF16)),
    "decode-4096": (DecodeCase(batch=1, prompt_tokens=4096, new_tokens=32), (LLAMA, BF16)),
    "decode-4096-f16": (DecodeCase(batch=1, prompt_tokens=4096, new_tokens=32), (LLAMA,)),
}
# Section -> the dtype of our cache, where it is not that of the activations.
KV_DTYPES = {"decode-4096-f16": "float16"}
MEMORY, BY_TYPE = "memory", "types"
ALL = (*SECTIONS, MEMORY, BY_TYPE)
_TYPE_CASES = (
    DecodeCase(batch=1, prompt_tokens=32, new_tokens=64),
    DecodeCase(batch=32, prompt_tokens=32, new_tokens=32),
    DecodeCase(batch=1, prompt_tokens=512, new_tokens=1),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = parser().parse_args(arguments)
    if options.write_docs:
        cpu_tables.write(_ROOT / "docs" / "cpu.md", _ROOT / "benchmarks" / "results")
        return 0
    use_compilation_cache()
    threads = use_threads(None)
    lines = []
    try:
        for line in measured(options, threads):
            lines.append(line)
            print(f"{line['model']}: {line['section']} done", file=sys.stderr, flush=True)
            if options.save:
                save(Path(options.save), line)
    except (peers.PeerError, peers.NoPeersError) as error:
        print(error, file=sys.stderr)
        return 2
    print(cpu_tables.speed(lines))
    if found := cpu_tables.by_type(lines, []):
        print("\n" + found)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    names = lambda known: (
        lambda text: [cpu_accuracy.known_name(part, known) for part in text.split(",") if part]
    )
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", type=names(MODELS), default=MODELS)
    p.add_argument("--only", type=names(ALL), default=ALL, help=f"of {', '.join(ALL)}")
    p.add_argument("--types", type=names(TYPES), default=TYPES, help="of SmolLM2-135M")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="their environment")
    p.add_argument("--save", nargs="?", const=str(default_file()), help="append lines to a file")
    p.add_argument("--write-docs", action="store_true", help="put saved results into docs/cpu.md")
    return p


def default_file() -> Path:
    """Return the file of today's results."""
    today = datetime.date.today().isoformat()
    return _ROOT / "benchmarks" / "results" / f"cpu-{today}.json"


def save(path: Path, line: dict[str, Any]) -> None:
    """Append a result as a JSON line, figures cut to four digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    short = json.loads(json.dumps(line), parse_float=lambda text: float(f"{float(text):.4g}"))
    with path.open("a") as file:
        file.write(json.dumps(short) + "\n")


def measured(options: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
    """Yield a result for each section and model, then for each weight type."""
    from infer.model import resolve

    python = peers.python_of(options.peers)
    stamp = {"benchmark": "cpu", "date": datetime.date.today().isoformat()}
    wanted = [name for name in options.only if name in SECTIONS]
    for model in options.model:
        path = resolve(model)
        if MEMORY in options.only:
            yield {**stamp, "section": MEMORY, "model": model, **memory(python, path, threads)}
        for name, found in speeds(options, model, path, threads, wanted):
            yield {**stamp, "section": name, "model": model, **found}
    if BY_TYPE in options.only:
        for kind, found in types(options, python, threads):
            yield {**stamp, "section": BY_TYPE, "model": MODELS[0], "type": kind, **found}


def speeds(
    options: argparse.Namespace, model: str, path: Path, threads: int, sections: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of each section of one model."""
    import infer
    from infer.bench import compare

    if not sections:
        return
    loaded = infer.load(path, packed=None)
    ids = loaded.tokenizer.encode(TEXT)
    needed = {label for name in sections for label in SECTIONS[name][1]}
    kinds = [kind for kind, all in peers.KINDS.items() if needed & {label for *_, label in all}]
    with compare.started_peers(kinds, options.peers, path, threads) as started:
        for name in sections:
            case, labels = SECTIONS[name]
            yield (
                name,
                compare.measure(
                    loaded.params,
                    ids,
                    [case],
                    [peer for peer in started if peer.label in labels],
                    rounds=options.rounds,
                    threads=threads,
                    reuse=case.prompt_tokens > 1024,
                    kv_dtype=KV_DTYPES.get(name),
                ),
            )


def types(
    options: argparse.Namespace, python: Path, threads: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of SmolLM2-135M in each weight type, against llama.cpp."""
    import infer
    from infer.bench import compare
    from infer.model import resolve

    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "float32.gguf"
        cpu_accuracy.write_dequantised(resolve(MODELS[0]), plain)
        for kind in options.types:
            path = Path(scratch) / f"{kind}.gguf"
            cpu_accuracy.quantize(python, plain, path, kind, threads)
            loaded = infer.load(path, packed=None)
            ids = loaded.tokenizer.encode(TEXT)
            with compare.started_peers([LLAMA], options.peers, path, threads) as started:
                found = compare.measure(
                    loaded.params,
                    ids,
                    _TYPE_CASES,
                    started,
                    rounds=options.rounds,
                    threads=threads,
                )
            found["types"] = cpu_accuracy.types_of(path)
            found["file_bytes"] = path.stat().st_size
            path.unlink()
            yield kind, found


# ---- memory and first tokens ---------------------------------------------------------------------

_FRESH = """
import json, sys, time
start = time.perf_counter()
import infer
from infer.bench import ours
from infer.bench.cases import TEXT, DecodeCase, prompt_rows
from infer.bench.peer_side.peer_protocol import peak_memory
from infer.cache.layout import pool_bytes
import jax
jax.devices()
imported = time.perf_counter()
bytes_imported = peak_memory()["peak_bytes"]
model = infer.load(sys.argv[1], packed=None)
loaded = time.perf_counter()
bytes_loaded = peak_memory()["peak_bytes"]
case = DecodeCase(batch=1, prompt_tokens=512, new_tokens=16)
prompts = prompt_rows(model.tokenizer.encode(TEXT), case)
runs = [ours.run(model.params, prompts, case.new_tokens) for _ in range(2)]
print(json.dumps({
    "import_s": imported - start, "load_s": loaded - imported, "compile_s": runs[0].compile_s,
    "first_ttft_s": runs[0].ttft_s, "warm_ttft_s": runs[1].ttft_s,
    "imported_bytes": bytes_imported, "loaded_bytes": bytes_loaded,
    "peak_bytes": peak_memory()["peak_bytes"],
    "pool_bytes": pool_bytes(model.config, (512 + 16) // 16, 16, model.params.dtype),
}))
"""


def memory(python: Path, path: Path, threads: int) -> dict[str, Any]:
    """Return load and first-token times and the peak memory of fresh processes, which read 512
    tokens and write 16; the compilation cache is filled by the first of four.
    """
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    rows = []
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", _FRESH, str(path)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    mine = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    peer = peers.Peer.start(python, "peer_llama_cpp.py", None, LLAMA, path, threads)
    try:
        peer.generate([list(range(100, 612))], 16)
        theirs = peer.ask("memory") | {"load_s": peer.load_s, "start_s": peer.start_s}
    finally:
        peer.close()
    mine["file_bytes"] = path.stat().st_size
    base = mine["file_bytes"] + mine["pool_bytes"]
    mine["peak_ratio"] = mine["peak_bytes"] / base
    mine["peak_ratio_without_imports"] = (mine["peak_bytes"] - mine["imported_bytes"]) / base
    return {"ours": mine, "llama.cpp": theirs}


if __name__ == "__main__":
    sys.exit(main())
