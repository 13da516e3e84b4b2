"""What a KV cache in fewer bits costs and gains: accuracy, speed at long contexts, bytes.

    python benchmarks/kv_cache.py --save                                 # both models, all of it
    python benchmarks/kv_cache.py --model gemma3-270m --only accuracy
    python benchmarks/kv_cache.py --only speed --batch 1

accuracy: KL and likeliest token of each cache beside a float32 cache of the same weights, English
text, windows of --context tokens whose second half is scored: `infer eval divergence`.
speed: a step of decoding, 16 in one program, each kind of cache in turn, round after round; ratios
are within a round.  Caches hold one page's random numbers everywhere: contents change no time.
One JSON line for each model and part.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

import infer  # noqa: E402
from infer import native  # noqa: E402
from infer.bench.machine import busy_cores, cpu_name  # noqa: E402
from infer.cache import paged  # noqa: E402
from infer.cache.layout import pool_bytes  # noqa: E402
from infer.cache.pool import KV_DTYPES, GroupedPool, write_whole_pages  # noqa: E402
from infer.models import decoder  # noqa: E402
from infer.models.paged_forward import through_layers  # noqa: E402

MODELS = ("smollm2-135m", "gemma3-270m")
BASES = ("float32", "float16")
PAGE, STEPS, CONTEXT, WINDOW = 16, 16, 4096, 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = parser().parse_args(arguments)
    if options.write_docs:
        write_docs(_ROOT / "docs" / "kv-cache.md", _ROOT / "benchmarks" / "results")
        return 0
    if not native.by_default():
        print(f"no native operations: {native.why_not_by_default()}", file=sys.stderr)
        return 2
    for name in options.model:
        model = infer.load(name, packed=True)
        for line in lines_of(model, options):
            line = stamp(name) | line
            print(json.dumps(line), flush=True)
            if options.save:
                save(Path(options.save), line)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    today = datetime.date.today().isoformat()
    default = _ROOT / "benchmarks" / "results" / f"kv-cache-cpu-{today}.json"
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", nargs="+", default=MODELS, help="what infer.load takes")
    p.add_argument("--kv-dtype", nargs="+", choices=KV_DTYPES, default=KV_DTYPES)
    p.add_argument("--only", choices=["accuracy", "speed"], help="leave the other part out")
    p.add_argument("--windows", type=int, default=8, help="of the text")
    p.add_argument("--context", type=int, nargs="+", default=[WINDOW], help="of a window")
    p.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--save", nargs="?", const=str(default), help="append lines to a file")
    p.add_argument("--write-docs", action="store_true", help="put results into docs/kv-cache.md")
    return p


def lines_of(model: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the parts that are asked for."""
    if options.only != "speed":
        for context in options.context:
            yield accuracy(model, options.kv_dtype, options.windows, context)
    if options.only != "accuracy":
        for batch in options.batch:
            yield speed(model.params, options.kv_dtype, batch, options.rounds)


def accuracy(
    model: Any, kv_dtypes: Sequence[str], windows: int, context: int = WINDOW
) -> dict[str, Any]:
    """Return each cache's divergence from float32, which runs once for all of them."""
    from infer.eval import statistics as stats
    from infer.eval.scoring import score_windows
    from infer.eval.texts import read_text
    from infer.eval.windows import all_windows

    start = time.perf_counter()
    names = [name for name in kv_dtypes if name != "float32"]
    text = {"en": read_text("en")}
    (cut,) = all_windows(text, model.tokenizer, context=context, limit=windows)
    models, dtypes = [model.params] * (1 + len(names)), ["float32", *names]
    parts = list(score_windows(models, cut.ids, context // 2, dtypes))
    joined = lambda column: np.concatenate([column(part) for part in parts])
    base = joined(lambda part: part[1][0].nll)
    found = {}
    for i, name in enumerate(names):
        nll = joined(lambda part, i=i: part[1][i + 1].nll)
        kl = stats.spread([joined(lambda part, i=i: part[2][i].kl)], seed=0)
        top = joined(lambda part, i=i: part[2][i].same_top)
        ratio = stats.perplexity_ratio([base], [nll], seed=0)
        found[name] = {
            "kl": [kl.mean.value, kl.mean.low, kl.mean.high],
            "kl_p99": kl.p99,
            "top1": float(top.mean()),
            "ratio": [ratio.value, ratio.low, ratio.high],
        }
    return {
        "part": "accuracy",
        "text": "en",
        "context": context,
        "windows": len(base),
        "scored": base.size,
        "base_perplexity": float(np.exp(base.mean())),
        "seconds": time.perf_counter() - start,
        "caches": found,
    }


def speed(
    params: Any, kv_dtypes: Sequence[str], batch: int, rounds: int, context: int = CONTEXT
) -> dict[str, Any]:
    """Return seconds a step with each cache, and ratios of speed to float32 and float16."""
    times: dict[str, list[float]] = {name: [] for name in kv_dtypes}
    busy = busy_cores()
    for i in range(rounds + 1):
        # The first round warms up and is not counted; every other one goes backwards.
        for name in kv_dtypes if i % 2 else reversed(kv_dtypes):
            cache = filled(params.config, name, batch, context)
            tokens = jnp.full(batch, 5, jnp.int32)
            cache, tokens = jax.block_until_ready(decode(params, cache, tokens, steps=1))
            start = time.perf_counter()
            jax.block_until_ready(decode(params, cache, tokens, steps=STEPS))
            if i:
                times[name].append((time.perf_counter() - start) / STEPS)
            del cache
    caches: dict[str, Any] = {}
    for name in kv_dtypes:
        each = {"step_ms": spread([1e3 * t for t in times[name]])}
        each["bytes"] = pool_bytes(params.config, batch * context // PAGE, PAGE, name)
        each["bytes_per_token"] = pool_bytes(params.config, 1, PAGE, name) / PAGE
        for base in BASES:
            if base in times:
                ratios = [x / y for x, y in zip(times[base], times[name], strict=True)]
                each[f"times_{base}"] = spread(ratios)
        caches[name] = each
    return {
        "part": "speed",
        "batch": batch,
        "context": context,
        "rounds": rounds,
        "busy_cores": busy,
        "caches": caches,
    }


def filled(config: Any, kv_dtype: str, batch: int, context: int) -> paged.PagedCache:
    """Return a cache whose rows hold all but the last 2 * STEPS tokens of a context."""
    pages = context // PAGE
    cache = paged.create(
        config,
        num_rows=batch,
        num_pages=batch * pages,
        page_size=PAGE,
        pages_per_row=pages,
        dtype=kv_dtype,
    )
    cache, _ = paged.allocate(cache, jnp.full(batch, pages, jnp.int32))
    shape = (1, PAGE, config.num_kv_heads, config.head_dim)
    page = jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))
    ids = jnp.arange(batch * pages, dtype=jnp.int32)
    everywhere = jnp.broadcast_to(page, (len(ids), *shape[1:]))

    def write(pool: Any) -> Any:
        if isinstance(pool, GroupedPool):
            return write_whole_pages(pool, everywhere.swapaxes(1, 2), ids)
        return paged.write_pages(pool, everywhere, ids)

    write = jax.jit(write, donate_argnums=0)
    return dataclasses.replace(
        cache,
        k_pages=tuple(write(pool) for pool in cache.k_pages),
        v_pages=tuple(write(pool) for pool in cache.v_pages),
        lengths=jnp.full(batch, context - 2 * STEPS, jnp.int32),
    )


@functools.partial(jax.jit, static_argnames="steps", donate_argnames="cache")
def decode(params: Any, cache: paged.PagedCache, tokens: jax.Array, *, steps: int) -> Any:
    """Return the cache and the likeliest tokens after so many steps."""
    rows = jnp.arange(len(tokens), dtype=jnp.int32)
    spans = jnp.full(len(tokens), CONTEXT, jnp.int32)

    def step(_: Any, carry: Any) -> Any:
        cache, tokens = carry
        positions = cache.lengths[:, None]
        x, cache = through_layers(params, cache, tokens, positions, rows, cache.page_table, spans)
        tokens = jnp.argmax(decoder.logits(params, x), axis=-1).astype(jnp.int32)
        return dataclasses.replace(cache, lengths=cache.lengths + 1), tokens

    return lax.fori_loop(0, steps, step, (cache, tokens))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def stamp(model: str) -> dict[str, Any]:
    """Return what every line says."""
    return {
        "benchmark": "kv-cache",
        "date": datetime.date.today().isoformat(),
        "model": model,
        "cpu": cpu_name(),
        "native": native.isa(),
        "threads": native.num_threads(),
        "jax": jax.__version__,
    }


def save(path: Path, line: dict[str, Any]) -> None:
    """Append a line, figures cut to four digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    short = json.loads(json.dumps(line), parse_float=lambda text: float(f"{float(text):.4g}"))
    with path.open("a") as file:
        file.write(json.dumps(short) + "\n")


def write_docs(document: Path, results: Path) -> None:
    """Replace the tables of `document` by those of the newest saved results."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for path in sorted(results.glob("kv-cache-cpu-*.json")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            speed = line["part"] == "speed"
            which = line["batch"] if speed else line.get("context", WINDOW)
            key = line["model"], line["part"], which
            # A run of some caches adds to those of the runs before it.
            caches = found.get(key, {"caches": {}})["caches"] | line["caches"]
            found[key] = found.get(key, line) | {"caches": caches}
    parts = []
    for model in dict.fromkeys(model for model, _, _ in found):
        near = found.get((model, "accuracy", WINDOW))
        mine = sorted((key, line) for key, line in found.items() if key[0] == model)
        fast = {n: line for (_, part, n), line in mine if part == "speed"}
        contexts = {n: line for (_, part, n), line in mine if part == "accuracy"}
        parts += [f"**{model}**{said(near, fast)}", table(near, fast)]
        if len(contexts) > 1:
            parts.append(by_context(contexts))
    text = document.read_text()
    begin, end = "<!-- results -->\n", "<!-- /results -->"
    before, after = text.index(begin) + len(begin), text.index(end)
    document.write_text(text[:before] + "\n\n".join(parts) + "\n" + text[after:])


def by_context(lines: dict[int, dict[str, Any]]) -> str:
    """Return a table of KL and perplexity ratio at each context."""
    rows = [["cache"], ["---"] * (1 + 2 * len(lines))]
    for context, line in lines.items():
        of = f"{context:,} tokens ({line['scored']:,} scored)"
        rows[0] += [f"KL, {of}", "perplexity, times"]
    for name in KV_DTYPES:
        if not any(name in line["caches"] for line in lines.values()):
            continue
        row = [f"`{name}`"]
        for line in lines.values():
            each = line["caches"].get(name)
            row += ["", ""] if each is None else [f"{each['kl'][0]:.2g}", f"{each['ratio'][0]:.3f}"]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def said(near: dict[str, Any] | None, fast: dict[int, dict[str, Any]]) -> str:
    """Return what was measured."""
    text = ""
    if near is not None:
        text += f", perplexity {near['base_perplexity']:.4g} over {near['scored']:,} tokens"
    for batch, line in fast.items():
        ms = line["caches"]["float32"]["step_ms"]["median"]
        text += f"; a step of {batch} at {line['context']:,} tokens takes {ms:.3g} ms with float32"
    return text + ":"


def table(near: dict[str, Any] | None, fast: dict[int, dict[str, Any]]) -> str:
    """Return a table of all caches of one model."""
    head = ["cache", "bytes a token", "KL from float32 (95%)", "KL, 99%", "same top token"]
    head.append("perplexity, times")
    head += [f"batch {b}: speed to {base}" for b in fast for base in BASES]
    rows = [head, ["---"] * len(head)]
    for name in KV_DTYPES:
        measured = any(name in line["caches"] for line in (near or {"caches": {}}, *fast.values()))
        if not measured:
            continue
        row = [f"`{name}`"]
        sizes = [x["caches"][name]["bytes_per_token"] for x in fast.values() if name in x["caches"]]
        row.append(f"{sizes[0]:,.0f}" if sizes else "")
        if near is None or name not in near["caches"]:
            row += [""] * 4
        else:
            each = near["caches"][name]
            kl, low, high = each["kl"]
            row.append(f"{kl:.2g} ({low:.2g}..{high:.2g})")
            row += [f"{each['kl_p99']:.2g}", f"{each['top1']:.1%}"]
            row.append("{:.4f} ({:.4f}..{:.4f})".format(*each["ratio"]))
        for line in fast.values():
            for base in BASES:
                x = line["caches"].get(name, {}).get(f"times_{base}")
                row.append("" if x is None else "{median:.2f} ({min:.2f}..{max:.2f})".format(**x))
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
