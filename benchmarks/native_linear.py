"""The products of one step through a model, native operations against XLA's dots.

    python benchmarks/native_linear.py --model smollm2-135m --rows 1,8,32,512

A step is everything that a model multiplies with its weights: per layer the norm with q, k and v,
the attention's output, the gated MLP; at the end the head.  No attention, no sampling.  Weights are
random, in the formats and shapes of the model's GGUF file.  All ways run in turn, round after
round, in this process; so does a copy of memory on as many threads, the yardstick of one row.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from infer import native  # noqa: E402
from infer.bench.machine import cpu_name  # noqa: E402
from infer.native.linear import gated_mlp, linear  # noqa: E402
from infer.native.repack import repack  # noqa: E402
from tests.native.weights import random_weight  # noqa: E402


class Shape(NamedTuple):
    """A model's matrices, and their formats."""

    layers: int
    width: int
    qkv: tuple[int, int, int]
    hidden: int
    vocabulary: int
    activation: str
    attention: str
    gate_up: str
    down: str
    head: str


SHAPES = {
    "smollm2-135m": Shape(
        30, 576, (576, 192, 192), 1536, 49152, "silu", "Q4_1", "Q4_1", "Q4_1", "Q8_0"
    ),
    "gemma3-270m": Shape(
        18, 640, (1024, 256, 256), 2048, 262144, "gelu_tanh", "Q5_0", "Q5_0", "Q4_K", "Q8_0"
    ),
}


def native_step(shape: Shape) -> tuple[Any, Callable[..., Any]]:
    """Return the weights and the step with native operations."""
    some = lambda name, out, width: repack(random_weight(name, (out, width)))
    d, f, inner = shape.width, shape.hidden, shape.qkv[0]
    layer = lambda: dict(
        qkv=tuple(some(shape.attention, out, d) for out in shape.qkv),
        o=some(shape.attention, d, inner),
        gate=some(shape.gate_up, f, d),
        up=some(shape.gate_up, f, d),
        down=some(shape.down, d, f),
    )
    weights = dict(
        layers=[layer() for _ in range(shape.layers)], head=some(shape.head, shape.vocabulary, d)
    )
    gain = jnp.ones(d, jnp.float32)

    def step(w: Any, x: jax.Array) -> jax.Array:
        for p in w["layers"]:
            q, _, _ = linear(x, p["qkv"], norm_gain=gain, eps=1e-5)
            (x,) = linear(q, (p["o"],), residual=x)
            x = gated_mlp(
                x, p["gate"], p["up"], p["down"], shape.activation, gain, 1e-5, residual=True
            )
        return jnp.argmax(linear(x, (w["head"],), gain, 1e-5)[0], axis=-1)

    return weights, step


def xla_step(shape: Shape, dtype: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the weights and the step with dots of this dtype; one row is padded to 8, which is
    faster.
    """
    rng = np.random.default_rng(0)
    some = lambda out, width: jnp.asarray(
        rng.standard_normal((out, width), np.float32) * 0.03
    ).astype(dtype)
    d, f, inner = shape.width, shape.hidden, shape.qkv[0]
    layer = lambda: dict(
        qkv=some(sum(shape.qkv), d), o=some(d, inner), gate_up=some(2 * f, d), down=some(d, f)
    )
    weights = dict(layers=[layer() for _ in range(shape.layers)], head=some(shape.vocabulary, d))
    act = jax.nn.silu if shape.activation == "silu" else jax.nn.gelu

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("ti,oi->to", x.astype(dtype), w, preferred_element_type=jnp.float32)

    def step(w: Any, x: jax.Array) -> jax.Array:
        rows = x.shape[0]
        x = jnp.pad(x, ((0, max(0, 8 - rows)), (0, 0)))
        for p in w["layers"]:
            x = x + dot(dot(norm(x), p["qkv"])[:, :inner], p["o"])
            gate, up = jnp.split(dot(norm(x), p["gate_up"]), 2, axis=-1)
            x = x + dot(act(gate) * up, p["down"])
        return jnp.argmax(dot(norm(x), w["head"])[:rows], axis=-1)

    return weights, step


def copy_bandwidth(threads: int, megabytes: int = 256) -> Callable[[], float]:
    """Return a function that copies memory on all threads: bytes read and written a second."""
    size = (megabytes << 20) // threads
    pairs = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(threads)]
    pool = ThreadPoolExecutor(threads)

    def run() -> float:
        start = time.perf_counter()
        list(pool.map(lambda pair: np.copyto(*pair), pairs))
        return 2 * size * threads / (time.perf_counter() - start)

    return run


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one line for each number of rows."""
    shape = SHAPES[options.model]
    ways = {"native": native_step(shape)}
    for name in filter(None, options.xla.split(",")):
        ways[f"xla_{name}"] = xla_step(shape, jnp.dtype(name))
    copy = copy_bandwidth(native.num_threads())
    bytes_of = lambda w: sum(leaf.nbytes for leaf in jax.tree.leaves(w))
    per_layer = sum(shape.qkv) + shape.qkv[0] + 3 * shape.hidden
    products = shape.width * (shape.layers * per_layer + shape.vocabulary)
    steps = {name: jax.jit(step) for name, (_, step) in ways.items()}
    lines = []
    for rows in map(int, options.rows.split(",")):
        x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, shape.width), np.float32))
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        copies = []
        for _ in range(2 + options.rounds):  # the first compile
            copies.append(copy())
            for name, (weights, _) in ways.items():
                start = time.perf_counter()
                jax.block_until_ready(steps[name](weights, x))
                seconds[name].append(time.perf_counter() - start)
        median = {name: statistics.median(times[2:]) for name, times in seconds.items()}
        best = {name: min(times[2:]) for name, times in seconds.items()}
        rate = bytes_of(ways["native"][0]) / median["native"]
        lines.append(
            dict(
                model=options.model,
                chip=cpu_name(),
                isa=native.isa(),
                threads=native.num_threads(),
                rows=rows,
                time_s=median,
                best_time_s=best,
                bytes=bytes_of(ways["native"][0]),
                gop_per_s={name: 2 * rows * products / t / 1e9 for name, t in median.items()},
                best_gop_per_s={name: 2 * rows * products / t / 1e9 for name, t in best.items()},
                gb_per_s=rate / 1e9,
                copy_gb_per_s=statistics.median(copies) / 1e9,
                fraction_of_copy=rate / statistics.median(copies),
            )
        )
        print(json.dumps(lines[-1]), flush=True)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    p = argparse.ArgumentParser(description="Native products against XLA's dots.")
    p.add_argument("--model", choices=sorted(SHAPES), default="smollm2-135m")
    p.add_argument("--rows", default="1,8,32,512")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--xla", default="float32,bfloat16", help="dtypes of dots to compare with")
    measure(p.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
