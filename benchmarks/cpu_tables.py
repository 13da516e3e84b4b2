"""Markdown tables of saved results, and docs/cpu.md with them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import cpu_accuracy

_NAMES = {
    "prefill": "prefill 512",
    "decode-b1": "decode, batch 1",
    "decode-b8": "decode, batch 8",
    "decode-b32": "decode, batch 32",
    "decode-4096": "decode, batch 1, at context 4096",
    "decode-4096-f16": "the same, our cache in float16",
}

Lines = Sequence[dict[str, Any]]


def speed(lines: Lines) -> str:
    """Return tokens/s and ratios of all sections, and memory and first tokens below."""
    rows = [
        "| model | | ours | llama.cpp | ours / llama.cpp | transformers f32 | bf16 | ours / best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        if line["section"] not in _NAMES:
            continue
        (case,) = line["cases"].values()
        rates, ratios = case["tokens_per_s"], case["ratios"]
        cell = lambda label, r=rates: _spread(r[label], ".0f") if label in r else "-"
        slow = [r for label, r in ratios.items() if label.startswith("transformers")]
        best = _spread(min(slow, key=lambda r: r["median"]), ".2f") if slow else "-"
        rows.append(
            f"| {line['model']} | {_NAMES[line['section']]} | {cell('ours')} | {cell('llama.cpp')} "
            f"| **{_spread(ratios['llama.cpp'], '.2f')}** | {cell('transformers f32')} | "
            f"{cell('transformers bf16')} | {best} |"
        )
    fractions = [
        f"{line['model']} {_NAMES[line['section']]}: {case['bytes_a_step'] / 1e6:.0f} MB a step, "
        f"{line['bandwidth_fraction']:.0%} "
        f"({line['ranges']['bandwidth_fraction'][0]:.0%} to "
        f"{line['ranges']['bandwidth_fraction'][1]:.0%}) of "
        f"{line['read_bandwidth']['median'] / 1e9:.1f} GB/s"
        for line in lines
        if line["section"] in _NAMES and "bandwidth_fraction" in line
        for case in line["cases"].values()
    ]
    text = "\n".join(rows)
    if fractions:
        text += "\n\nRead bandwidth that a step at batch 1 uses: " + "; ".join(fractions) + "."
    return text + memory(lines)


def memory(lines: Lines) -> str:
    """Return load time, first tokens and peak memory; empty where none was measured."""
    found = [line for line in lines if line["section"] == "memory"]
    if not found:
        return ""
    rows = [
        "",
        "",
        "| model | load s, ours | llama.cpp | first token s, warm (512 tokens) | first call |"
        " peak MB, ours | after imports | after load | peak / (file + pool) | without imports |"
        " llama.cpp MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in found:
        a, b = line["ours"], line["llama.cpp"]
        rows.append(
            f"| {line['model']} | {a['load_s']:.2f} | {b['load_s']:.2f} | {a['warm_ttft_s']:.2f} | "
            f"{a['compile_s'] + a['first_ttft_s']:.2f} | {a['peak_bytes'] / 1e6:.0f} | "
            f"{a['imported_bytes'] / 1e6:.0f} | {a['loaded_bytes'] / 1e6:.0f} | "
            f"{a['peak_ratio']:.2f} | "
            f"{a['peak_ratio_without_imports']:.2f} | {b['peak_bytes'] / 1e6:.0f} |"
        )
    return "\n".join(rows)


def by_type(lines: Lines, accuracy: Lines) -> str:
    """Return what each weight type of SmolLM2-135M gives; empty where none was measured."""
    found = [line for line in lines if line["section"] == "types"]
    if not found:
        return ""
    kl = {line["file"].split()[-1]: line for line in accuracy if " " in line["file"]}
    rows = [
        "| type | file MB | MB a token | decode 1 | ours / llama.cpp | decode 32 | | prefill 512 |"
        " | KL, rounding | KL, file |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in found:
        cases = line["cases"]
        cells = []
        for name in ("decode_b1", "decode_b32", "prefill"):
            case = cases[name]
            cells += [
                f"{case['tokens_per_s']['ours']['median']:.0f}",
                f"{case['ratios']['llama.cpp']['median']:.2f}",
            ]
        near = kl.get(line["type"])
        cells += [
            f"{near['ours']['kl_mean']:.1e}" if near else "-",
            f"{near['kl_from_float32_file']:.1e}" if near else "-",
        ]
        rows.append(
            f"| {line['type']} | {line['file_bytes'] / 1e6:.0f} | "
            f"{cases['decode_b1']['bytes_a_step'] / 1e6:.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(rows)


def where(lines: Lines) -> str:
    """Return on what and when the results were measured."""
    line = next(line for line in lines if line.get("peers"))
    peer = line["peers"]["llama.cpp"]
    return (
        f"{line['date']}, {line['cpu']}, {line['threads']} threads, {line['rounds']} rounds, median"
        f" (least..most). Ours: {line['ours']['weights']} weights, native operations "
        f"{line['ours']['native']}, jax {line['ours']['jax']}. llama.cpp: llama-cpp-python "
        f"{peer['version']}, {peer['openmp']}, `{peer['system_info'].strip()}`, cache "
        f"{peer['cache']}, flash attention {peer['flash_attention']}."
    )


def write(document: Path, results: Path) -> None:
    """Replace the tables of `document` by those of the newest saved results.

    A table stands between `<!-- NAME -->` and `<!-- /NAME -->`.  Of several results for the same
    model and section the last counts.
    """
    lines = _newest(results.glob("cpu-2*.json"), ("section", "model", "type"))
    accuracy = _newest(results.glob("cpu-accuracy-*.json"), ("file",))
    order = [*_NAMES, "memory", "types"]
    lines.sort(key=lambda line: (line["model"] != "smollm2-135m", order.index(line["section"])))
    tables = {
        "speed": f"{where(lines)}\n\n{speed(lines)}",
        "accuracy": cpu_accuracy.table(accuracy),
        "types": by_type(lines, accuracy),
    }
    text = document.read_text()
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{document} has no place for the table {name!r}")
        text = pattern.sub(lambda match, t=table: f"{match[1]}{t}\n{match[2]}", text)
    document.write_text(text)


def _newest(files: Any, keys: Sequence[str]) -> list[dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for file in sorted(files):
        for line in map(json.loads, file.read_text().splitlines()):
            found[tuple(line.get(key) for key in keys)] = line
    return list(found.values())


def _spread(values: dict[str, float], style: str) -> str:
    return f"{values['median']:{style}} ({values['min']:{style}}..{values['max']:{style}})"
