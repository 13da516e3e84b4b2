"""Quality, bytes and speed of every quantisation method on a model.

    python benchmarks/quantisation.py --model smollm2-135m --save
    python benchmarks/quantisation.py --speed --methods "RTN 4" "FP8 E4M3" --save
    python benchmarks/quantisation.py --write-docs

A method is quantised and its divergence from the float32 model is measured on built-in texts: a
JSON line each, which `--save` appends to a file.  `--methods` names some; without it those that the
file has not yet are run.  `--speed` times them in the CPU's native operations instead.
`--write-docs` makes the tables and the plot of docs/quantisation.md from the files.  See
benchmarks/README.md.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

RESULTS = _ROOT / "benchmarks" / "results"
TEXTS = ("en", "python-stdlib", "ru", "te")
GROUP = 64
# Windows of each text, tokens of a window, and of the calibration text.
WINDOWS, CONTEXT, CALIBRATION = 13, 256, (64, 256)
# Methods that share one run of the float32 model.
SHARED = 4
# Prompt and new tokens of the speeds.
PROMPT, NEW = 512, 48


@dataclasses.dataclass(frozen=True)
class Turned:
    """A method for a model that is turned before, as `infer quantize --rotation` does."""

    rotation: str  # "quarot", "spinquant", or "values"
    method: Any

    @property
    def calibrated(self) -> bool:
        """Whether it looks at activations."""
        return self.rotation == "spinquant" or self.method.calibrated

    def quantize(self, params: Any, calibration: np.ndarray) -> Any:
        """Return the weights, turned and rounded."""
        from infer.quantization import hadamard_rotations, quantize, spinquant, turning_down

        recipe = turning_down(params.config, self.method)
        if self.rotation == "spinquant":
            rotations = spinquant.learn(params, recipe, calibration).rotations
        else:
            rotations = hadamard_rotations(params.config, residual=self.rotation == "quarot")
        tokens = calibration if self.method.calibrated else None
        return quantize(params, recipe, tokens, rotations=rotations)


def methods() -> dict[str, Any]:
    """Return the methods by the name of their row."""
    from infer.quant.methods import (
        AWQ,
        FP8,
        GPTQ,
        MX,
        NF4,
        NVFP4,
        RTN,
        LLMInt8,
        SmoothQuant,
    )

    int8 = GPTQ(bits=8, group_size="channel", scale_dtype="float32")
    return {
        "RTN 8, channel": RTN(bits=8, group_size="channel"),
        "RTN 6": RTN(bits=6, group_size=GROUP),
        "RTN 5": RTN(bits=5, group_size=GROUP),
        "RTN 4": RTN(bits=4, group_size=GROUP),
        "RTN 4, zero point": RTN(bits=4, group_size=GROUP, symmetric=False),
        "RTN 3, zero point": RTN(bits=3, group_size=GROUP, symmetric=False),
        "GPTQ 4": GPTQ(bits=4, group_size=GROUP),
        "GPTQ 4, act-order": GPTQ(bits=4, group_size=GROUP, act_order=True, static_groups=True),
        "GPTQ 3, act-order, zero point": GPTQ(
            bits=3, group_size=GROUP, symmetric=False, act_order=True, static_groups=True
        ),
        "GPTQ 4, act-order, g32": GPTQ(bits=4, group_size=32, act_order=True, static_groups=True),
        "AWQ 4": AWQ(bits=4, group_size=GROUP),  # with clipping
        "AWQ 4, no clipping": AWQ(bits=4, group_size=GROUP, clip=False),
        "AWQ 4, g32": AWQ(bits=4, group_size=32),
        "AWQ + GPTQ 4": AWQ(bits=4, group_size=GROUP, rounding="gptq"),
        "AWQ + GPTQ 4, g32": AWQ(bits=4, group_size=32, rounding="gptq"),
        "AWQ 3": AWQ(bits=3, group_size=GROUP),
        "LLM.int8()": LLMInt8(),
        "RTN 8 + int8 activations": RTN(bits=8, group_size="channel", activations="int8"),
        "SmoothQuant": SmoothQuant(),
        "SmoothQuant, static": SmoothQuant(static=True),
        "SmoothQuant + GPTQ 8": SmoothQuant(weights=int8),
        "FP8 E4M3": FP8(),
        "FP8 E4M3 + activations": FP8(activations="token"),
        "FP8 E5M2": FP8(code="e5m2"),
        "NF4, double": NF4(),
        "FP4": NF4(levels="fp4", double=False),
        "MXFP4, floor": MX(),
        "MXFP4, ceil": MX(scale_rule="ceil"),
        "MXFP6 E2M3": MX(code="e2m3"),
        "MXFP8 E4M3": MX(code="e4m3"),
        "NVFP4": NVFP4(),
        "MXFP4, blocks turned": MX(hadamard=32),
        **turned(),
    }


def turned() -> dict[str, Any]:
    """Return the methods of turned models, and those that they are held against."""
    from infer.quant.methods import GPTQ, RTN

    rtn = RTN(bits=4, group_size=GROUP)
    gptq = GPTQ(bits=4, group_size=GROUP, act_order=True, static_groups=True)
    with_acts = lambda method, bits: dataclasses.replace(method, activations=f"int{bits}")
    return {
        "QuaRot + RTN 4": Turned("quarot", rtn),
        "QuaRot + GPTQ 4": Turned("quarot", gptq),
        "QuaRot (values) + GPTQ 4": Turned("values", gptq),
        "GPTQ 4 + int8 activations": with_acts(gptq, 8),
        "QuaRot + GPTQ 4 + int8 activations": Turned("quarot", with_acts(gptq, 8)),
        "GPTQ 4 + int4 activations": with_acts(gptq, 4),
        "QuaRot + GPTQ 4 + int4 activations": Turned("quarot", with_acts(gptq, 4)),
        "QuaRot (values) + GPTQ 4 + int4 activations": Turned("values", with_acts(gptq, 4)),
        "SpinQuant + GPTQ 4 + int4 activations": Turned("spinquant", with_acts(gptq, 4)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.write_docs:
        from benchmarks import quantisation_tables

        quantisation_tables.write(RESULTS)
        return 0
    if options.save and tuple(options.texts) != TEXTS:
        raise SystemExit("--save is for figures on all texts; leave --texts or --save out")
    known = methods()
    target = RESULTS / f"quantisation-{options.model}.json"
    lines = map(json.loads, target.read_text().splitlines() if target.exists() else ())
    done = {name for line in lines for name in names_in(line, options.speed)}
    names = options.methods or [name for name in known if name not in done]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no method {unknown[0]!r}; there are {', '.join(known)}")
    if options.speed:  # turned models have the speeds of their formats
        names = [name for name in names if not isinstance(known[name], Turned)]
    asked = {name: known[name] for name in names[: options.most]}
    for line in [speeds(options, asked)] if options.speed else measured(options, asked):
        print(json.dumps(line), flush=True)
        if options.save:
            with open(target, "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
    return 0


def names_in(line: dict[str, Any], speed: bool) -> tuple[str, ...]:
    """Return the methods whose quality, or speed, a line has."""
    if line["benchmark"] == "quantisation-speed":
        return tuple(line["ratios"]) if speed else ()
    return () if speed else (line["method"],)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--methods", nargs="*", help="rows [default: those that are missing]")
    p.add_argument("--texts", nargs="*", default=TEXTS, help="some of them, without --save")
    p.add_argument("--most", type=int, help="rows of this run at most")
    p.add_argument("--speed", action="store_true", help="time the methods instead, in turns")
    p.add_argument("--rounds", type=int, default=5, help="of --speed")
    p.add_argument("--save", action="store_true", help="append to results/quantisation-MODEL.json")
    p.add_argument("--write-docs", action="store_true", help="tables from the files, no run")
    return p


def measured(options: argparse.Namespace, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the line of each method; some share one run of the float32 model."""
    import infer
    from infer.eval.texts import read_text
    from infer.quantization import quantize

    model = infer.load(options.model)
    texts = {name: windows_of(model.tokenizer, read_text(name)) for name in options.texts}
    calibration = calibration_of(model.tokenizer)
    names = list(asked)
    for start in range(0, len(names), SHARED):
        lines, models = [], []
        for name in names[start : start + SHARED]:
            method = asked[name]
            began = time.perf_counter()
            if isinstance(method, Turned):
                q = method.quantize(model.params, calibration)
            else:
                q = quantize(model.params, method, calibration if method.calibrated else None)
            line = {
                "benchmark": "quantisation",
                "model": options.model,
                "method": name,
                "asked": repr(method),
                "date": str(datetime.date.today()),
                "cpu": platform.machine(),
                "cores": os.cpu_count(),
                "versions": versions(),
                "bits_per_weight": bits_of_layers(q),
                "bytes": byte_count(q),
                "float_bytes": byte_count(model.params),
                "quantise_s": round(time.perf_counter() - began, 2),
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
                "context": CONTEXT,
                "calibration_tokens": calibration.size if method.calibrated else 0,
            }
            lines.append(line)
            models.append(decoded(q))
        for line, figures in zip(lines, qualities(model.params, models, texts), strict=True):
            yield line | figures


def qualities(
    base: Any, models: list[Any], texts: dict[str, np.ndarray]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each model against the base."""
    from infer.eval.scoring import score_windows

    windows = np.concatenate(list(texts.values()))
    dtypes = ["float32"] * (len(models) + 1)
    scores: list[list[Any]] = [[] for _ in dtypes]
    found: list[list[Any]] = [[] for _ in models]
    for _, some, others in score_windows([base, *models], windows, CONTEXT // 2, dtypes, "xla"):
        for kept, new in zip(scores, some, strict=True):
            kept.append(new.nll)
        for kept, new in zip(found, others, strict=True):
            kept.append((new.kl, new.same_top))
    nll = [np.concatenate(each) for each in scores]
    names = np.repeat(list(texts), [len(w) for w in texts.values()])
    for mine, each in zip(nll[1:], found, strict=True):
        kl = np.concatenate([x for x, _ in each])
        top = np.concatenate([x for _, x in each])
        of = lambda rows, mine=mine, kl=kl, top=top: quality(
            nll[0][rows], mine[rows], kl[rows], top[rows]
        )
        yield {
            "overall": of(slice(None)),
            "texts": {name: of(names == name) for name in texts},
            # By window, so that two lines can be compared in pairs.
            "nll": [round(float(x), 6) for x in mine.mean(1)],
            "kl": [round(float(x), 6) for x in kl.mean(1)],
        }


def quality(base: Any, nll: Any, kl: Any, top: Any) -> dict[str, Any]:
    from infer.eval import statistics

    ratio = statistics.perplexity_ratio([base], [nll], seed=0)
    return {
        "num_windows": len(nll),
        "num_scored": nll.size,
        "base_perplexity": float(np.exp(base.mean())),
        "ratio": [ratio.value, ratio.low, ratio.high],
        "kl": float(kl.mean()),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "top1": float(top.mean()),
    }


def versions() -> dict[str, str]:
    import jax

    import infer

    return {"infer": infer.__version__, "jax": jax.__version__}


def windows_of(tokenizer: Any, text: str) -> np.ndarray:
    """Return the windows that are scored, [WINDOWS, CONTEXT], as `infer eval` cuts them."""
    from infer.eval.windows import cut

    return cut("text", text, tokenizer, context=CONTEXT, limit=WINDOWS).ids


def calibration_of(tokenizer: Any) -> np.ndarray:
    """Return calibration sequences: the ends of the texts, whose beginnings are scored; BOS stands
    in front of each where the tokenizer's rule has one.
    """
    from infer.eval.texts import read_text

    count, length = CALIBRATION
    share = count // len(TEXTS) * length
    parts = [tokenizer.encode(read_text(name))[-share:] for name in TEXTS]
    rows = np.concatenate([np.array(part) for part in parts]).reshape(-1, length)
    if tokenizer.add_bos:
        rows[:, 0] = tokenizer.bos_id
    return rows


def decoded(params: Any) -> Any:
    """Return params with floats for weights that take activations as they are: the same, sooner."""
    import jax

    from infer.quant.formats import PlanarFormat
    from infer.quant.qarray import QArray, dequantize

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, QArray):
            return leaf
        acts = isinstance(leaf.format, PlanarFormat) and leaf.format.activations
        return leaf if acts else dequantize(leaf)

    return jax.tree.map(plain, params, is_leaf=lambda x: isinstance(x, QArray))


def matrices(params: Any) -> list[Any]:
    return [
        getattr(layer, name)
        for layer in params.layers
        for name in ("q", "k", "v", "o", "gate", "up", "down")
        if getattr(layer, name) is not None
    ]


def byte_count(params: Any) -> int:
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def bits_of_layers(params: Any) -> float:
    """Return bits a weight of the layers' matrices takes, scales included."""
    found = matrices(params)
    weights = sum(w.shape[0] * w.shape[1] for w in found)
    return round(8 * sum(w.nbytes for w in found) / weights, 4)


def speeds(options: argparse.Namespace, asked: dict[str, Any]) -> dict[str, Any]:
    """Return tokens a second of each method and of float32, one after the other in each round, and
    their ratios: a prompt of 512, decode at batch 1 and at batch 32.
    """
    import infer
    from infer.models.panels import repack
    from infer.quantization import quantize

    model = infer.load(options.model)
    packed = {"float32": repack(model.params, floats=True)}
    embed = packed["float32"].embed
    for name, method in asked.items():
        # The codes do not matter here: what is calibrated is rounded to nearest.
        q = quantize(model.params, nearest(method))
        packed[name] = dataclasses.replace(repack(q), embed=embed)
    ids = np.random.default_rng(0).integers(100, 20_000, (32, PROMPT))
    found: dict[str, dict[str, list[float]]] = {
        name: {"prefill": [], "decode_1": [], "decode_32": []} for name in packed
    }
    for turn in range(options.rounds + 1):
        for name, params in packed.items():
            for batch, length in ((1, PROMPT), (32, 16)):
                out = infer.generate(
                    params,
                    ids[:batch, :length].tolist(),
                    sampling=infer.SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True),
                )
                if turn:  # the first round compiles
                    found[name][f"decode_{batch}"].append(out.stats["decode_tokens_per_s"])
                    if batch == 1:
                        found[name]["prefill"].append(out.stats["prefill_tokens_per_s"])
    medians = {
        name: {what: round(float(np.median(each)), 1) for what, each in of.items()}
        for name, of in found.items()
    }
    base = found["float32"]
    ratios = {
        name: {
            what: round(float(np.median(np.array(of[what]) / np.array(base[what]))), 3)
            for what in of
        }
        for name, of in found.items()
    }
    return {
        "benchmark": "quantisation-speed",
        "model": options.model,
        "date": str(datetime.date.today()),
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "rounds": options.rounds,
        "tokens_per_s": medians,
        "ratios": ratios,
    }


def nearest(method: Any) -> Any:
    """Return the method of the same format that looks at no activations."""
    from infer.quant.methods import RTN, SmoothQuant

    if isinstance(method, SmoothQuant):
        return dataclasses.replace(nearest(method.weights), activations="int8")
    if not method.calibrated:
        return method
    fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(RTN)}
    return RTN(**fields)


if __name__ == "__main__":
    sys.exit(main())
