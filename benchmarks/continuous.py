"""Refilled slots against static batching and against a loop driven by the host.

    python benchmarks/continuous.py --model smollm2-135m

The load is the textbook picture: among every `--slots` answers one is 40 times as long as the
others.  Static batching runs `--slots` prompts at a time and waits for the longest of them.  The
host loop is the same program with the same refill, one turn a call, the host looking at the state
after each.  Every way runs all requests in turn, round after round; ratios are within a round.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

import numpy as np  # noqa: E402

import infer  # noqa: E402
from benchmarks.decode import save  # noqa: E402
from infer.bench.machine import cpu_name  # noqa: E402
from infer.generation.host import Job  # noqa: E402
from infer.generation.prepare import RunOptions  # noqa: E402
from infer.sampling import SamplingParams  # noqa: E402

_LONG_OVER_SHORT = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = parser().parse_args(arguments)
    line = measure(options)
    print(report(line), file=sys.stderr)
    print(json.dumps(line))
    if options.save:
        save(Path(options.save), line)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    today = datetime.date.today().isoformat()
    default = _ROOT / "benchmarks" / "results" / f"continuous-cpu-{today}.json"
    p = argparse.ArgumentParser(description="Refilled slots against static batching.")
    p.add_argument("--model", default="smollm2-135m", help="what infer.load takes")
    p.add_argument("--slots", type=int, default=8)
    p.add_argument("--batches", type=int, default=8, help="batches of static batching")
    p.add_argument("--short", type=int, default=3, help=f"tokens; long is {_LONG_OVER_SHORT}x")
    p.add_argument("--prompt-tokens", type=int, default=24)
    p.add_argument("--samples-prompt", type=int, default=256, help="tokens of the shared prompt")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--save", nargs="?", const=str(default), help="append the result to a file")
    return p


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians and ratios of all ways to run the load."""
    model = infer.load(options.model)
    rng = np.random.default_rng(0)
    lengths = ([options.short] * (options.slots - 1) + [options.short * _LONG_OVER_SHORT]) * (
        options.batches
    )
    ids = lambda n: rng.integers(100, 10_000, n).tolist()
    prompts = [ids(options.prompt_tokens) for _ in lengths]
    each = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in lengths]
    run = RunOptions(num_slots=options.slots)

    def job(which: slice) -> Job:
        return Job.prepare(model.params, prompts[which], None, None, each[which], None, run)

    def refilled() -> dict[str, Any]:
        j = job(slice(None))
        j.run_all()
        return j.stats()

    def by_host() -> dict[str, Any]:
        j = job(slice(None))
        for _ in j.bursts(turns=1):
            pass
        return j.stats()

    def static() -> dict[str, Any]:
        for first in range(0, len(prompts), options.slots):
            job(slice(first, first + options.slots)).run_all()
        return {}

    shared = [ids(options.samples_prompt)]
    samples = SamplingParams(
        n=options.slots, temperature=1.0, seed=1, ignore_eos=True, max_tokens=8
    )

    def sample(share: bool) -> Callable[[], dict[str, Any]]:
        return lambda: (
            infer.generate(
                model.params,
                shared,
                sampling=samples,
                num_slots=options.slots,
                share_prefixes=share,
            ).stats
        )

    ways = dict(
        refilled=refilled,
        host_loop=by_host,
        static=static,
        samples_shared=sample(True),
        samples_separate=sample(False),
    )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    stats: dict[str, dict[str, Any]] = {}
    for _ in range(1 + options.rounds):  # the first compiles
        for name, way in ways.items():
            start = time.perf_counter()
            stats[name] = way()
            seconds[name].append(time.perf_counter() - start)
    seconds = {name: times[1:] for name, times in seconds.items()}
    longest = max(lengths)
    line = dict(
        model=options.model,
        chip=cpu_name(),
        requests=len(lengths),
        slots=options.slots,
        short=options.short,
        long=longest,
        rounds=options.rounds,
        tokens=sum(lengths),
        ideal=options.slots * longest / sum(lengths[: options.slots]),
        time_s={name: statistics.median(times) for name, times in seconds.items()},
        tokens_per_s={
            name: sum(lengths) / statistics.median(seconds[name])
            for name in ("refilled", "host_loop", "static")
        },
        refilled_over_static=_ratio(seconds["static"], seconds["refilled"]),
        refilled_over_host_loop=_ratio(seconds["host_loop"], seconds["refilled"]),
        shared_over_separate=_ratio(seconds["samples_separate"], seconds["samples_shared"]),
        compiles=stats["refilled"]["compiles"],
        refills=stats["refilled"]["refills"],
        decode_passes=stats["refilled"]["decode_passes"],
        forks=stats["samples_shared"]["forks"],
        pages_copied=stats["samples_shared"]["pages_copied"],
    )
    return line | waste(prompts, lengths, run.page_size)


def _ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return dict(median=statistics.median(ratios), least=min(ratios), most=max(ratios))


def waste(prompts: list[list[int]], lengths: list[int], page_size: int) -> dict[str, Any]:
    """Return the tokens of memory reserved and never used, by pages and by contiguous rows."""
    # The last generated token is never fed back.
    used = [len(p) + n - 1 for p, n in zip(prompts, lengths, strict=True)]
    paged = [-(-n // page_size) * page_size - n for n in used]
    contiguous = [max(used) - n for n in used]
    return dict(
        page_size=page_size,
        wasted_tokens_paged=sum(paged),
        wasted_tokens_paged_worst=max(paged),
        wasted_tokens_contiguous=sum(contiguous),
        used_tokens=sum(used),
    )


def report(line: dict[str, Any]) -> str:
    """Return the result in words."""
    speed, over = line["tokens_per_s"], line["refilled_over_static"]
    host, share = line["refilled_over_host_loop"], line["shared_over_separate"]
    return "\n".join(
        [
            f"{line['requests']} requests through {line['slots']} slots, one of {line['slots']} "
            f"with {line['long']} tokens, the others with {line['short']}",
            f"refilled {speed['refilled']:.1f} tokens/s, static {speed['static']:.1f}: "
            f"{over['median']:.2f}x [{over['least']:.2f}-{over['most']:.2f}], ideal "
            f"{line['ideal']:.1f}x",
            f"one program against a host loop: {host['median']:.2f}x "
            f"[{host['least']:.2f}-{host['most']:.2f}]",
            f"{line['slots']} samples of one prompt, shared against separate: "
            f"{share['median']:.2f}x [{share['least']:.2f}-{share['most']:.2f}]",
            f"memory reserved and never used: pages {line['wasted_tokens_paged']} tokens (at most "
            f"{line['wasted_tokens_paged_worst']} a sequence), contiguous rows "
            f"{line['wasted_tokens_contiguous']}, of {line['used_tokens']} used",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
