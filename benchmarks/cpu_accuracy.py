"""What rounding activations costs: ours and llama.cpp against unrounded float32, same files.

    python benchmarks/cpu_accuracy.py --peers .venv-peers --save

The reference is our plain XLA in float32 on the file's weights, dequantised.  Beside it run our
native operations on packed weights, through the page cache as in `infer.generate`, and llama.cpp,
on the same token ids, teacher forced.  For each position: the KL divergence from the reference's
distribution, and whether the likeliest token is the reference's.

Files: the two known models as they are, and SmolLM2-135M in each weight type, quantised by
llama.cpp's quantiser from the known file's weights, dequantised (a width that is no multiple of
256 gets another type than a k-quant; the table says what is in each file).

Texts: prose (LICENSE), code (two modules of this package), and seven scripts that are not Latin.
The interval of the difference of the means is a paired bootstrap over chunks of 256 tokens.
"""

import argparse
import datetime
import functools
import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import infer  # noqa: E402
from infer.bench import peers  # noqa: E402
from infer.bench.machine import cpu_name, use_threads  # noqa: E402
from infer.cache import paged  # noqa: E402
from infer.model import resolve  # noqa: E402
from infer.models import decoder  # noqa: E402
from infer.models.paged_forward import through_layers  # noqa: E402
from infer.models.params import Params  # noqa: E402
from infer.native.repack import Packed  # noqa: E402
from infer.weights.gguf import GGUFFile  # noqa: E402
from infer.weights.gguf_writer import GGUFTensor, metadata_of, write_gguf  # noqa: E402

MODELS = ("smollm2-135m", "gemma3-270m")
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16")
TEXTS = {
    "prose": ("LICENSE",),
    "code": ("infer/quant/k_quants.py", "infer/cache/paged.py"),
    "not Latin": ("benchmarks/texts/non_latin.txt",),
}
CHUNK = 256
PAGE = 16
DRAWS = 10_000
# Positions whose distributions are in memory as float64 at a time.
ROWS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = parser().parse_args(arguments)
    lines = []
    try:
        for line in measured(options):
            lines.append(line)
            print(summary(line), file=sys.stderr, flush=True)
            if options.save:
                with open(options.save, "a") as out:
                    out.write(json.dumps(line) + "\n")
    except (peers.PeerError, peers.NoPeersError) as error:
        print(error, file=sys.stderr)
        return 2
    print(table(lines))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    names = lambda known: lambda text: [known_name(part, known) for part in text.split(",") if part]
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", type=names(MODELS), default=MODELS, help="known names, as they are")
    p.add_argument("--types", type=names(TYPES), default=TYPES, help="of SmolLM2-135M")
    p.add_argument("--chunks", type=int, default=8, help=f"of {CHUNK} tokens, of each text at most")
    p.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="their environment")
    p.add_argument("--save", nargs="?", const=str(default_file()), help="append lines to a file")
    return p


def known_name(name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return name


def default_file() -> Path:
    """Return the file of today's results."""
    today = datetime.date.today().isoformat()
    return _ROOT / "benchmarks" / "results" / f"cpu-accuracy-{today}.json"


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a result for each file."""
    threads = use_threads(None)
    python = peers.python_of(options.peers)
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.model:
            yield compare_file(name, resolve(name), python, threads, options.chunks, scratch)
        if not options.types:
            return
        source = resolve(MODELS[0])
        plain = Path(scratch) / "float32.gguf"
        write_dequantised(source, plain)
        origin = infer.load(plain).params
        for kind in options.types:
            path = Path(scratch) / f"{kind}.gguf"
            quantize(python, plain, path, kind, threads)
            label = f"{MODELS[0]} {kind}"
            yield compare_file(label, path, python, threads, options.chunks, scratch, origin)
            path.unlink()


def write_dequantised(source: Path, target: Path) -> None:
    """Write a GGUF file with all its tensors as float32."""
    with GGUFFile.open(source) as file:
        metadata = metadata_of(file) | {"general.file_type": 0}
        tensors = [
            GGUFTensor(
                name=name,
                shape=info.shape,
                type_name="F32",
                data=lambda name=name: file.array(name, np.dtype(np.float32)),
            )
            for name, info in file.tensors.items()
        ]
        write_gguf(target, metadata, tensors)


def quantize(python: Path, source: Path, target: Path, kind: str, threads: int) -> None:
    """Write `source` in another type by llama.cpp's quantiser."""
    peer = peers.Peer.start(python, "peer_llama_cpp.py", None, "llama.cpp", source, threads)
    try:
        peer.ask("quantize", source=str(source), target=str(target), file_type=kind, pure=True)
    finally:
        peer.close()


# ---- one file ------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Token ids of a part of a text."""

    text: str
    ids: list[int]


def compare_file(
    label: str,
    path: Path,
    python: Path,
    threads: int,
    num_chunks: int,
    scratch: str,
    origin: Params | None = None,
) -> dict[str, Any]:
    """Return the figures of one file.

    Args:
        label: its name in the table.
        path: of the file.
        python: the peers' interpreter.
        threads: of llama.cpp.
        num_chunks: of each text, at most.
        scratch: a folder for llama.cpp's logits.
        origin: float32 weights that the file was quantised from, if they are known.
    """
    plain, packed = infer.load(path, packed=False), infer.load(path, packed=True)
    chunks = chunks_of(plain.tokenizer, num_chunks)
    rows: dict[str, list[np.ndarray]] = {"ours": [], "llama.cpp": []}
    agree: dict[str, list[np.ndarray]] = {"ours": [], "llama.cpp": []}
    lost = []
    file = str(Path(scratch) / "logits.npy")
    peer = peers.Peer.start(python, "peer_llama_cpp.py", None, "llama.cpp", path, threads)
    try:
        for chunk in chunks:
            tokens = jnp.asarray(chunk.ids, jnp.int32)
            want = np.asarray(dense_logits(plain.params, tokens))
            peer.ask("logits", tokens=chunk.ids, out=file)
            found = {"ours": paged_logits(packed.params, tokens), "llama.cpp": np.load(file)}
            for engine, values in found.items():
                rows[engine].append(divergence(want, values))
                agree[engine].append(want.argmax(-1) == np.argmax(values, axis=-1))
            if origin is not None:
                lost.append(divergence(dense_logits(origin, tokens), found["ours"]).mean())
    finally:
        peer.close()
    line: dict[str, Any] = {
        "benchmark": "cpu-accuracy",
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "file": label,
        "types": types_of(path),
        "tokens": sum(len(chunk.ids) for chunk in chunks),
        "chunks": dict(Counter(chunk.text for chunk in chunks)),
        "texts_sha256": texts_hash(),
        "llama_cpp": {"version": peer.version, "info": peer.info, **peer.details},
        "ours": figures(rows["ours"], agree["ours"]) | {"dtype": packed.params.dtype.name},
        "theirs": figures(rows["llama.cpp"], agree["llama.cpp"]),
        "in_memory": kinds_of(packed.params),
    }
    if lost:
        line["kl_from_float32_file"] = float(np.mean(lost))
    means = {engine: np.array([row.mean() for row in all]) for engine, all in rows.items()}
    tops = {engine: np.array([row.mean() for row in all]) for engine, all in agree.items()}
    line["kl_difference"] = interval(means["ours"] - means["llama.cpp"])
    line["top1_difference"] = interval(tops["ours"] - tops["llama.cpp"])
    line["by_text"] = {
        text: {
            engine: float(np.mean([m for m, c in zip(all, chunks, strict=True) if c.text == text]))
            for engine, all in means.items()
        }
        for text in line["chunks"]
    }
    return line


def chunks_of(tokenizer: Any, count: int) -> list[Chunk]:
    """Return up to `count` chunks of each text, each with what the model wants at its start."""
    bos = tokenizer.encode("")
    chunks = []
    for text, files in TEXTS.items():
        joined = "\n".join((_ROOT / file).read_text() for file in files)
        ids = tokenizer.encode(joined)[len(bos) :]
        size = CHUNK - len(bos)
        starts = range(0, len(ids) - size + 1, size)[:count]
        chunks += [Chunk(text, [*bos, *ids[at : at + size]]) for at in starts]
    return chunks


def texts_hash() -> str:
    """Return a digest of all texts."""
    digest = hashlib.sha256()
    for files in TEXTS.values():
        for file in files:
            digest.update((_ROOT / file).read_bytes())
    return digest.hexdigest()[:16]


@jax.jit
def dense_logits(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the reference: plain XLA on float weights, without a cache."""
    return decoder.forward(params, tokens[None], implementation="xla")[0]


@functools.partial(jax.jit, static_argnames="implementation")
def paged_logits(
    params: Params, tokens: jax.Array, implementation: str | None = "native"
) -> jax.Array:
    """Return logits as `infer.generate` computes them: through the page cache, of its dtype."""
    length = tokens.shape[0]
    num_pages = -(-length // PAGE)
    cache = paged.create(
        params.config,
        num_rows=1,
        num_pages=num_pages,
        page_size=PAGE,
        pages_per_row=num_pages,
        dtype=params.dtype,
    )
    cache, _ = paged.allocate(cache, jnp.full(1, num_pages, jnp.int32))
    positions = jnp.arange(length, dtype=jnp.int32)
    x, _ = through_layers(
        params,
        cache,
        tokens,
        positions[None],
        jnp.zeros(length, jnp.int32),
        cache.page_table,
        jnp.full(length, length, jnp.int32),
        implementation,
    )
    return decoder.logits(params, x, implementation)


def divergence(want: Any, got: Any) -> np.ndarray:
    """Return KL(want || got) of each position [T] in nats, from logits [T, V], in float64."""
    want, got = np.asarray(want), np.asarray(got)
    parts = []
    for at in range(0, len(want), ROWS):
        p, q = log_softmax(want[at : at + ROWS]), log_softmax(got[at : at + ROWS])
        with np.errstate(invalid="ignore"):  # ids that are no tokens have no probability
            gap = np.where(np.isneginf(p), 0, p - q)
        parts.append((np.exp(p) * gap).sum(axis=-1))
    return np.concatenate(parts)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def figures(rows: list[np.ndarray], agree: list[np.ndarray]) -> dict[str, float]:
    """Return mean and 99th percentile of the divergences, and the share of equal likeliest
    tokens.
    """
    every = np.concatenate(rows)
    return {
        "kl_mean": float(every.mean()),
        "kl_p99": float(np.percentile(every, 99)),
        "top1": float(np.concatenate(agree).mean()),
    }


def interval(differences: np.ndarray) -> dict[str, float]:
    """Return the mean and its 95% interval by a bootstrap over chunks."""
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(differences), (DRAWS, len(differences)))
    low, high = np.percentile(differences[draws].mean(axis=1), [2.5, 97.5])
    return {"mean": float(differences.mean()), "low": float(low), "high": float(high)}


def kinds_of(params: Params) -> dict[str, int]:
    """Return how many of our matrices are packed, by format, and how many are floats."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed))
    kind = lambda x: x.format if isinstance(x, Packed) else f"{x.dtype} array"
    return dict(Counter(kind(x) for x in leaves if len(x.shape) == 2))


def types_of(path: Path) -> dict[str, dict[str, int]]:
    """Return tensors and bytes of each type in a file; vectors are left out."""
    found: dict[str, dict[str, int]] = {}
    with GGUFFile.open(path) as file:
        for name, info in file.tensors.items():
            if len(info.shape) == 2:
                each = found.setdefault(info.type_name, {"tensors": 0, "bytes": 0})
                each["tensors"] += 1
                each["bytes"] += file.raw(name).nbytes
    return found


# ---- for people ----------------------------------------------------------------------------------


def summary(line: dict[str, Any]) -> str:
    """Return one file's figures in a line."""
    a, b, d = line["ours"], line["theirs"], line["kl_difference"]
    return (
        f"{line['file']}: KL {a['kl_mean']:.3g} ours, {b['kl_mean']:.3g} llama.cpp, difference "
        f"{d['mean']:.2g} [{d['low']:.2g}, {d['high']:.2g}]; top-1 {a['top1']:.4f}, "
        f"{b['top1']:.4f}"
    )


def verdict(line: dict[str, Any]) -> str:
    """Return "better", "same" (the interval holds 0) or "worse" for our mean divergence."""
    d = line["kl_difference"]
    return "better" if d["high"] < 0 else "worse" if d["low"] > 0 else "same"


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a markdown table."""
    rows = [
        "| file | matrices (share of bytes) | KL mean, ours | llama.cpp | difference [95%] | |"
        " KL p99, ours | llama.cpp | top-1, ours | llama.cpp |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        a, b, d = line["ours"], line["theirs"], line["kl_difference"]
        total = sum(each["bytes"] for each in line["types"].values())
        mix = ", ".join(
            f"{name} {each['bytes'] / total:.0%}" for name, each in sorted(line["types"].items())
        )
        rows.append(
            f"| {line['file']} | {mix} | {a['kl_mean']:.2e} | {b['kl_mean']:.2e} | "
            f"{d['mean']:+.1e} [{d['low']:+.1e}, {d['high']:+.1e}] | {verdict(line)} | "
            f"{a['kl_p99']:.2e} | {b['kl_p99']:.2e} | {a['top1']:.2%} | {b['top1']:.2%} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
