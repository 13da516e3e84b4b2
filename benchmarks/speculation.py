"""Speculative decoding against plain decoding: copying, code and open prose, at several batches.

    python benchmarks/speculation.py --model smollm2-135m --batch 1 4 16 --save
    python benchmarks/speculation.py --peers .venv-peers --save    # llama.cpp's n-grams beside it
    python benchmarks/speculation.py --write-docs                  # from the newest saved results

Every way decodes the same prompts greedily, in turn, round after round; tokens must be equal.
`speedup` is the median over rounds of plain decoding's seconds over the drafter's, both from the
first token of every row to the last, and from the call to the result (`speedup_whole`).  The peer
decodes the same ids of the same file with and without its own prompt lookup, in the same rounds.
"""

import argparse
import contextlib
import datetime
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

import numpy as np  # noqa: E402

import infer  # noqa: E402
from benchmarks.decode import save  # noqa: E402
from infer.bench import compare, peers  # noqa: E402
from infer.bench.machine import cpu_name, use_threads  # noqa: E402
from infer.model import resolve  # noqa: E402
from infer.spec.by_name import parse_drafter  # noqa: E402

_CORPUS = _ROOT / "infer" / "eval" / "corpora" / "en.txt"
_CODE = sorted((_ROOT / "infer" / "sampling").glob("*.py")) + sorted(
    (_ROOT / "infer" / "plan").glob("*.py")
)
WORKLOADS = ("copying", "code", "prose")
# The peer's ways -> drafts a row and step.
_PEER_WAYS = {"llama.cpp": 0, "llama.cpp ngram:4": 4}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = parser().parse_args(arguments)
    if options.write_docs:
        write_docs(_ROOT / "docs" / "speculation.md", _ROOT / "benchmarks" / "results")
        return 0
    if options.new_tokens < 2:
        print(f"--new-tokens is {options.new_tokens}; decoding begins at 2", file=sys.stderr)
        return 2
    threads = use_threads(options.threads)
    try:
        with peer_of(options, threads) as peer:
            model = infer.load(options.model, packed=None)
            for batch in options.batch:
                for workload in options.workload:
                    line = measure(model, peer, options, workload, batch)
                    line |= {"threads": threads, "chip": cpu_name()}
                    line |= {"date": datetime.date.today().isoformat()}
                    print(report(line), file=sys.stderr, flush=True)
                    print(json.dumps(line), flush=True)
                    if options.save:
                        save(Path(options.save), line)
    except (peers.PeerError, peers.NoPeersError) as error:
        print(error, file=sys.stderr)
        return 2
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
    p.add_argument("--peers", type=Path, help="their environment, for llama.cpp's prompt lookup")
    p.add_argument("--save", nargs="?", const=str(default), help="append the results to a file")
    p.add_argument("--write-docs", action="store_true", help="put them into docs/speculation.md")
    return p


@contextlib.contextmanager
def peer_of(options: argparse.Namespace, threads: int) -> Iterator[peers.Peer | None]:
    """Give llama.cpp with the model's file loaded; None where no peers are asked for."""
    if options.peers is None:
        yield None
        return
    path = Path(resolve(options.model))
    with compare.started_peers(["llama.cpp"], options.peers, path, threads) as (peer,):
        yield peer


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
    model: infer.Model,
    peer: peers.Peer | None,
    options: argparse.Namespace,
    workload: str,
    batch: int,
) -> dict[str, Any]:
    """Return medians of all ways over the rounds, after one that warms up."""
    prompts = prompts_of(workload, batch, model.tokenizer)
    sampling = infer.SamplingParams(temperature=0.0, max_tokens=options.new_tokens, ignore_eos=True)
    drafts = {"plain": None} | {name: parse_drafter(name) for name in options.draft}
    theirs = _PEER_WAYS if peer else {}
    ways = [*drafts, *theirs]
    times: dict[str, list[float]] = {name: [] for name in ways}
    wholes: dict[str, list[float]] = {name: [] for name in ways}
    stats: dict[str, Any] = {}
    tokens: dict[str, np.ndarray] = {}
    for number in range(1 + options.rounds):
        for name in ways if number % 2 == 0 else ways[::-1]:
            start = time.perf_counter()
            if peer and name in theirs:
                answer = peer.speculate(prompts, options.new_tokens, theirs[name])
                whole, seconds = time.perf_counter() - start, answer["decode_s"]
                tokens[name], stats[name] = np.asarray(answer["tokens"]), peer_stats(answer, batch)
                peer.settle()
            else:
                out = model.generate(prompts, sampling, num_slots=batch, draft=drafts[name])
                whole = time.perf_counter() - start
                tokens[name], stats[name] = out.tokens, out.stats
                seconds = batch * (options.new_tokens - 1) / out.stats["decode_tokens_per_s"]
            if number:
                times[name].append(seconds)
                wholes[name].append(whole)
    baseline = {name: "llama.cpp" if name in theirs else "plain" for name in ways}
    drafting = [name for name in ways if name != baseline[name]]
    ratios = lambda of, name: [a / b for a, b in zip(of[baseline[name]], of[name], strict=True)]
    kept = ("acceptance_rate", "tokens_per_pass", "passes_by_k", "turn_costs_by_k", "drafted")
    return {
        "benchmark": "speculation",
        "model": options.model,
        "workload": workload,
        "batch": batch,
        "new_tokens": options.new_tokens,
        "prompt_tokens": [len(p) for p in prompts],
        "rounds": options.rounds,
        "peer": {"version": peer.version, **peer.details} if peer else None,
        "decode_s": {name: statistics.median(t) for name, t in times.items()},
        "speedup": {name: statistics.median(ratios(times, name)) for name in drafting},
        "speedup_range": {
            name: [min(ratios(times, name)), max(ratios(times, name))] for name in drafting
        },
        "speedup_whole": {name: statistics.median(ratios(wholes, name)) for name in drafting},
        "equal": {
            name: bool(np.array_equal(tokens[name], tokens[baseline[name]])) for name in drafting
        },
        "stats": {name: {key: stats[name].get(key) for key in kept} for name in drafting},
    }


def peer_stats(answer: dict[str, Any], batch: int) -> dict[str, Any]:
    """Return a peer's counts under the names that `generate` uses."""
    decoded = sum(len(row) for row in answer["tokens"]) - batch
    return {
        "drafted": answer["drafted"],
        "acceptance_rate": answer["accepted"] / answer["drafted"] if answer["drafted"] else None,
        "tokens_per_pass": decoded / max(1, answer["row_passes"]),
    }


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


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the results as a Markdown table, a row for each drafter of each batch."""
    rows = [
        "| model | text | batch | drafter | drafts that stand | tokens a pass | tokens/s, plain "
        "| speed-up (least to most) | from the call to the result |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        for name, gain in line["speedup"].items():
            low, high = line["speedup_range"][name]
            s = line["stats"][name]
            rate = "-" if s["acceptance_rate"] is None else f"{s['acceptance_rate']:.0%}"
            plain = line["decode_s"]["llama.cpp" if name.startswith("llama.cpp") else "plain"]
            rows.append(
                f"| {line['model']} | {line['workload']} | {line['batch']} | {name} | {rate} | "
                f"{s['tokens_per_pass']:.2f} | "
                f"{line['batch'] * (line['new_tokens'] - 1) / plain:.0f} | "
                f"**{gain:.2f}** ({low:.2f} to {high:.2f}) | {line['speedup_whole'][name]:.2f} |"
            )
    return "\n".join(rows)


def write_docs(document: Path, results: Path) -> None:
    """Replace the table of `document` by that of the newest saved results.

    It stands between `<!-- speculation -->` and `<!-- /speculation -->`; of several results for
    the same model, text, batch and drafter the last counts, so that a run without peers leaves
    theirs.
    """
    found: dict[Any, dict[str, Any]] = {}
    for path in sorted(results.glob("speculation-*.json")):
        for line in map(json.loads, path.read_text().splitlines()):
            at = (line["model"], line["batch"], WORKLOADS.index(line["workload"]))
            for name in line["speedup"]:
                only = {name: line["speedup"][name]}
                found[(*at, name.startswith("llama.cpp"), name)] = line | {"speedup": only}
    if not found:
        raise SystemExit(f"{results} has no speculation-*.json: run with --save first")
    lines = [found[key] for key in sorted(found, key=lambda k: (k[0] != "smollm2-135m", *k))]
    text = document.read_text()
    pattern = re.compile(r"(<!-- speculation -->\n).*?(<!-- /speculation -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{document} has no place for the table")
    dates, rounds = ({line[key] for line in lines} for key in ("date", "rounds"))
    newest = max(lines, key=lambda line: line["date"])
    when = f"{' to '.join(dict.fromkeys((min(dates), max(dates))))}, {newest['chip']}, "
    span = " to ".join(str(n) for n in dict.fromkeys((min(rounds), max(rounds))))
    when += f"{newest['threads']} threads, {span} rounds in turns"
    document.write_text(
        pattern.sub(lambda match: f"{match[1]}{when}.\n\n{table(lines)}\n{match[2]}", text)
    )


if __name__ == "__main__":
    sys.exit(main())
