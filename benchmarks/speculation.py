"""Speculative decoding against plain decoding: copying, code and open prose, at several batches.

    python benchmarks/speculation.py --model smollm2-135m --batch 1 4 16

Every way decodes the same prompts greedily, in turn, round after round; tokens must be equal.
`speedup` is the median over rounds of plain decoding's seconds over the drafter's, both from the
first token of every row to the last, and from the call to the result (`speedup_whole`).
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

import numpy as np  # noqa: E402

import infer  # noqa: E402
from benchmarks.decode import save  # noqa: E402
from infer.bench.machine import cpu_name, use_threads  # noqa: E402
from infer.spec.by_name import parse_drafter  # noqa: E402

_CORPUS = _ROOT / "infer" / "eval" / "corpora" / "en.txt"
_CODE = sorted((_ROOT / "infer" / "sampling").glob("*.py")) + sorted(
    (_ROOT / "infer" / "plan").glob("*.py")
)
WORKLOADS = ("copying", "code", "prose")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = parser().parse_args(arguments)
    threads = use_threads(options.threads)
    model = infer.load(options.model, packed=None)
    for batch in options.batch:
        for workload in options.workload:
            line = measure(model, options, workload, batch)
            line |= {"threads": threads, "chip": cpu_name()}
            print(report(line), file=sys.stderr)
            print(json.dumps(line))
            if options.save:
                save(Path(options.save), line)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    today = datetime.date.today().isoformat()
    default = _ROOT / "benchmarks" / "results" / f"speculation-cpu-{today}.json"
    p = argparse.ArgumentParser(description="Speculative against plain decoding.")
    p.add_argument("--model", default="smollm2-135m", help="what infer.load takes")
    p.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    p.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    p.add_argument("--draft", nargs="+", default=["ngram:4", "suffix:4"])
    p.add_argument("--new-tokens", type=int, default=96)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, help="cores to use [default: all]")
    p.add_argument("--save", nargs="?", const=str(default), help="append the results to a file")
    return p


def prompts_of(workload: str, count: int, tokenizer: Any) -> list[list[int]]:
    """Return prompts of about 100 tokens; those of a workload differ."""
    if workload == "code":
        texts = ["\n".join(path.read_text().split("\n")[:200]) for path in _CODE]
        pieces = [text[at : at + 400] for text in texts for at in (600, 2200)]
        found = [piece for piece in pieces if len(piece) == 400]
    else:
        lines = [line for line in _CORPUS.read_text().split("\n") if len(line) > 300]
        pieces = [line[:300] for line in lines[:: max(1, len(lines) // count)]]
        if workload == "copying":
            pieces = [f"Text:\n{piece}\n\nThe same text again:\n{piece[:40]}" for piece in pieces]
        found = pieces
    if len(found) < count:
        raise SystemExit(f"{workload} has {len(found)} prompts, not {count}")
    return [tokenizer.encode(text) for text in found[:count]]


def measure(
    model: infer.Model, options: argparse.Namespace, workload: str, batch: int
) -> dict[str, Any]:
    """Return medians of all ways over the rounds, after one that warms up."""
    prompts = prompts_of(workload, batch, model.tokenizer)
    sampling = infer.SamplingParams(temperature=0.0, max_tokens=options.new_tokens, ignore_eos=True)
    drafts = {"plain": None} | {name: parse_drafter(name) for name in options.draft}
    times: dict[str, list[float]] = {name: [] for name in drafts}
    wholes: dict[str, list[float]] = {name: [] for name in drafts}
    stats: dict[str, Any] = {}
    tokens: dict[str, np.ndarray] = {}
    for number in range(1 + options.rounds):
        order = list(drafts) if number % 2 == 0 else list(drafts)[::-1]
        for name in order:
            start = time.perf_counter()
            out = model.generate(prompts, sampling, num_slots=batch, draft=drafts[name])
            whole = time.perf_counter() - start
            tokens[name], stats[name] = out.tokens, out.stats
            if number:
                rate = out.stats["decode_tokens_per_s"]
                times[name].append(batch * (options.new_tokens - 1) / rate)
                wholes[name].append(whole)
    ratio = lambda of, name: statistics.median(
        [a / b for a, b in zip(of["plain"], of[name], strict=True)]
    )
    kept = ("acceptance_rate", "tokens_per_pass", "passes_by_k", "turn_costs_by_k", "drafted")
    return {
        "benchmark": "speculation",
        "model": options.model,
        "workload": workload,
        "batch": batch,
        "new_tokens": options.new_tokens,
        "prompt_tokens": [len(p) for p in prompts],
        "rounds": options.rounds,
        "decode_s": {name: statistics.median(t) for name, t in times.items()},
        "speedup": {name: ratio(times, name) for name in options.draft},
        "speedup_range": {
            name: [f(a / b for a, b in zip(times["plain"], times[name], strict=True))
                   for f in (min, max)]
            for name in options.draft
        },
        "speedup_whole": {name: ratio(wholes, name) for name in options.draft},
        "equal": {
            name: bool(np.array_equal(tokens[name], tokens["plain"])) for name in options.draft
        },
        "stats": {name: {key: stats[name][key] for key in kept} for name in options.draft},
    }  # fmt: skip


def report(line: dict[str, Any]) -> str:
    """Return a result as a line for people."""
    parts = [f"{line['workload']} batch {line['batch']}:"]
    for name, gain in line["speedup"].items():
        s = line["stats"][name]
        rate = s["acceptance_rate"]
        parts.append(
            f"{name} {gain:.2f}x ({line['speedup_whole'][name]:.2f}x with prefill), "
            f"{s['tokens_per_pass']:.2f} tokens a pass, "
            + ("no drafts" if rate is None else f"{rate:.0%} accepted")
            + ("" if line["equal"][name] else ", TOKENS DIFFER")
        )
    return " | ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
