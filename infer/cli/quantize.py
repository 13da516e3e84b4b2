"""`infer quantize`: a model's matrices in few bits, in a folder that every command takes."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from infer.cli.loading import load_model, use_compilation_cache
from infer.cli.progress import progress_bars
from infer.errors import ConfigError
from infer.progress import counting_bar

# A calibration text or recipe longer than this is none that somebody means to give.
_LARGEST = 1 << 30
# Sequences of calibration text that are usual, at least.
_USUAL_SEQUENCES = 64

_METHODS = (
    *("gptq", "awq", "rtn", "smoothquant", "llm-int8", "fp8", "nf4", "fp4", "mxfp4", "mxfp6"),
    *("mxfp8", "nvfp4"),
)


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="M", help="A known name, a GGUF file, a folder, or a hub id.")
    ],
    out: Annotated[str, typer.Option(help="A new folder.")],
    method: Annotated[str | None, typer.Option(help=f"One of {', '.join(_METHODS)}.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help='A JSON file of patterns, {"layers.*.down": {"method": "rtn", "bits": 8}, '
            '"layers.*": {"method": "gptq"}}; null leaves a matrix as it is.'
        ),
    ] = None,
    bits: Annotated[int | None, typer.Option(help="8, 6, 5, 4, 3 or 2 [default: 4].")] = None,
    group_size: Annotated[
        str | None,
        typer.Option(
            help="Weights that share a scale, or channel, or tensor [default: 128, or the largest "
            "of 64 and 32 that divides every matrix]."
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Without or with zero points [default: symmetric; asymmetric for awq].",
        ),
    ] = None,
    convention: Annotated[
        str | None,
        typer.Option(help="Of symmetric scales: full, restricted, signed, no_clipping."),
    ] = None,
    scale_dtype: Annotated[
        str | None, typer.Option(help="float16, bfloat16, float32 [default: float16].")
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(help="Rounded too: int8, int4 with integers, token or block with fp8."),
    ] = None,
    damping: Annotated[
        float | None, typer.Option(help="of gptq: share of the Hessian's diagonal [default: 0.01].")
    ] = None,
    act_order: Annotated[
        bool | None,
        typer.Option("--act-order/--no-act-order", help="gptq: columns of most energy first."),
    ] = None,
    static_groups: Annotated[
        bool | None,
        typer.Option("--static-groups/--no-static-groups", help="gptq: scales found beforehand."),
    ] = None,
    clip: Annotated[
        bool | None, typer.Option("--clip/--no-clip", help="awq: search each group's range.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="smoothquant: share moved to weights [default: 0.5].")
    ] = None,
    static: Annotated[
        bool | None,
        typer.Option("--static/--dynamic", help="smoothquant: one stored scale, or one a token."),
    ] = None,
    rounding: Annotated[
        str | None, typer.Option(help="smoothquant, awq: rtn or gptq [default: rtn].")
    ] = None,
    code: Annotated[
        str | None, typer.Option(help="e4m3 or e5m2 (fp8, mxfp8), e2m3 or e3m2 (mxfp6).")
    ] = None,
    granularity: Annotated[
        str | None, typer.Option(help="fp8: channel, tensor or block [default: channel].")
    ] = None,
    double: Annotated[
        bool | None,
        typer.Option("--double/--no-double", help="nf4, fp4: scales quantised too [default: yes]."),
    ] = None,
    scale_rule: Annotated[
        str | None, typer.Option(help="mxfp: floor, ceil, even, rceil [default: floor].")
    ] = None,
    hadamard: Annotated[
        str | None,
        typer.Option(
            help="rtn, gptq, mxfp, nvfp4: inputs that the product turns by a Hadamard matrix, a "
            "number, or full."
        ),
    ] = None,
    rotation: Annotated[
        str | None,
        typer.Option(
            help="Turn the model first: quarot (Hadamard matrices), spinquant (learned on the "
            "calibration text), values (where norms forbid turning the residual stream); turns the "
            "inputs of down, too."
        ),
    ] = None,
    rotation_steps: Annotated[
        int | None, typer.Option(help="spinquant: steps of learning [default: 100].")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="A text in UTF-8, like what the model will be used for; - is stdin."),
    ] = None,
    calibration_tokens: Annotated[
        int | None, typer.Option(help="Taken from it, evenly spread [default: at most 65536].")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens of a calibration sequence [default: 512].")
    ] = None,
    form: Annotated[
        str,
        typer.Option(help="Of the folder: infer, or compressed-tensors, for vLLM, transformers."),
    ] = "infer",
    dtype: Annotated[
        str | None, typer.Option(help="Of computation: float32, ... [default: the backend's best].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Quantise a model's matrices and write it into a new folder, whole or not at all."""
    given = {
        "bits": bits,
        "group_size": _group(group_size),
        "symmetric": symmetric,
        "convention": convention,
        "scale_dtype": scale_dtype,
        "activations": activations,
        "damping": damping,
        "act_order": act_order,
        "static_groups": static_groups,
        "clip": clip,
        "alpha": alpha,
        "static": static,
        "rounding": rounding,
        "code": code,
        "granularity": granularity,
        "double": double,
        "scale_rule": scale_rule,
        "hadamard": _group(hadamard),
    }
    options = {name: value for name, value in given.items() if value is not None}
    text = {"calibration_tokens": calibration_tokens, "seq_len": seq_len}
    text = {name: value for name, value in text.items() if value is not None}
    if text and calibration is None:
        raise ConfigError(f"{_spelled(text)} is for a calibration text; give --calibration FILE")
    ask = _asked(method, recipe, options)
    turn = _Turn.of(rotation, rotation_steps)
    use_compilation_cache()
    if form not in _FORMS:
        raise ConfigError(f"--form is {form!r:.60}; use {' or '.join(_FORMS)}")
    report = run(model, Path(out), ask, calibration, text, dtype, turn, form)
    print(json.dumps(report, allow_nan=False) if as_json else text_of(report))


def _group(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 9 else text


def _spelled(options: dict[str, Any]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in options)


_FORMS = ("infer", "compressed-tensors")
_ROTATIONS = ("quarot", "spinquant", "values")


@dataclasses.dataclass(frozen=True)
class _Turn:
    """How a model is turned before it is rounded."""

    kind: str
    steps: int | None = None

    @classmethod
    def of(cls, kind: str | None, steps: int | None) -> "_Turn | None":
        """Return what was asked, None for nothing.

        Raises:
            ConfigError: there is no such rotation, or steps go with another.
        """
        if kind is not None and kind not in _ROTATIONS:
            raise ConfigError(f"--rotation is {kind!r:.60}; use {', '.join(_ROTATIONS)}")
        if steps is not None and kind != "spinquant":
            raise ConfigError("--rotation-steps is for --rotation spinquant; leave it out")
        if steps is not None and steps < 1:
            raise ConfigError(f"--rotation-steps is {steps}; use 1 or more")
        return None if kind is None else cls(kind, steps)

    def rotations(self, params: Any, recipe: Any, tokens: Any) -> Any:
        """Return the rotations of a model that will be quantised so."""
        from infer.quantization import spinquant
        from infer.quantization.rotation import hadamard_rotations

        if self.kind != "spinquant":
            return hadamard_rotations(params.config, residual=self.kind == "quarot")
        steps = spinquant.STEPS if self.steps is None else self.steps
        print(f"infer: learning rotations, {steps} steps", file=sys.stderr)
        with counting_bar("steps", steps) as count:
            step = None if count is None else lambda done, loss: count(done)
            found = spinquant.learn(params, recipe, tokens, steps=steps, progress=step)
        end = found.losses[-10:]
        print(
            f"infer: a token's loss was {found.losses[0]:.3f} with Hadamard rotations, and is"
            f" {sum(end) / len(end):.3f} nats in the last {len(end)} steps",
            file=sys.stderr,
        )
        return found.rotations


def _asked(method: str | None, recipe: str | None, options: dict[str, Any]) -> Any:
    """Return a function widths -> Recipe, of what was asked; what is wrong with it is said now."""
    from infer.quantization import by_name
    from infer.quantization.recipe import Recipe

    if (method is None) == (recipe is None):
        raise ConfigError("give one of --method and --recipe")
    if recipe is not None:
        if options:
            raise ConfigError(
                f"{_spelled(options)} goes with --method; a recipe has its options in the file"
            )
        source = _bytes_of(recipe)
        ask = lambda widths: by_name.recipe_of(source, recipe, widths)
    else:
        ask = lambda widths: Recipe.of(by_name.method_of(method or "", options, widths))
    ask(())
    return ask


def run(
    model: str,
    out: Path,
    ask: Any,
    calibration: str | None,
    text_options: dict[str, int],
    dtype: str | None,
    turn: _Turn | None = None,
    form: str = "infer",
) -> dict[str, Any]:
    """Quantise and save; return what `--json` prints."""
    import infer
    from infer.quantization import calibration as texts
    from infer.quantization.report import report, widths
    from infer.quantization.rotation import turning_down
    from infer.weights.new_folder import check_new
    from infer.weights.packed_form import Calibration

    check_new(out.expanduser().absolute())
    calibrated = [m for m in dict.fromkeys(m for _, m in ask(()).rules) if m and m.calibrated]
    needs = {type(m).__name__: None for m in calibrated}
    if turn is not None and turn.kind == "spinquant":
        needs["SpinQuant"] = None
    if needs and calibration is None:
        raise ConfigError(
            f"{', '.join(needs)} needs calibration text, which is like what the model will be used"
            " for; give --calibration FILE"
        )
    if calibration is not None and not needs:
        raise ConfigError(
            "--calibration is for gptq, awq, smoothquant and --rotation spinquant; leave it out"
        )
    text = None if calibration is None else _read(calibration)
    loaded, load_s = load_model(model, dtype, implementation="xla", decodable=True)
    start = time.perf_counter()
    recipe = ask(widths(loaded.params))
    if turn is not None:
        recipe = turning_down(loaded.config, recipe)
    tokens = record = None
    if text is not None:
        found = texts.sequences(
            loaded.tokenizer,
            text,
            num_tokens=text_options.get("calibration_tokens"),
            seq_len=text_options.get("seq_len", texts.SEQ_LEN),
            what=str(calibration),
        )
        tokens = found.tokens
        calibrated = [m for m in dict.fromkeys(m for _, m in recipe.rules) if m and m.calibrated]
        used = [repr(m) for m in calibrated] + ["SpinQuant"] * ("SpinQuant" in needs)
        record = Calibration.of(
            tokens,
            text=text,
            used=found.text,
            name="standard input" if calibration == "-" else Path(str(calibration)).name,
            method=", ".join(used),
        )
        if len(tokens) < _USUAL_SEQUENCES:
            print(
                f"infer: {len(tokens)} calibration sequences; {_USUAL_SEQUENCES} or more are usual,"
                " and fewer may give a worse model than no calibration",
                file=sys.stderr,
            )
    rotations = None if turn is None else turn.rotations(loaded.params, recipe, tokens)
    if not any(m is not None and m.calibrated for _, m in recipe.rules):
        tokens = None
    print(f"infer: quantising {loaded.config.num_layers} layers", file=sys.stderr)
    with counting_bar("layers", loaded.config.num_layers) as count:
        step = None if count is None else lambda done, total: count(done)
        params = infer.quantize(loaded.params, recipe, tokens, rotations=rotations, progress=step)
        for leaf in _arrays(params):
            leaf.block_until_ready()
    quantize_s = time.perf_counter() - start
    with progress_bars() as update:
        write = None if update is None else lambda done, total: update("write", done, total)
        made_of = dataclasses.replace(loaded, params=params)
        paths = infer.save(made_of, out, form=form, calibration=record, progress=write)
    made = report(loaded.params, params)
    return {
        "model": model,
        "out": str(out),
        "num_layers": loaded.config.num_layers,
        "rotation": None if turn is None else turn.kind,
        "recipe": {pattern: _method_words(m) for pattern, m in recipe.rules},
        "stayed": made.stayed,
        "packed": {
            name: {"matrices": count, "weights": weights, "bytes": size}
            for name, (count, weights, size) in made.packed.items()
        },
        "bytes_before": made.bytes_before,
        "bytes_after": made.bytes_after,
        "bytes_bfloat16": 2 * made.num_weights,
        "file_bytes": sum(path.stat().st_size for path in paths),
        "num_weights": made.num_weights,
        "bits_per_weight": made.bits_per_weight,
        "bits_per_weight_overall": made.bits_per_weight_overall,
        "calibration": None if record is None else record.to_json(),
        "load_s": load_s,
        "quantize_s": quantize_s,
        "peak_memory_bytes": _peak_memory_bytes(),
        "device_peak_memory_bytes": _device_peak_memory_bytes(),
    }


def text_of(report: dict[str, Any]) -> str:
    """Return the report for people."""
    from infer.quantization.report import in_words

    size = lambda count: f"{count / 1e6:,.1f} MB"
    lines = [f"{report['model']} in {report['out']}"]
    if report["rotation"] is not None:
        lines[0] += f", turned before ({report['rotation']})"
    for name, part in report["packed"].items():
        bits = 8 * part["bytes"] / part["weights"]
        lines.append(
            f"  {name:<16} {part['matrices']} matrices, {part['weights']:,} weights, "
            f"{size(part['bytes'])}, {bits:.3f} bits a weight"
        )
    for kind, paths in report["stayed"].items():
        lines.append(f"  stays {kind:<10} {in_words(paths, report['num_layers'])}")
    lines.append(
        f"  bytes            {size(report['bytes_before'])} before, {size(report['bytes_after'])}"
        f" after ({size(report['bytes_bfloat16'])} in bfloat16), "
        f"{report['bits_per_weight_overall']:.3f} bits a weight overall"
    )
    if (used := report["calibration"]) is not None:
        lines.append(
            f"  calibration      {used['num_tokens']:,} tokens in {used['num_sequences']:,} "
            f"sequences, sha256 {used['sha256'][:16]}..."
        )
    peak = [f"peak memory {size(report['peak_memory_bytes'])}"]
    if report["device_peak_memory_bytes"] is not None:
        peak.append(f"{size(report['device_peak_memory_bytes'])} on the device")
    lines.append(f"  took             {report['quantize_s']:.1f} s, {', '.join(peak)}")
    return "\n".join(lines)


def _method_words(method: Any) -> str:
    return "as it is" if method is None else repr(method)


def _arrays(params: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(params)


def _bytes_of(path: str) -> bytes:
    """Return the bytes of a file; what never ends is refused."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{path} is no file that is there; name a text file")
    if file.stat().st_size > _LARGEST:
        raise ConfigError(f"{path} has {file.stat().st_size} bytes; files of up to 1 GiB are read")
    return file.read_bytes()


def _read(path: str) -> str:
    data = sys.stdin.buffer.read() if path == "-" else _bytes_of(path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not UTF-8 at byte {error.start}; a calibration text is plain text"
        ) from None


def _peak_memory_bytes() -> int:
    """Return the most memory that this process had, in bytes; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _device_peak_memory_bytes() -> int | None:
    """Return the most memory that arrays took on an accelerator; None on a CPU."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")
