"""Peak memory of quantising, above the loaded model.

    python benchmarks/quantisation_memory.py --model smollm2-135m

Each method runs in a process of its own, on the first layers of the model: memory does not grow
with their number.  A JSON line each, with the peak of resident memory above what the process had
before each part (Linux's VmHWM, reset), in bytes:

    first       a short calibration text, programs compiled
    again       the same once more: without what compiling takes
    whole       the whole calibration text, programs compiled already
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

METHODS = ("rtn", "gptq", "awq")
SEQ_LEN = 512


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--method", choices=METHODS, help="one, in this process")
    p.add_argument("--tokens", type=int, default=65_536, help="of the whole calibration text")
    p.add_argument("--layers", type=int, default=2, help="that are quantised")
    options = p.parse_args(arguments)
    if options.method is not None:
        print(json.dumps(measured(options)), flush=True)
        return 0
    given = [*(arguments if arguments is not None else sys.argv[1:])]
    for method in METHODS:
        subprocess.run([sys.executable, __file__, *given, "--method", method], check=True)
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    import jax

    import infer
    from infer.models.params import num_bytes
    from infer.quant.methods import AWQ, GPTQ, RTN

    model = infer.load(options.model)
    make = {"rtn": RTN, "gptq": GPTQ, "awq": AWQ}[options.method]
    method = make(bits=4, group_size=64)
    recipe = {f"layers.{i}.*": method for i in range(options.layers)}
    rng = np.random.default_rng(0)
    sizes = {"first": 4, "again": 4, "whole": options.tokens // SEQ_LEN}

    def call(count: int) -> None:
        ids = rng.integers(0, model.config.num_tokens, (count, SEQ_LEN))
        params = infer.quantize(model.params, recipe, ids if method.calibrated else None)
        jax.block_until_ready(params)

    peaks, seconds = {}, {}
    for name, count in sizes.items():
        start = time.perf_counter()
        peaks[name] = peak_above(lambda count=count: call(count))
        seconds[name] = round(time.perf_counter() - start, 1)
    width = model.config.hidden_size
    layer = model.params.layers[0]
    return {
        "benchmark": "quantisation-memory",
        "model": options.model,
        "method": repr(method),
        "tokens": options.tokens if method.calibrated else 0,
        "layers": options.layers,
        "model_bytes": num_bytes(model.params),
        "layer_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(layer)),
        "activations_bytes": 4 * width * options.tokens if method.calibrated else 0,
        "peak_bytes": peaks,
        "seconds": seconds,
    }


def peak_above(call: Callable[[], None]) -> int:
    """Return how much resident memory grew at most during a call, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    sys.exit(main())
