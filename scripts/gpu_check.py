"""Everything that only a GPU can answer, in one run of under 8 minutes.

    python scripts/gpu_check.py              on a machine with an NVIDIA GPU
    python scripts/gpu_check.py --smoke      tiny shapes, interpreted, on any machine
    python scripts/gpu_check.py --parts numerics timings --only paged

Parts, each written to the JSON as soon as it ends, whatever happens later: the GPU's description
for the gate; its peaks; every kernel's numerics against its reference on fresh random inputs; their
timings as fractions of the bound that the peaks give; a decode step and the whole loop of a
Llama-3-8B shape, with and without CUDA graphs; attention against cuDNN and PyTorch where those are
there; with the time that is left block sizes (scripts/tune_blocks.py takes them all), into
infer/pallas/tuned/<chip>/.

Needs jax, numpy and this checkout.  Writes benchmarks/results/<chip>-<date>.json, or into $OUT.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from infer.pallas.tuned import FOLDER  # noqa: E402
from scripts.gate import measure  # noqa: E402

PARTS: dict[str, Callable[[measure.Run], Any]] = {
    "target": measure.target,
    "peaks": measure.peaks,
    "numerics": measure.numerics,
    "timings": measure.timings,
    "decode": measure.decode,
    "loop": measure.loop,
    "peers": measure.peers,
    "tuning": measure.tuning,
}


def result_path(chip: str, smoke: bool) -> Path:
    """Return where the JSON goes."""
    name = f"{chip}-{time.strftime('%Y-%m-%d')}{'-smoke' if smoke else ''}.json"
    folder = os.environ.get("OUT")
    return Path(folder) / name if folder else ROOT / "benchmarks" / "results" / name


def main() -> int:
    """Run the parts; return 1 if a kernel's numbers are wrong or a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, interpreted, anywhere")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--only", default="", help="kernels whose case's name contains this")
    parser.add_argument("--budget", type=float, default=460, help="seconds in all")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        print("gpu_check: JAX sees no GPU here; --smoke runs anywhere", file=sys.stderr)
        return 2
    folder = Path(os.environ.get("OUT", ROOT))
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        print(f"gpu_check: $OUT is {folder}, no folder that can be written", file=sys.stderr)
        return 2
    tuned = None if args.smoke else folder if "OUT" in os.environ else FOLDER
    end = time.monotonic() + args.budget
    run = measure.Run(smoke=args.smoke, only=args.only, end=end, tuned_folder=tuned)
    if not run.cases():
        print(f"gpu_check: no kernel's case has {args.only!r} in its name", file=sys.stderr)
        return 2
    path = result_path(run.chip, args.smoke)
    report: dict[str, Any] = {
        "chip": run.chip,
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "smoke": args.smoke,
        "parts": {},
    }
    for name in args.parts:
        start = time.monotonic()
        try:
            found: Any = PARTS[name](run)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:600]}
            found["where"] = traceback.format_exc()[-800:]
        report["parts"][name] = {"seconds": round(time.monotonic() - start, 1), "result": found}
        run.found[name] = found
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(report, indent=1))
        os.replace(temporary, path)
        print(f"{name}: {report['parts'][name]['seconds']} s", flush=True)
    print(measure.table(run))
    return 1 if measure.failed(run) else 0


if __name__ == "__main__":
    sys.exit(main())
