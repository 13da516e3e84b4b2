"""`infer info`: what a model file holds, what would run it here, and what fits on a chip.  Reads
headers; JAX only where there may be a GPU, and to hold packed weights against their model.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from infer import hardware
from infer.cli import implementation
from infer.errors import WeightFormatError
from infer.plan import capacity, roofline
from infer.plan.shape import bytes_per_number, kv_bytes_per_token
from infer.weights import bundled, hub
from infer.weights.summary import Summary, summarise

_KV_BYTES = {"bf16": 2, "f32": 4}
_KV_QUANTISED = {"int8": "int8", "fp8": "float8_e4m3", "int4": "int4"}


def info(
    model: Annotated[str, typer.Argument(help="A known name, a GGUF file, a folder, or a hub id.")],
    chip: Annotated[
        str | None, typer.Option(help=f"Also what fits on: {', '.join(hardware.chip_names())}.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one sequence [default: the model's].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model's layers, types, bytes, cache per token, what runs it here, and what fits on a
    chip.
    """
    path = model_file(model)
    found, files = summary_of(path)
    report = report_of(model, files, found, context)
    params = {name: total.params for name, total in found.types.items()}
    said = found.quantisation
    planar = {} if said is None else {name: name not in said.in_xla for name in said.formats}
    report["runs_here"] = implementation.runs_here(params, planar)
    if chip is not None:
        report["chip"] = chip_report(found, hardware.get_chip(chip), report["context"])
    print(json.dumps(report) if as_json else text_of(report))


def model_file(model: str) -> Path:
    """Return the file or folder that `model` names: a known name or a hub id that is cached, or a
    path.
    """
    if model in bundled.known_models():
        path = bundled.cached(model)
        if path is None:
            raise FileNotFoundError(f"{model} is not in the cache; run `infer pull {model}`")
        return path
    path = Path(model).expanduser()
    if path.exists():
        return path
    if hub.parse(model) is not None:
        found = hub.cached(model)
        if found is None:
            raise FileNotFoundError(
                f"{model} is no file, and as a hub id it is not in the cache; run `infer pull"
                f" {model}`"
            )
        return found
    known = ", ".join(sorted(bundled.known_models()))
    raise FileNotFoundError(f"{model} is no file and no known model; known: {known}")


def summary_of(path: Path) -> tuple[Summary, list[Path]]:
    """Return the summary of the GGUF file or the folder at `path`, and all files of the model."""
    from infer.weights.folder_summary import summarise_folder
    from infer.weights.gguf import GGUFFile

    if path.is_dir():
        return summarise_folder(path), sorted(path.glob("*.safetensors"))
    with GGUFFile.open(path) as file:
        try:
            return summarise(file), [Path(p) for p in file.paths]
        except WeightFormatError as error:
            raise WeightFormatError(f"{path}: {error}") from None


def report_of(model: str, files: list[Path], found: Summary, context: int | None) -> dict[str, Any]:
    """Return what `--json` prints, but for the chip."""
    tokens = context or found.context_length
    layers = found.layers_with(_KV_BYTES["bf16"])
    return {
        "model": model,
        "file": str(files[0].parent if files[0].suffix == ".safetensors" else files[0]),
        "num_files": len(files),
        "file_bytes": sum(path.stat().st_size for path in files),
        "name": found.name,
        "architecture": found.architecture,
        "num_layers": found.num_layers,
        "hidden_size": found.hidden_size,
        "intermediate_size": found.intermediate_size,
        "num_heads": found.num_heads,
        "num_kv_heads": found.num_kv_heads,
        "head_dim": found.head_dim,
        "sliding_window": found.window,
        "num_sliding_layers": found.num_sliding_layers,
        "num_experts": found.num_experts,
        "num_experts_used": found.num_experts_used,
        "vocab_size": found.vocab_size,
        "context_length": found.context_length,
        "tokenizer": found.tokenizer,
        "pre_tokenizer": found.pre_tokenizer,
        "chat_template": found.chat_template,
        "num_params": found.num_params,
        "num_active_params": found.active_params,
        "weight_bytes": found.weight_bytes,
        "tensor_types": {
            name: {"tensors": total.tensors, "params": total.params, "bytes": total.num_bytes}
            for name, total in found.types.items()
        },
        "quantisation": None
        if found.quantisation is None
        else dataclasses.asdict(found.quantisation),
        "kv_bytes_per_token": _kv_bytes_of(found),
        "context": tokens,
        # Of one sequence of `context` tokens in bf16: every layer in full pages, and with sliding
        # layers cut to their window.
        "kv_bytes_context": round(capacity.kv_bytes(layers, tokens or 0)),
        "kv_bytes_context_windowed": round(capacity.kv_bytes(layers, tokens or 0, ring=True)),
    }


def _kv_bytes_of(found: Summary) -> dict[str, int]:
    """Return the bytes that all layers cache for a token, by the cache's dtype."""
    figures = {
        name: kv_bytes_per_token(found.layers_with(size)) for name, size in _KV_BYTES.items()
    }
    # A scale is one head's, which latents have none of.
    if all(layer.num_kv_heads for layer in found.layers):
        for name, kv_dtype in _KV_QUANTISED.items():
            figures[name] = kv_bytes_per_token(
                dataclasses.replace(
                    layer,
                    kv_bytes=bytes_per_number(kv_dtype, (layer.k_head_dim + layer.v_head_dim) / 2),
                )
                for layer in found.layers
            )
    return {name: round(size) for name, size in figures.items()}


def chip_report(found: Summary, chip: hardware.Chip, context: int | None) -> dict[str, Any]:
    """Return what fits on `chip` with a bf16 cache in full pages.

    Weights are as `load` leaves them, in bf16, if that fits, else packed as in the file; the decode
    bound of packed weights is there in any case.
    """
    if not found.layers or context is None:
        raise ValueError(
            f"a {found.architecture} file without layers, heads or context length cannot be "
            "planned; leave --chip out or give --context"
        )
    packed = found.shape(_KV_BYTES["bf16"])
    shape = dataclasses.replace(packed, weight_bytes=2 * found.num_params)
    if capacity.kv_budget(chip.memory_bytes, shape.weight_bytes) < 0:
        shape = packed
    budget = capacity.kv_budget(chip.memory_bytes, shape.weight_bytes)
    longest = capacity.longest_context(shape.layers, budget)
    empty = roofline.decode_step_on(shape, chip)
    full = roofline.decode_step_on(shape, chip, context=context)
    return {
        "name": chip.name,
        "memory_bytes": chip.memory_bytes,
        "bandwidth_bytes_per_s": chip.bandwidth,
        "kv_budget_bytes": round(budget),
        "fits": budget >= 0,
        "max_concurrency": capacity.max_concurrency(shape.layers, context, budget),
        # What the memory holds, and what the model was made for.
        "longest_context": min(
            found.context_length or context, context if longest is None else longest
        ),
        "weights": "packed" if shape is packed else "bf16",
        "weight_bytes": shape.weight_bytes,
        "decode_bound_tokens_per_s": 1 / empty.seconds,
        "decode_bound_packed_tokens_per_s": 1 / roofline.decode_step_on(packed, chip).seconds,
        "decode_bound_tokens_per_s_at_context": 1 / full.seconds,
    }


def text_of(report: dict[str, Any]) -> str:
    """Return the report for people."""
    lines = [
        printable(": ".join(x for x in (report["model"], report["name"]) if x)),
        f"  architecture   {printable(report['architecture'])}, {_layers_text(report)}",
        f"  vocabulary     {_number(report['vocab_size'])} ids, {_tokenizer_text(report)}",
        f"  context        {_number(report['context_length'])} tokens",
        f"  parameters     {report['num_params']:,}{_experts_text(report)}",
        f"  weights        {report['weight_bytes'] / 1e6:,.1f} MB as in the {_files_text(report)}",
    ]
    for name, total in report["tensor_types"].items():
        lines.append(
            f"    {name:<12} {total['tensors']:>5} tensors {total['params']:>15,} parameters "
            f"{total['bytes'] / 1e6:>10,.1f} MB"
        )
    if report["quantisation"] is not None:
        lines += _quantisation_lines(report["quantisation"], report["num_layers"])
    if report["num_layers"]:
        lines += _cache_lines(report)
    lines.append(f"  runs here      {implementation.text_of(report['runs_here'])}")
    if "chip" in report:
        lines += _chip_lines(report["chip"], report["context"])
    return "\n".join(lines)


def _files_text(report: dict[str, Any]) -> str:
    return "file" if report["num_files"] == 1 else f"{report['num_files']} files"


def _layers_text(report: dict[str, Any]) -> str:
    if not report["num_layers"]:
        return "no decoder layers described"
    heads = f"{_number(report['num_heads'])} query and {report['num_kv_heads']} key/value heads"
    return (
        f"{report['num_layers']} layers, width {_number(report['hidden_size'])}, "
        f"feed-forward {_number(report['intermediate_size'])}, {heads} of "
        f"{_number(report['head_dim'])}"
    )


def _tokenizer_text(report: dict[str, Any]) -> str:
    if report["tokenizer"] is None:
        return "no tokenizer"
    kind = "/".join(printable(x) for x in (report["tokenizer"], report["pre_tokenizer"]) if x)
    return f"tokenizer {kind}, chat template: {'yes' if report['chat_template'] else 'no'}"


def _experts_text(report: dict[str, Any]) -> str:
    if not report["num_experts"]:
        return ""
    return (
        f", {report['num_active_params']:,} active "
        f"({report['num_experts_used']} of {report['num_experts']} experts)"
    )


def _quantisation_lines(found: dict[str, Any], num_layers: int) -> list[str]:
    lines = []
    for name, format in found["formats"].items():
        bits = found["bits_per_weight"][name]
        lines.append(
            f"  quantised      {printable(name)}: {_format_text(format)}; {bits:.3f} bits a weight"
        )
    if found["method"] is not None:
        said = ", ".join(f"{key} {_short(value)}" for key, value in found["says"].items())
        lines.insert(0, f"  quantised by   {printable(found['method'])}{said and ': ' + said}")
    stayed = _by_pattern(found["stayed"], num_layers)
    lines += [f"  stays          {printable(name)} ({kind})" for name, kind in stayed.items()]
    used = found["calibration"]
    if used is None:
        return [*lines, "  calibration    none recorded"]
    lines.append(
        f"  calibration    {printable(used.get('text', '') or 'text of no name')},"
        f" {used['num_tokens']:,} tokens in {used['num_sequences']:,} sequences, sha256 of the"
        f" {used['of']} {used['sha256']}"
    )
    if "method" in used:
        lines.append(f"  calibrated     {printable(used['method'])}")
    return lines


def _short(value: Any) -> str:
    """Return a value of a configuration, cut where it is long."""
    text = printable(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= 120 else text[:117] + "..."


def _format_text(format: dict[str, Any]) -> str:
    """Return a format in words."""
    if format["layout"] == "blocks":
        return "blocks of GGUF"
    group, rows = format["group"], format["rows"]
    if group:
        per = f"{group} weights" if rows == 1 else f"{rows or 'all'} x {group} weights"
    else:
        per = "row" if rows else "matrix"
    kind = "integers" if format["code"] == "int" else format["code"]
    text = f"{format['bits']}-bit {kind}, a {format['scale_dtype']} scale for each {per}"
    text += "" if format["symmetric"] else ", zero points"
    if turned := format.get("rotated"):
        text += f", inputs turned by {turned}"
    acts = format["activations"]
    return text + (f", activations in {acts}" if acts else "")


def _by_pattern(names: dict[str, str], num_layers: int) -> dict[str, str]:
    """Return names with `*` for the layer's number where all layers have one, else their
    numbers; those of one dtype together.
    """
    layers: dict[tuple[str, str], list[str]] = {}
    for name, kind in names.items():
        match = re.search(r"\.(\d+)\.", name)
        pattern = name if match is None else f"{name[: match.start()]}.%.{name[match.end() :]}"
        layers.setdefault((pattern, kind), []).append("" if match is None else match[1])
    return {
        pattern.replace("%", "*" if len(found) == num_layers else ",".join(found), 1): kind
        for (pattern, kind), found in layers.items()
    }


def _cache_lines(report: dict[str, Any]) -> list[str]:
    per_token = report["kv_bytes_per_token"]
    each = ", ".join(f"{size:,} in {name}" for name, size in per_token.items() if name != "bf16")
    lines = [f"  cache          {per_token['bf16']:,} bytes a token in bf16, {each}"]
    if report["context"]:
        full, windowed = report["kv_bytes_context"], report["kv_bytes_context_windowed"]
        text = f"                 {full / 1e6:,.1f} MB for {report['context']:,} tokens in bf16"
        if windowed != full:
            text += f"; {windowed / 1e6:,.1f} MB with sliding layers cut to their window"
        lines.append(text)
    if report["sliding_window"]:
        lines.append(
            f"                 {report['num_sliding_layers']} layers slide over "
            f"{report['sliding_window']:,} tokens"
        )
    return lines


def _chip_lines(chip: dict[str, Any], context: int) -> list[str]:
    lines = [
        f"on {chip['name']} ({chip['memory_bytes'] / 1e9:.1f} GB, "
        f"{chip['bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s), 10% kept free, "
        f"{chip['weights']} weights, bf16 cache:"
    ]
    if not chip["fits"]:
        over = -chip["kv_budget_bytes"] / 1e9
        return [*lines, f"  the weights do not fit: {over:.1f} GB too large"]
    return [
        *lines,
        f"  at once        {chip['max_concurrency']:,} sequences of {context:,} tokens",
        f"  longest        {chip['longest_context']:,} tokens of one sequence",
        f"  decode bound   {chip['decode_bound_tokens_per_s']:,.0f} tokens/s at batch 1, "
        f"{chip['decode_bound_tokens_per_s_at_context']:,.0f} with {context:,} tokens cached",
        f"    --packed     {chip['decode_bound_packed_tokens_per_s']:,.0f} tokens/s, weights read "
        "as they lie in the file",
    ]


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def printable(text: str) -> str:
    """Return `text` cut short and without characters that could steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:200])
