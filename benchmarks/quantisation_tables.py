"""Tables and a plot of saved quantisation results, in docs/quantisation.md."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Lines = Sequence[dict[str, Any]]

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_TARGET = _DOCS / "quantisation.md"
# Pairs whose perplexities are compared by window: the second is expected to be better.
_PAIRS = (
    ("RTN 4", "GPTQ 4"),
    ("RTN 4", "GPTQ 4, act-order"),
    ("RTN 4, zero point", "AWQ 4"),
    ("AWQ 4, no clipping", "AWQ 4"),
    ("AWQ 4", "AWQ + GPTQ 4"),
    ("AWQ 4, g32", "AWQ + GPTQ 4, g32"),
    ("GPTQ 4, act-order, g32", "AWQ + GPTQ 4, g32"),
    ("RTN 3, zero point", "GPTQ 3, act-order, zero point"),
    ("RTN 3, zero point", "AWQ 3"),
    ("MXFP4, floor", "MXFP4, ceil"),
    ("FP4", "NF4, double"),
    ("RTN 8 + int8 activations", "SmoothQuant"),
    ("MXFP4, floor", "MXFP4, blocks turned"),
    ("RTN 4", "QuaRot + RTN 4"),
    ("GPTQ 4, act-order", "QuaRot + GPTQ 4"),
    ("GPTQ 4, act-order", "QuaRot (values) + GPTQ 4"),
    ("GPTQ 4 + int8 activations", "QuaRot + GPTQ 4 + int8 activations"),
    ("GPTQ 4 + int4 activations", "QuaRot + GPTQ 4 + int4 activations"),
    ("GPTQ 4 + int4 activations", "QuaRot (values) + GPTQ 4 + int4 activations"),
    ("QuaRot + GPTQ 4 + int4 activations", "SpinQuant + GPTQ 4 + int4 activations"),
)


def write(results: Path) -> None:
    """Put the tables of all models between the markers of docs/quantisation.md, and the plots
    beside it.
    """
    parts = []
    for path in sorted(results.glob("quantisation-*.json")):
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        latest = list({x["method"]: x for x in lines if x["benchmark"] == "quantisation"}.values())
        speeds = speeds_of([x for x in lines if x["benchmark"] == "quantisation-speed"])
        if not latest:  # speeds alone
            continue
        model = latest[0]["model"]
        name = f"quantisation-{model}.svg"
        (_DOCS / name).write_text(plot(latest))
        parts.append(
            f"### {model}\n\n{table(latest, speeds)}\n\n![KL over bits]({name})\n\n{pairs(latest)}"
        )
    text = _TARGET.read_text()
    begin, end = "<!-- results: benchmarks/quantisation.py -->", "<!-- end of results -->"
    if begin not in text or end not in text:
        raise SystemExit(f"{_TARGET.name} has no markers {begin} and {end}")
    whole = re.sub(
        f"{re.escape(begin)}.*{re.escape(end)}",
        lambda _: f"{begin}\n" + "\n\n".join(parts) + f"\n{end}",
        text,
        flags=re.DOTALL,
    )
    _TARGET.write_text(whole)


def speeds_of(timed: Lines) -> dict[str, dict[str, tuple[float, float]]]:
    """Return tokens a second and the ratio to float32 by method and phase; later lines win.

    Methods of one format share them: the same program runs over other codes.
    """
    from benchmarks import quantisation

    found = _timed(timed)
    formats = {
        name: quantisation.nearest(method).format_for((4096, 4096))
        for name, method in quantisation.methods().items()
        if not isinstance(method, quantisation.Turned)
    }
    of_format = {formats[name]: each for name, each in found.items() if name in formats}
    shared = {name: of_format[f] for name, f in formats.items() if f in of_format}
    return shared | found


def _timed(timed: Lines) -> dict[str, dict[str, tuple[float, float]]]:
    return {
        name: {
            phase: (line["tokens_per_s"][name][phase], ratio)
            for phase, ratio in line["ratios"][name].items()
        }
        for line in timed
        for name in line["ratios"]
    }


def table(lines: Lines, speeds: dict[str, dict[str, tuple[float, float]]]) -> str:
    """Return one row a method, best divergence first within equal whole bits.

    Args:
        lines: the quality of each method.
        speeds: tokens a second and their ratio to float32 by method, of those that were timed.
    """
    texts = list(lines[0]["texts"])
    columns = ["method", "bits", "MB", "PPL ratio [95%]", "KL", "top-1"]
    columns += [f"ratio {name}" for name in texts]
    columns += ["prefill", "batch 1", "batch 32"] if speeds else []
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for line in sorted(lines, key=lambda x: (-int(x["bits_per_weight"]), x["overall"]["kl"])):
        whole = line["overall"]
        ratio, low, high = whole["ratio"]
        cells = [
            line["method"],
            f"{line['bits_per_weight']:.3g}",
            f"{line['bytes'] / 1e6:.0f}",
            f"{ratio:.3f} [{low:.3f}, {high:.3f}]",
            f"{whole['kl']:.4f}",
            f"{whole['top1']:.1%}",
            *(f"{line['texts'][name]['ratio'][0]:.3f}" for name in texts),
            *(_speeds(speeds, line["method"]) if speeds else []),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    first = lines[0]
    bases = [f"{name} {first['texts'][name]['base_perplexity']:.2f}" for name in texts]
    rows += [
        "",
        f"Float32 takes {first['float_bytes'] / 1e6:.0f} MB; its perplexity is "
        f"{first['overall']['base_perplexity']:.2f} ({', '.join(bases)}). "
        f"{first['overall']['num_windows']} windows of {first['context']} tokens, the second half "
        "of each scored; float32 is the bundled 4-bit file decoded. MB: the whole model; embedding "
        "and head stay in float32."
        + (
            " Speeds are tokens a second in the CPU's native operations and, in brackets, their"
            f" ratio to float32 ({base_speeds(speeds)}) in the same run: medians of rounds in"
            " turns, a prompt of 512 tokens, then decoding one sequence, and 32; methods of one"
            " format share them."
            if speeds
            else ""
        ),
    ]
    return "\n".join(rows)


_PHASES = ("prefill", "decode_1", "decode_32")


def _speeds(speeds: dict[str, dict[str, tuple[float, float]]], method: str) -> list[str]:
    if method not in speeds:
        return ["-"] * len(_PHASES)
    return [f"{speeds[method][n][0]:.0f} ({speeds[method][n][1]:.2f})" for n in _PHASES]


def base_speeds(speeds: dict[str, dict[str, tuple[float, float]]]) -> str:
    return ", ".join(f"{speeds['float32'][n][0]:.0f}" for n in _PHASES)


def pairs(lines: Lines) -> str:
    """Return the paired comparisons: the ratio of two methods' perplexities on the same windows."""
    known = {line["method"]: line for line in lines}
    rows = [
        "| better? | than | PPL ratio, paired [95%] | KL difference [95%] | |",
        "|---|---|---|---|---|",
    ]
    for worse, better in _PAIRS:
        if worse not in known or better not in known:
            continue
        a, b = known[worse], known[better]
        nll = _bootstrap(np.array(b["nll"]) - np.array(a["nll"]))
        kl = _bootstrap(np.array(b["kl"]) - np.array(a["kl"]))
        ratio = [math.exp(x) for x in nll]
        verdict = "better" if kl[2] < 0 else "worse" if kl[1] > 0 else "no difference shown"
        rows.append(
            f"| {better} | {worse} | {ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}] | "
            f"{kl[0]:+.4f} [{kl[1]:+.4f}, {kl[2]:+.4f}] | {verdict} |"
        )
    return "\n".join(rows)


def _bootstrap(values: np.ndarray) -> tuple[float, float, float]:
    """Return mean and 95% interval by window."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (10_000, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def plot(lines: Lines) -> str:
    """Return an SVG of KL (logarithmic) over bits a weight."""
    width, height, left, bottom = 760, 460, 70, 50
    kl = [max(line["overall"]["kl"], 1e-6) for line in lines]
    bits = [line["bits_per_weight"] for line in lines]
    low, high = math.floor(math.log10(min(kl))), math.ceil(math.log10(max(kl)))
    least, most = math.floor(min(bits) - 0.2), math.ceil(max(bits) + 0.2)
    x = lambda b: left + (b - least) / (most - least) * (width - left - 150)
    y = lambda k: 20 + (high - math.log10(k)) / (high - low) * (height - bottom - 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{left} {at:.0f}H{width - 140}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.0f}" text-anchor="end">1e{power}</text>')
    for bit in range(least, most + 1):
        parts.append(f'<text x="{x(bit):.0f}" y="{height - bottom + 18}">{bit}</text>')
    parts.append(f'<text x="{left + 150}" y="{height - 12}">bits a weight</text>')
    parts.append('<text x="12" y="14">KL to float32, nats a token</text>')
    taken: list[tuple[float, float]] = []
    for line, b, k in sorted(zip(lines, bits, kl, strict=True), key=lambda each: each[2]):
        px, py = x(b), y(k)
        label = py + 4
        while any(abs(label - other) < 11 and abs(px - where) < 120 for where, other in taken):
            label += 11
        taken.append((px, label))
        parts.append(f'<circle cx="{px:.0f}" cy="{py:.0f}" r="3.5" fill="#1f77b4"/>')
        parts.append(f'<text x="{px + 7:.0f}" y="{label:.0f}">{line["method"]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
