"""Native CPU attention beside the XLA form: `python -m benchmarks.native_attention`.

The layers of a model (SmolLM2-135M's 30 layers, 9 heads on 3 of width 64) each have their own
pools, in one program, so that a long cache comes from memory as it does in decoding.  Pages ascend,
as the allocator gives them to a prompt, or lie --scattered.  One JSON line a case: times a layer,
medians of interleaved runs, and beside them the best ones, which a busy machine disturbs less.
"""

import argparse
import functools
import itertools
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


def operands(batch, queries, context, layers, dtype, scattered=False):
    """Return q, the pools of each layer, the table and the positions."""
    rng = np.random.default_rng(0)
    pages_per_row = context // PAGE
    shape = (batch * pages_per_row, KV_HEADS, PAGE, WIDTH)
    pool = lambda: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
    pages = rng.permutation(shape[0]) if scattered else np.arange(shape[0])
    table = pages.reshape(batch, pages_per_row).astype(np.int32)
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


def interleaved(programs, repeats):
    """Return each program's seconds, sorted."""
    for program in programs.values():
        program()
    times = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
    return {name: sorted(t) for name, t in times.items()}


def report(case, times, layers, **rates):
    """Print a line: microseconds a layer, the ratio, and rates (work a layer) in 10^9 a second."""
    line = {"case": case, "isa": native.isa(), "threads": native.num_threads()}
    for how, of in (("median", statistics.median), ("best", min)):
        layer = {name: of(t) / layers for name, t in times.items()}
        line |= {f"{name}_{how}_us": round(t * 1e6, 1) for name, t in layer.items()}
        line[f"{how}_ratio"] = round(layer["xla"] / layer["native"], 2)
        line |= {f"{how}_{unit}": round(w / layer["native"] / 1e9, 1) for unit, w in rates.items()}
    print(json.dumps(line), flush=True)


def attention_cases(args):
    forms = {
        "native": over_layers(native_attention.paged_attention),
        "xla": over_layers(attention_xla.paged_attention),
    }
    cases = [(b, 1, context) for context in (512, 4096) for b in (1, 8)] + [(1, 512, 512)]
    for dtype in (jnp.float32, jnp.bfloat16):
        for batch, queries, context in cases:
            layers = max(2, min(args.layers, 60_000 // (batch * context)))
            arguments = operands(batch, queries, context, layers, dtype, args.scattered)
            run = lambda form, arguments: jax.block_until_ready(form(*arguments))
            times = interleaved(
                {name: functools.partial(run, form, arguments) for name, form in forms.items()},
                args.repeats,
            )
            read = 2 * batch * context * KV_HEADS * WIDTH * jnp.dtype(dtype).itemsize
            pairs = batch * sum(range(context - queries + 1, context + 1))
            rate = {"GB/s": read} if queries == 1 else {"GFLOP/s": 4 * pairs * HEADS * WIDTH}
            name = f"{'decode' if queries == 1 else 'prefill'} B={batch} T={queries} S={context}"
            report(f"{name} {jnp.dtype(dtype).name} L={layers}", times, layers, **rate)


def rope_cases(args):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    layers = 10

    def run(pools, q, keys, values, cos, sin, positions, form):
        written = []
        for (k_pages, v_pages), k, v in zip(pools, keys, values, strict=True):
            q, *pool = form(q, k, v, cos, sin, positions // PAGE, positions, k_pages, v_pages)
            written.append(tuple(pool))
        return written, q

    for dtype, tokens in itertools.product((jnp.float32, jnp.bfloat16), (1, 8, 512)):
        state = {}
        inputs = (
            normal(tokens, HEADS, WIDTH),
            *([normal(tokens, KV_HEADS, WIDTH) for _ in range(layers)] for _ in range(2)),
            normal(tokens, WIDTH // 2),
            normal(tokens, WIDTH // 2),
            jnp.arange(tokens, dtype=jnp.int32),
        )
        pool = lambda dtype: jnp.zeros((64, KV_HEADS, PAGE, WIDTH), dtype)

        def step(name, program, state, inputs):
            state[name], q = program(state[name], *inputs)
            jax.block_until_ready(q)

        programs = {}
        for name, form in (("native", native_rope.rope_write), ("xla", rope._rope_write_xla)):
            state[name] = [(pool(dtype), pool(dtype)) for _ in range(layers)]
            program = jax.jit(functools.partial(run, form=form), donate_argnums=0)
            programs[name] = functools.partial(step, name, program, state, inputs)
        times = interleaved(programs, args.repeats)
        report(f"rope_write T={tokens} {jnp.dtype(dtype).name}", times, layers)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--scattered", action="store_true")
    args = parser.parse_args()
    attention_cases(args)
    rope_cases(args)


if __name__ == "__main__":
    main()
