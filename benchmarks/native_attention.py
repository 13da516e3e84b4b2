"""Native CPU attention beside the XLA form: `python -m benchmarks.native_attention [--quick]`.

The layers of a model (SmolLM2-135M's 30 layers, 9 heads on 3 of width 64) each have their own
pools, in one program, so that a long cache comes from memory as it does in decoding.  One JSON line
a case: medians of interleaved runs, per layer.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from infer import native
from infer.native import paged_attention as native_attention
from infer.native import rope_write as native_rope
from infer.ops import attention_xla, rope

HEADS, KV_HEADS, WIDTH, PAGE = 9, 3, 64, 16
SCALE = WIDTH**-0.5


def operands(batch, queries, context, layers, dtype):
    """Return q, the pools of each layer, the table and the positions."""
    rng = np.random.default_rng(0)
    pages_per_row = context // PAGE
    shape = (batch * pages_per_row, KV_HEADS, PAGE, WIDTH)
    pool = lambda: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
    table = rng.permutation(shape[0]).reshape(batch, pages_per_row).astype(np.int32)
    positions = np.tile(np.arange(context - queries, context, dtype=np.int32), (batch, 1))
    q = rng.standard_normal((batch, queries, HEADS, WIDTH), np.float32)
    pools = [(pool(), pool()) for _ in range(layers)]
    return jnp.asarray(q), pools, jnp.asarray(table), jnp.asarray(positions)


def over_layers(attention):
    """Return a program that attends in each layer, one after the other."""

    def run(q, pools, table, positions):
        for k, v in pools:
            q = attention(q, k, v, table, positions, scale=SCALE)
        return q

    return jax.jit(run)


def interleaved(programs, arguments, repeats):
    """Return the median seconds of each program."""
    for program in programs.values():
        jax.block_until_ready(program(*arguments))
    times = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def report(case, times, layers, **more):
    line = {"case": case, "isa": native.isa(), "threads": native.num_threads()}
    line |= {f"{name}_us": round(t / layers * 1e6, 1) for name, t in times.items()}
    line |= {name: round(value / (times["native"] / layers) / 1e9, 1) for name, value in more.items()}
    print(json.dumps(line | {"ratio": round(times["xla"] / times["native"], 2)}), flush=True)


def attention_cases(args):
    forms = {
        "native": over_layers(native_attention.paged_attention),
        "xla": over_layers(attention_xla.paged_attention),
    }
    cases = [(b, 1, context) for context in (512, 4096) for b in (1, 8)] + [(1, 512, 512)]
    for dtype in (jnp.float32, jnp.bfloat16):
        for batch, queries, context in cases:
            layers = max(2, min(args.layers, 60_000 // (batch * context)))
            arguments = operands(batch, queries, context, layers, dtype)
            times = interleaved(forms, arguments, args.repeats)
            read = 2 * batch * context * KV_HEADS * WIDTH * jnp.dtype(dtype).itemsize
            pairs = batch * sum(range(context - queries + 1, context + 1))
            more = {"GFLOP/s": 4 * pairs * HEADS * WIDTH}
            if queries == 1:
                more = {"GB/s": read}
            name = f"{'decode' if queries == 1 else 'prefill'} B={batch} T={queries} S={context}"
            report(f"{name} {jnp.dtype(dtype).name} L={layers}", times, layers, **more)


def rope_cases(args):
    rng = np.random.default_rng(0)
    for tokens in (1, 8, 512):
        normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
        q, k, v = (normal(tokens, n, WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS))
        cos, sin = normal(tokens, WIDTH // 2), normal(tokens, WIDTH // 2)
        positions = jnp.arange(tokens, dtype=jnp.int32)
        pools = lambda: [jnp.zeros((64, KV_HEADS, PAGE, WIDTH)) for _ in range(2)]
        forms = {"native": native_rope.rope_write, "xla": rope._rope_write_xla}
        layers = 10

        def run(state, turned, form):
            for _ in range(layers):  # noqa: B023
                turned, *state = form(
                    turned, k, v, cos, sin, positions // PAGE, positions, *state  # noqa: B023
                )
            return state, turned

        times = {name: [] for name in forms}
        programs = {
            name: jax.jit(functools.partial(run, form=form), donate_argnums=0)
            for name, form in forms.items()
        }
        states = {name: jax.block_until_ready(p(pools(), q))[0] for name, p in programs.items()}
        for _ in range(args.repeats):
            for name, program in programs.items():
                start = time.perf_counter()
                states[name], y = program(states[name], q)
                jax.block_until_ready(y)
                times[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(t) for name, t in times.items()}
        report(f"rope_write T={tokens}", medians, layers)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    attention_cases(args)
    rope_cases(args)


if __name__ == "__main__":
    main()
