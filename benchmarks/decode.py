"""Decode and prefill speed, ours against peers on the same file, alternating in one run.

    python benchmarks/decode.py --model smollm2-135m --against llama.cpp,transformers
    python benchmarks/decode.py --model smollm2-135m --no-cache

Every engine gets the same file, threads and prompt ids, decodes greedily and ignores
end-of-sequence ids.  See benchmarks/README.md for what each number is.
"""

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from infer.bench import peers  # noqa: E402
from infer.bench.cases import TEXT, DecodeCase, prompt_rows  # noqa: E402
from infer.bench.machine import cpu_name, use_threads  # noqa: E402

# Rounds before the measured ones: the first compiles, fills caches and starts threads.
_WARM_UP = 1
_NO_CACHE_TOKENS = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = parser().parse_args(arguments)
    threads = use_threads(options.threads)
    lines = []
    try:
        for line in no_cache_lab(options) if options.no_cache else comparison(options, threads):
            lines.append(line)
            if options.save:
                save(Path(options.save), line)
    except (peers.PeerError, peers.NoPeersError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(lines))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    numbers = lambda text: [int(part) for part in text.split(",")]
    names = lambda text: [kind(part) for part in text.split(",") if part]
    p = argparse.ArgumentParser(description="Decode and prefill speed against named peers.")
    p.add_argument("--model", default="smollm2-135m", help="a known name or a GGUF file")
    p.add_argument("--against", type=names, default=[], help=f"of {', '.join(peers.KINDS)}")
    p.add_argument("--batch", type=numbers, default=[1, 8])
    p.add_argument("--prompt-tokens", type=numbers, default=[64, 512])
    p.add_argument("--new-tokens", type=int, default=64)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="their environment")
    p.add_argument(
        "--patience", type=float, default=0.0, help="seconds a round waits for an idle machine"
    )
    p.add_argument("--threads", type=int, help="cores that every engine may use [default: all]")
    p.add_argument("--dtype", help="of our weights and activations [default: float32 on a CPU]")
    p.add_argument("--json", action="store_true", help="print the results as one JSON list")
    p.add_argument("--no-cache", action="store_true", help="cached against uncached decoding")
    p.add_argument(
        "--context", type=numbers, default=[64, 128, 256, 512], help="final lengths of --no-cache"
    )
    p.add_argument("--no-cold-start", action="store_true", help="leave out the fresh processes")
    p.add_argument("--save", nargs="?", const=str(default_file()), help="append lines to a file")
    return p


def kind(name: str) -> str:
    """Return `name` if a peer is called so."""
    if name not in peers.KINDS:
        raise argparse.ArgumentTypeError(f"no peer is called {name!r}; {', '.join(peers.KINDS)}")
    return name


def default_file() -> Path:
    """Return the file of today's results."""
    today = datetime.date.today().isoformat()
    return Path(__file__).resolve().parent / "results" / f"decode-cpu-{today}.json"


# ---- ours against peers --------------------------------------------------------------------------


def comparison(options: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
    """Yield one result line per configuration, and print it for people."""
    import infer
    from infer.bench import ours
    from infer.model import resolve

    say = print if not options.json else (lambda *_: None)
    path = resolve(options.model)
    cold = {} if options.no_cold_start else ours.cold_start(options.model, options.dtype)
    start = time.perf_counter()
    model = infer.load(path, dtype=options.dtype)
    load_s = time.perf_counter() - start
    say(f"{options.model}, {model.params.dtype.name}, {threads} threads, {cpu_name()}")
    say(f"ours: load {load_s:.2f} s in this process")
    for name, figures in cold.items():
        say(
            f"ours: fresh process, {name}: " + ", ".join(f"{k} {v:.2f}" for k, v in figures.items())
        )
    ids = model.tokenizer.encode(TEXT)
    with contextlib.ExitStack() as stack:
        others = []
        for script, dtype, label in (k for name in options.against for k in peers.KINDS[name]):
            python = peers.python_of(options.peers)
            peer = peers.Peer.start(python, script, dtype, label, path, threads)
            stack.callback(peer.close)
            peer.settle()
            say(
                f"{label} {peer.version}: process to loaded {peer.start_s:.2f} s, load "
                f"{peer.load_s:.2f} s, idle CPU {peer.idle_cpu_share():.0%} of a core; {peer.info}"
            )
            others.append(peer)
        for batch in options.batch:
            for length in options.prompt_tokens:
                case = DecodeCase(batch=batch, prompt_tokens=length, new_tokens=options.new_tokens)
                line = measure(model.params, case, ids, others, options.rounds, options.patience)
                line |= {"model": options.model, "threads": threads, "load_s": load_s}
                line["cold_start"] = cold
                report(line, say)
                yield stamped("decode", line)


def measure(
    params: Any,
    case: DecodeCase,
    ids: Sequence[int],
    others: list[peers.Peer],
    rounds: int,
    patience: float = 0.0,
) -> dict[str, Any]:
    """Return medians of all engines over `rounds` alternating rounds, after a warm-up round."""
    from infer.bench import ours

    prompts = prompt_rows(ids, case)
    timings: dict[str, list[ours.Timing]] = {"ours": []} | {p.label: [] for p in others}
    cold = {}
    busy = []
    for turn in range(_WARM_UP + rounds):
        busy.append(peers.wait_for_quiet(patience))
        for label in timings:
            peer = next((p for p in others if p.label == label), None)
            if peer is None:
                timing = ours.run(params, prompts, case.new_tokens)
            else:
                timing = ours.Timing(**peer.generate(prompts, case.new_tokens))
                peer.settle()
            if turn < _WARM_UP:
                cold.setdefault(label, timing)
            else:
                timings[label].append(timing)
    bound = ours.roofline_of(params, case)
    line = {
        **ours.describe(params),
        "shape": vars(case),
        "rounds": rounds,
        "busy_cores": max(busy),
        "bytes": bound["bytes"],
        "flops": bound["flops"],
        "bandwidth": bound["bandwidth"],
        **figures(timings["ours"], cold["ours"], case),
        "compile_s": cold["ours"].compile_s,
        "peers": {},
    }
    line["roofline_fraction"] = bound["bound_s"] / line["time_s"]
    for peer in others:
        pairs = list(zip(timings["ours"], timings[peer.label], strict=True))
        line["peers"][peer.label] = {
            "version": peer.version,
            "start_s": peer.start_s,
            "load_s": peer.load_s,
            **figures(timings[peer.label], cold[peer.label], case),
            "decode_ratio": spread([a.decode_rate() / b.decode_rate() for a, b in pairs]),
            "prefill_ratio": spread([b.ttft_s / a.ttft_s for a, b in pairs]),
            "equal_leading_tokens": equal_leading_tokens(pairs[-1][0].tokens, pairs[-1][1].tokens),
        }
    return line


def figures(timings: list[Any], first: Any, case: DecodeCase) -> dict[str, float]:
    """Return medians of one engine: seconds of a decode step, rates, time to first token."""
    median = lambda values: statistics.median(list(values))
    return {
        "time_s": median(t.decode_s / (case.new_tokens - 1) for t in timings),
        "decode_tokens_per_s": median(t.decode_rate() for t in timings),
        "prefill_tokens_per_s": median(t.prefill_rate(case) for t in timings),
        "ttft_s": median(t.ttft_s for t in timings),
        "first_call_ttft_s": first.ttft_s + first.compile_s,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return median, min and max."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def equal_leading_tokens(a: list[list[int]], b: list[list[int]]) -> int:
    """Return how many leading tokens two engines agree on, in the row where it is fewest."""
    return min(_common_prefix(x, y) for x, y in zip(a, b, strict=True))


def _common_prefix(x: list[int], y: list[int]) -> int:
    return next((i for i, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), len(x))


def report(line: dict[str, Any], say: Any) -> None:
    """Print one configuration as a small table."""
    shape = line["shape"]
    say(
        f"\nbatch {shape['batch']}, {shape['prompt_tokens']} prompt tokens, "
        f"{shape['new_tokens']} new; medians of {line['rounds']} rounds"
    )
    say(
        f"{'':<18}{'decode t/s':>11}{'prefill t/s':>12}{'TTFT s':>8}   ours / peer: decode, prefill"
    )
    for label, row in {"ours": line, **line["peers"]}.items():
        text = (
            f"{label:<18}{row['decode_tokens_per_s']:>11.1f}{row['prefill_tokens_per_s']:>12.0f}"
            f"{row['ttft_s']:>8.3f}"
        )
        if "decode_ratio" in row:
            ratio = lambda r: f"{r['median']:.2f} ({r['min']:.2f}..{r['max']:.2f})"
            text += (
                f"   {ratio(row['decode_ratio'])}, {ratio(row['prefill_ratio'])}; "
                f"{row['equal_leading_tokens']} leading tokens equal"
            )
        say(text)
    say(
        f"ours: compile {line['compile_s']:.2f} s, {line['bytes'] / 1e6:.0f} MB and "
        f"{line['flops'] / 1e9:.2f} GFLOP a step, {line['roofline_fraction']:.0%} of the roofline "
        f"bound at {line['bandwidth'] / 1e9:.1f} GB/s"
    )
    if line["busy_cores"] > peers.QUIET_CORES:
        say(f"other work took up to {line['busy_cores']:.1f} cores: do not rely on these figures")


# ---- cached against uncached ---------------------------------------------------------------------


def no_cache_lab(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one result line per context, and print it for people."""
    import infer
    from benchmarks import uncached
    from infer.bench import ours

    model = infer.load(options.model, dtype=options.dtype)
    ids = model.tokenizer.encode(TEXT)
    say = print if not options.json else (lambda *_: None)
    say(f"{'context':>8}{'cached t/s':>12}{'uncached t/s':>14}   ratio")
    for context in options.context:
        row = uncached.compare(
            model.params, ids, context, _NO_CACHE_TOKENS, options.rounds, options.patience
        )
        say(
            f"{context:>8}{row['cached_tokens_per_s']:>12.1f}{row['uncached_tokens_per_s']:>14.2f}"
            f"   {row['ratio']:.1f} ({row['ratio_min']:.1f}..{row['ratio_max']:.1f}), tokens "
            + ("equal" if row["tokens_equal"] else "NOT EQUAL")
        )
        yield stamped(
            "decode-no-cache", ours.describe(model.params) | {"model": options.model} | row
        )


# ---- results -------------------------------------------------------------------------------------


def stamped(benchmark: str, line: dict[str, Any]) -> dict[str, Any]:
    """Return a result line with the benchmark's name, the date and the chip."""
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "chip": cpu_name(),
        "cores": os.cpu_count(),
        **line,
    }


def save(path: Path, line: dict[str, Any]) -> None:
    """Append one configuration as a JSON line, figures cut to four digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    short = json.loads(json.dumps(line), parse_float=lambda text: float(f"{float(text):.4g}"))
    with path.open("a") as file:
        file.write(json.dumps(short) + "\n")


if __name__ == "__main__":
    sys.exit(main())
