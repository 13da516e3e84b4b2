"""Engines in turn, round after round: medians, ranges, and the ratio of each round.

In a round every engine does every case once; odd rounds go through the engines backwards.  The
first round warms up and is not counted.
"""

import contextlib
import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.bench import ours, peers
from infer.bench.cases import DecodeCase, prompt_rows
from infer.bench.machine import ReadBandwidth, busy_cores, cpu_name
from infer.models.params import Params

_WARM_UP = 1

# A run of one case by one engine.
Engine = Callable[[list[list[int]], int], ours.Timing]
Spread = dict[str, float]
# Takes a line about what goes on.
Say = Callable[[str], None]


def say_nothing(line: str) -> None:
    """Where nobody listens."""


def name_of(case: DecodeCase) -> str:
    """Return "decode_b<batch>" where tokens follow the first, else "prefill" or
    "prefill_b<batch>".
    """
    if case.new_tokens > 1:
        return f"decode_b{case.batch}"
    return "prefill" if case.batch == 1 else f"prefill_b{case.batch}"


@contextlib.contextmanager
def started_peers(
    kinds: Sequence[str],
    folder: Path,
    path: Path,
    threads: int,
    *,
    timeout_s: float = peers.TIMEOUT_S,
    say: Say = say_nothing,
) -> Iterator[list[peers.Peer]]:
    """Start the peers that `kinds` names, with the model loaded, and end them afterwards.

    Args:
        kinds: keys of `peers.KINDS`.
        folder: the peers' environment.
        path: of the GGUF file.
        threads: that each may use.
        timeout_s: seconds that one answer of a peer may take.
        say: called with a line before and after each start.

    Raises:
        NoPeersError: there is no environment of peers in `folder`.
        PeerError: one does not start.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for kind in kinds:
            for script, dtype, label in peers.KINDS[kind]:
                python = peers.python_of(folder)
                say(f"{label}: starts and loads {path.name}")
                peer = peers.Peer.start(python, script, dtype, label, path, threads, timeout_s)
                stack.callback(peer.close)
                say(f"{label}: ready after {peer.start_s:.1f} s")
                peer.settle()
                started.append(peer)
        yield started


def run_rounds(
    engines: Mapping[str, Engine],
    cases: Sequence[DecodeCase],
    ids: Sequence[int],
    rounds: int,
    before: Callable[[], None] = lambda: None,
    say: Say = say_nothing,
) -> dict[str, dict[str, list[ours.Timing]]]:
    """Return each case's timings by engine, one a counted round.

    Args:
        engines: label to engine.
        cases: what all do in each round.
        ids: the text that prompts are cut from.
        rounds: counted ones.
        before: called before each round, the first included.
        say: called with a line after each engine's turn.
    """
    timings = {name_of(case): {label: [] for label in engines} for case in cases}
    for turn in range(_WARM_UP + rounds):
        before()
        labels = list(engines)[:: 1 if turn % 2 else -1]
        for case in cases:
            prompts = prompt_rows(ids, case)
            for label in labels:
                start = time.perf_counter()
                timing = engines[label](prompts, case.new_tokens)
                seconds = time.perf_counter() - start
                which = f"round {turn} of {rounds}" if turn >= _WARM_UP else "warm-up"
                say(f"{which}, {name_of(case)}, {label}: {seconds:.2f} s")
                if turn >= _WARM_UP:
                    timings[name_of(case)][label].append(timing)
    return timings


def engine_of_peer(peer: peers.Peer, reuse: bool = False) -> Engine:
    """Return a peer as an engine; its turn ends when its threads sleep."""

    def run(prompts: list[list[int]], new_tokens: int) -> ours.Timing:
        answer = peer.generate(prompts, new_tokens, reuse)
        peer.settle()
        return ours.Timing(**answer)

    return run


def measure(
    params: Params,
    ids: Sequence[int],
    cases: Sequence[DecodeCase],
    started: Sequence[peers.Peer],
    *,
    rounds: int,
    threads: int,
    reuse: bool = False,
    kv_dtype: str | None = None,
    say: Say = say_nothing,
) -> dict[str, Any]:
    """Return all figures of one model: see `infer bench --help`.

    Args:
        params: our weights.
        ids: the text that prompts are cut from.
        cases: what is measured.
        started: peers that have loaded the same file; ratios at the top are to the first.
        rounds: counted ones.
        threads: that read memory, for the bandwidth.
        reuse: peers keep the keys and values of a prompt from round to round, for long ones; their
            times to the first token then mean nothing.
        kv_dtype: of our cache, as in `infer.generate`; peers keep their own, which is in the result
            as their "cache".
        say: called with a line after each engine's turn.
    """
    memory = ReadBandwidth(threads)
    bandwidth: list[float] = []
    busy: list[float] = []

    def before() -> None:
        busy.append(busy_cores())
        bandwidth.append(memory.measure())

    engines: dict[str, Engine] = {
        "ours": lambda prompts, new_tokens: ours.run(params, prompts, new_tokens, kv_dtype)
    }
    engines |= {peer.label: engine_of_peer(peer, reuse) for peer in started}
    timings = run_rounds(engines, cases, ids, rounds, before, say)
    bandwidth = bandwidth[_WARM_UP:]
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "threads": threads,
        "rounds": rounds,
        "busy_cores": max(busy),
        "read_bandwidth": spread(bandwidth),
        "ours": ours.describe(params, kv_dtype),
        "peers": {peer.label: about(peer) for peer in started},
        "cases": {},
    }
    ranges: dict[str, list[float]] = {}
    for case in cases:
        name = name_of(case)
        row = case_figures(case, timings[name])
        found["cases"][name] = row
        found["ours"]["implementations"] = timings[name]["ours"][-1].implementations
        if started:
            ratio = row["ratios"][started[0].label]
            found[f"ratio_{name}"] = ratio["median"]
            ranges[f"ratio_{name}"] = [ratio["min"], ratio["max"]]
        if name == "decode_b1":
            num_bytes = ours.step_bytes(params, case, kv_dtype)
            row["bytes_a_step"] = num_bytes
            rates = [t.decode_rate() * num_bytes for t in timings[name]["ours"]]
            fraction = spread([x / y for x, y in zip(rates, bandwidth, strict=True)])
            found["bandwidth_fraction"] = fraction["median"]
            ranges["bandwidth_fraction"] = [fraction["min"], fraction["max"]]
    return found | {"against": started[0].label if started else None, "ranges": ranges}


def about(peer: peers.Peer) -> dict[str, Any]:
    """Return what a result says about a peer."""
    return {
        "version": peer.version,
        "system_info": peer.info,
        "start_s": peer.start_s,
        "load_s": peer.load_s,
        **peer.details,
    }


def case_figures(case: DecodeCase, timings: Mapping[str, list[ours.Timing]]) -> dict[str, Any]:
    """Return tokens/s of all engines in one case, and of each peer the ratio ours / peer."""
    prefill = case.new_tokens == 1
    rate = lambda t: t.prefill_rate(case) if prefill else t.decode_rate()
    mine = timings["ours"]
    row: dict[str, Any] = {
        "shape": vars(case),
        "tokens_per_s": {k: spread([rate(t) for t in all]) for k, all in timings.items()},
        "ttft_s": {k: spread([t.ttft_s for t in all]) for k, all in timings.items()},
        "ratios": {},
        "equal_leading_tokens": {},
    }
    for label, theirs in timings.items():
        if label != "ours":
            pairs = list(zip(mine, theirs, strict=True))
            row["ratios"][label] = spread([rate(a) / rate(b) for a, b in pairs])
            row["equal_leading_tokens"][label] = equal_leading_tokens(
                mine[-1].tokens, theirs[-1].tokens
            )
    return row


def spread(values: Sequence[float]) -> Spread:
    """Return median, min and max."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def equal_leading_tokens(a: list[list[int]], b: list[list[int]]) -> int:
    """Return how many leading tokens two engines agree on, in the row where it is fewest."""
    return min(_common_prefix(x, y) for x, y in zip(a, b, strict=True))


def _common_prefix(x: list[int], y: list[int]) -> int:
    return next((i for i, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), len(x))


def text_of(found: dict[str, Any]) -> str:
    """Return the figures of `measure` for people."""
    mine = found["ours"]
    ran = ", ".join(sorted(set(mine["implementations"].values())))
    # INFER_NUM_THREADS can be less than the cores that this process has.
    threads = mine.get("native_threads")
    own_threads = "" if threads is None else f", {counted(threads, 'thread')}"
    lines = [
        f"{found['model']} on {found['cpu']}, {counted(found['threads'], 'thread')}, "
        f"{counted(found['rounds'], 'round')}",
        f"ours: {mine['weights']} weights, {mine['cache']} cache, {ran}; native operations: "
        f"{mine['native']}{own_threads}",
    ]
    for label, peer in found["peers"].items():
        build = peer.get("build_flags", "not recorded")
        cache = peer.get("cache", "not recorded")
        info = peer["system_info"].strip()
        lines.append(f"{label} {peer['version']}: {info} build: {build} cache: {cache}")
    lines.append(f"{'':<12}{'engine':<18}{'tokens/s':>26}{'ours / peer':>22}")
    for name, row in found["cases"].items():
        for label, rates in row["tokens_per_s"].items():
            ratio = row["ratios"].get(label)
            text = f"{name:<12}{label:<18}{_range(rates, '.1f'):>26}"
            lines.append(text + (f"{_range(ratio, '.2f'):>22}" if ratio else ""))
    if "bandwidth_fraction" in found:
        low, high = found["ranges"]["bandwidth_fraction"]
        step = found["cases"]["decode_b1"]["bytes_a_step"]
        lines.append(
            f"at batch 1 a step reads {step / 1e6:.0f} MB, {found['bandwidth_fraction']:.0%} "
            f"({low:.0%}..{high:.0%}) of the read bandwidth, "
            f"{found['read_bandwidth']['median'] / 1e9:.1f} GB/s"
        )
    if found["busy_cores"] > peers.QUIET_CORES:
        lines.append(
            f"other work took up to {found['busy_cores']:.1f} cores: do not rely on these figures"
        )
    return "\n".join(lines)


def counted(count: int, what: str) -> str:
    """Return a number of things: "1 round", "3 rounds"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _range(values: Spread, style: str) -> str:
    return f"{values['median']:{style}} ({values['min']:{style}}..{values['max']:{style}})"
