"""Print a digest of what the native operations compute: `python -m tests.native.bits`.

A test runs it with other instruction sets and numbers of threads.
"""

import hashlib

import jax.numpy as jnp
import numpy as np

from infer import native
from infer.native.experts import expert_mlp
from infer.native.linear import gated_mlp, linear
from infer.native.repack import repack
from infer.native.sample import logsumexp, sample
from infer.quant.methods import FP8, NF4, RTN
from tests.native.weights import FORMATS, random_experts, random_rows, random_weight


def results() -> dict[str, list[np.ndarray]]:
    """Return the results by operation and format."""
    x = jnp.asarray(random_rows(43, 256))
    gain = jnp.asarray(random_rows(1, 256, seed=2)[0])
    results = {}
    for name in FORMATS:
        wide = repack(random_weight(name, (1000, 256)))
        results[f"linear {name}"] = list(linear(x, (wide,), norm_gain=gain, eps=1e-6))
        gate, up = (repack(random_weight(name, (512, 256), seed=s)) for s in (3, 4))
        down = repack(random_weight(name, (256, 512), seed=5))
        for act in ("silu", "gelu_tanh"):
            y = gated_mlp(x, gate, up, down, act, norm_gain=gain, residual=True)
            results[f"gated_mlp {act} {name}"] = [y]
        experts = [
            repack(random_experts(name, shape, seed=s))
            for s, shape in enumerate([(6, 96, 256), (6, 96, 256), (6, 256, 96)])
            if not (s == 2 and name.endswith("_K"))  # blocks of 256
        ]
        if len(experts) < 3:
            experts.append(repack(random_experts("Q8_0", (6, 256, 96), seed=2)))
        rows = jnp.asarray(random_rows(150, 256, seed=7))
        rng = np.random.default_rng(8)
        ids = rng.integers(0, 4, (150, 3), np.int32) * rng.integers(0, 2, (150, 1), np.int32)
        weights = jnp.asarray(rng.random((150, 3), np.float32))
        y = expert_mlp(rows, jnp.asarray(ids), weights, *experts, "silu", residual=rows)
        results[f"expert_mlp {name}"] = [y]
    for method in (RTN(bits=3, group_size=64, symmetric=False), RTN(bits=8), NF4(), FP8()):
        w = repack(method.pack(jnp.asarray(random_rows(100, 256, seed=7))))
        results[f"linear {method}"] = list(linear(x, (w,)))
    for bits in (2, 5, 8):  # scales of half a group, one for the activations of a row
        method = RTN(bits=bits, group_size=16, symmetric=False)
        w = repack(method.pack(jnp.asarray(random_rows(100, 256, seed=7))))
        results[f"linear {method}"] = list(linear(x, (w,), norm_gain=gain, rounding=1))
    logits = jnp.asarray(np.random.default_rng(6).standard_normal((6, 9000), np.float32) * 4)
    results["logsumexp"] = [logsumexp(logits)]
    of = lambda *values: jnp.asarray(values, jnp.float32)
    keys = jnp.arange(12, dtype=jnp.uint32).reshape(6, 2)
    results["sample"] = [
        sample(
            logits,
            of(0, 0.7, 1, 1, 2, 9),
            jnp.asarray([0, 0, 40, 0, 9, 0], jnp.int32),
            of(1, 1, 1, 0.9, 0.8, 0.99),
            of(0, 0.01, 0, 0, 0, 0),
            keys + jnp.uint32(100 * i),
            greedy_below=1e-5,
        )
        for i in range(50)
    ]
    return {name: [np.asarray(y) for y in ys] for name, ys in results.items()}


def digests() -> dict[str, str]:
    """Return a digest of each result."""
    return {
        name: hashlib.sha256(b"".join(y.tobytes() for y in ys)).hexdigest()[:16]
        for name, ys in results().items()
    }


if __name__ == "__main__":
    print(native.isa(), native.num_threads())
    for name, digest in digests().items():
        print(digest, name)
