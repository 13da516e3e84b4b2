"""One turn a call against the loop that is one program.

    python benchmarks/stepped.py --model smollm2-135m

What a server pays for looking at every token.  `loop` is what `generate` runs: all turns in one
call.  `ahead` is `infer.generation.turns`: a call a turn, the next one started before this one is
read, and `ahead_4` the same with four turns a call.  `in_turn` reads a turn before it starts the
next.  `state` is the loop's own program called with one turn more each time, the host waiting for
the state.  All ways decode the same requests after the same prefill, in turn, round after round;
ratios are within a round.  `call_s` is what a call costs in which no turn is run.
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

import jax  # noqa: E402
import numpy as np  # noqa: E402

import infer  # noqa: E402
from benchmarks.decode import cpu_name, save  # noqa: E402
from infer.generation.host import Job  # noqa: E402
from infer.generation.prepare import RunOptions  # noqa: E402
from infer.generation.turns import Turns, read  # noqa: E402
from infer.sampling import SamplingParams  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = parser().parse_args(arguments)
    model = infer.load(options.model, packed=True if options.packed else False)
    for batch in options.batch:
        line = measure(model, options, batch)
        print(report(line), file=sys.stderr)
        print(json.dumps(line))
        if options.save:
            save(Path(options.save), line)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    today = datetime.date.today().isoformat()
    default = _ROOT / "benchmarks" / "results" / f"stepped-cpu-{today}.json"
    p = argparse.ArgumentParser(description="One turn a call against one program.")
    p.add_argument("--model", default="smollm2-135m", help="what infer.load takes")
    p.add_argument("--packed", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    p.add_argument("--prompt-tokens", type=int, default=16)
    p.add_argument("--turns", type=int, default=64, help="decode steps of a round")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--save", nargs="?", const=str(default), help="append the result to a file")
    return p


def measure(model: Any, options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Return the medians and ratios of all ways to decode."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, 10_000, options.prompt_tokens).tolist() for _ in range(batch)]
    # The first token comes with the prefill.
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=options.turns + 1)

    def prefilled() -> Job:
        job = Job.prepare(
            model.params, prompts, None, None, sampling, None, RunOptions(num_slots=batch)
        )
        job.run_to_first_tokens()
        return job

    ways: dict[str, Callable[[Job], Any]] = dict(
        loop=loop, ahead=ahead, ahead_4=ahead_4, in_turn=in_turn, state=state_by_state
    )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + options.rounds):  # the first compiles
        for name, way in ways.items():
            job = prefilled()
            start = time.perf_counter()
            way(job)
            seconds[name].append((time.perf_counter() - start) / options.turns)
            assert int(job.state.counters.decode_passes) >= options.turns
    seconds = {name: times[1:] for name, times in seconds.items()}
    return dict(
        benchmark="stepped",
        model=options.model,
        packed=options.packed,
        chip=cpu_name(),
        batch=batch,
        turns=options.turns,
        rounds=options.rounds,
        arrays=len(jax.tree.leaves((model.params, prefilled().state))),
        time_s={name: statistics.median(times) for name, times in seconds.items()},
        over_loop={name: ratio(seconds[name], seconds["loop"]) for name in ways if name != "loop"},
        call_s=calls_of_no_turn(prefilled()),
    )


def loop(job: Job) -> None:
    """Run all turns in one call."""
    job._run(np.int32(2**31 - 1), False)


def ahead(job: Job) -> None:
    """Read a turn while the next one runs."""
    _ahead(job, 1)


def ahead_4(job: Job) -> None:
    """Read four turns while the next four run."""
    _ahead(job, 4)


def _ahead(job: Job, per_call: int) -> None:
    turns = Turns(job.params, job.requests, job.state, caps=job.caps, per_call=per_call)
    for turn in turns:
        turn.token.tolist()
    job.state = turns.state


def in_turn(job: Job) -> None:
    """Read a turn, then start the next."""
    turns = Turns(job.params, job.requests, job.state, caps=job.caps)
    while read(turns.start())[-1].running:
        pass
    job.state = turns.state


def state_by_state(job: Job) -> None:
    """Call the loop's program for one turn more, and wait for its state."""
    while bool(np.any(np.asarray(job.state.request) < job.caps.requests)):
        job._run(int(job.state.counters.turns) + 1, False)


def calls_of_no_turn(job: Job, count: int = 50) -> dict[str, float]:
    """Return the median seconds of a call that runs no turn: of `Turns`, until it returns and until
    it is done; and of the loop's program.
    """
    loop(job)
    plain = [job._run(0, False) for _ in range(count)]
    turns = Turns(job.params, job.requests, job.state, caps=job.caps)
    returned, done = [], []
    for _ in range(count):
        start = time.perf_counter()
        seen = turns.start()
        returned.append(time.perf_counter() - start)
        read(seen)
        done.append(time.perf_counter() - start)
    middle = statistics.median
    return dict(returned=middle(returned), done=middle(done), state=middle(plain))


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """Return the median, the least and the most of the ratios within a round."""
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return dict(median=statistics.median(ratios), least=min(ratios), most=max(ratios))


def report(line: dict[str, Any]) -> str:
    """Return the result in words."""
    lines = [
        f"{line['model']}, batch {line['batch']}: {line['time_s']['loop'] * 1e3:.2f} ms a turn"
    ]
    for name, over in line["over_loop"].items():
        lines.append(
            f"  {name:8} {line['time_s'][name] * 1e3:.2f} ms, {over['median']:.3f}x "
            f"[{over['least']:.3f}-{over['most']:.3f}]"
        )
    call = {name: f"{value * 1e3:.2f}" for name, value in line["call_s"].items()}
    lines.append(
        f"  a call of no turn: {call['done']} ms, of these {call['returned']} until it returns; "
        f"of the loop's program {call['state']}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
