"""The gated MLPs of a mixture of experts: the native operation against the plain form.

    python benchmarks/experts.py --save

Sizes: 8 experts of which a token takes 2, and 64 of which it takes 8, in layers of width 1024 that
are about as large.  Ways: the native operation on packed weights; the plain form on the same
weights, decoded inside the program; the plain form on float32 weights.  They run in turn, round
after round, in this process, on tokens that a random router sends to their experts.  A layer's
weights are read again each time: with --layers, so many that they do not stay in the cache.

Each line has the medians and ranges of the rounds, and the ratios' (how many times faster the
native operation is), which are taken round by round.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from infer import native  # noqa: E402
from infer.bench.machine import cpu_name  # noqa: E402
from infer.native.repack import repack  # noqa: E402
from infer.ops.experts import block_rows, expert_mlp  # noqa: E402
from infer.ops.router import route  # noqa: E402
from infer.quant.qarray import QArray, dequantize  # noqa: E402
from tests.native.weights import random_experts  # noqa: E402

RESULTS = _ROOT / "benchmarks" / "results" / "experts-cpu-2026-11-30.json"


class Shape(NamedTuple):
    """A layer's experts."""

    experts: int
    k: int
    width: int
    hidden: int


SHAPES = (Shape(8, 2, 1024, 2048), Shape(64, 8, 1024, 256))


def layers(shape: Shape, name: str, count: int) -> dict[str, list[tuple[Any, ...]]]:
    """Return the layers' gate, up and down for each way."""
    sizes = [(shape.experts, shape.hidden, shape.width)] * 2
    sizes += [(shape.experts, shape.width, shape.hidden)]
    raw = [
        [random_experts(name, s, seed=3 * i + j) for j, s in enumerate(sizes)] for i in range(count)
    ]
    on_device = lambda w: jax.tree.map(jnp.asarray, w)
    floats = lambda w: dequantize(w) if isinstance(w, QArray) else w.astype(jnp.float32)
    return {
        "native": [tuple(map(repack, layer)) for layer in raw],
        "xla_packed": [tuple(map(on_device, layer)) for layer in raw],
        "xla_float32": [tuple(map(floats, layer)) for layer in raw],
    }


def step(shape: Shape) -> Callable[..., jax.Array]:
    """Return a program of all layers, the router's included."""

    def run(weights: Any, routers: Any, x: jax.Array) -> jax.Array:
        for router, layer in zip(routers, weights, strict=True):
            logits = jnp.einsum("td,ed->te", x, router)
            ids, scales = route(logits, shape.k, kind="softmax", normalize=True)
            y = expert_mlp(x, ids, scales, *layer, activation="silu")
            x = y / (jnp.max(jnp.abs(y), axis=-1, keepdims=True) + 1e-6)
        return x

    return jax.jit(run)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line for each shape and number of tokens."""
    lines = []
    for shape in SHAPES:
        ways = layers(shape, options.format, options.layers)
        rng = np.random.default_rng(0)
        routers = [
            jnp.asarray(rng.standard_normal((shape.experts, shape.width), np.float32))
            for _ in range(options.layers)
        ]
        run = step(shape)
        for tokens in map(int, options.tokens.split(",")):
            x = jnp.asarray(rng.standard_normal((tokens, shape.width), np.float32))
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(2 + options.rounds):  # the first compile
                for name, weights in ways.items():
                    start = time.perf_counter()
                    jax.block_until_ready(run(weights, routers, x))
                    seconds[name].append(time.perf_counter() - start)
            seconds = {name: times[2:] for name, times in seconds.items()}
            ratios = {
                name: [a / b for a, b in zip(times, seconds["native"], strict=True)]
                for name, times in seconds.items()
                if name != "native"
            }
            macs = 3 * tokens * shape.k * shape.width * shape.hidden * options.layers
            native_s = statistics.median(seconds["native"])
            lines.append(
                dict(
                    experts=shape.experts,
                    k=shape.k,
                    width=shape.width,
                    hidden=shape.hidden,
                    format=options.format,
                    layers=options.layers,
                    tokens=tokens,
                    block_rows=block_rows(tokens * shape.k, shape.experts),
                    chip=cpu_name(),
                    isa=native.isa(),
                    threads=native.num_threads(),
                    rounds=options.rounds,
                    time_s={name: _spread(times) for name, times in seconds.items()},
                    ratio={name: _spread(values) for name, values in ratios.items()},
                    native_gop_per_s=2 * macs / native_s / 1e9,
                )
            )
            print(json.dumps(lines[-1]), flush=True)
    return lines


def _spread(values: Sequence[float]) -> list[float]:
    """Return median, least and most."""
    return [statistics.median(values), min(values), max(values)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    p = argparse.ArgumentParser(description="Native experts against the plain form.")
    p.add_argument("--tokens", default="1,8,32,512")
    p.add_argument("--format", default="Q4_K")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(_ROOT)}")
    options = p.parse_args(arguments)
    lines = measure(options)
    if options.save:
        RESULTS.write_text(json.dumps(lines, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
