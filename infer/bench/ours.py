"""Our engine's side of the benchmark: one timed call, what it moves, and its cold start."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

import infer
from infer import native
from infer.bench.cases import DecodeCase
from infer.cache.layout import cached_layers
from infer.hardware import CPU_LOCAL, get_chip
from infer.models import params as weights
from infer.models.params import Params
from infer.native.repack import Packed
from infer.plan import roofline
from infer.plan.shape import ModelShape
from infer.quant.qarray import QArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One call of one engine.  `ttft_s` is from the call to every row's first token."""

    ttft_s: float
    decode_s: float
    tokens: list[list[int]]
    compile_s: float = 0.0
    implementations: dict[str, str] = dataclasses.field(default_factory=dict)

    def decode_rate(self) -> float:
        """Tokens a second after the first, all rows together."""
        return sum(len(row) - 1 for row in self.tokens) / self.decode_s

    def prefill_rate(self, case: DecodeCase) -> float:
        """Prompt tokens a second until every row has its first token."""
        return case.batch * case.prompt_tokens / self.ttft_s


def run(
    params: Params,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    kv_dtype: str | None = None,
) -> Timing:
    """Generate greedily past the end-of-sequence ids; host work counts into `ttft_s`."""
    sampling = infer.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    out = infer.generate(
        params, prompts, sampling=sampling, num_slots=len(prompts), kv_dtype=kv_dtype
    )
    wall_s = time.perf_counter() - start
    later = len(prompts) * (new_tokens - 1)
    decode_s = later / out.stats["decode_tokens_per_s"] if later else 0.0
    compile_s = out.stats["compile_s"]
    tokens = [out.token_ids(row) for row in range(len(prompts))]
    return Timing(
        ttft_s=wall_s - decode_s - compile_s,
        decode_s=decode_s,
        tokens=tokens,
        compile_s=compile_s,
        implementations=out.stats["implementations"],
    )


def model_shape(params: Params, kv_dtype: str | None = None) -> ModelShape:
    """Return what a decode step of `params` multiplies with, reads and caches."""
    config = params.config
    is_weight = lambda x: isinstance(x, (QArray, Packed))
    leaves = jax.tree.leaves(params.layers, is_leaf=is_weight)
    matrices = [leaf.shape for leaf in leaves if len(leaf.shape) == 2]
    head = params.embed if params.lm_head is None else params.lm_head
    # An untied embedding is read by one row a token only.
    unread = 0 if params.lm_head is None else params.embed.nbytes
    return ModelShape(
        num_params=sum(out * width for out, width in matrices) + head.shape[0] * head.shape[1],
        weight_bytes=weights.num_bytes(params) - unread,
        layers=cached_layers(config, kv_dtype or params.dtype),
    )


def step_bytes(params: Params, case: DecodeCase, kv_dtype: str | None = None) -> int:
    """Return what one decode step of `case` reads: weights as they lie in memory, cached keys and
    values.
    """
    shape = model_shape(params, kv_dtype)
    kv_bytes = roofline.kv_bytes_read(shape.layers, round(case.context))
    return round(shape.weight_bytes + case.batch * kv_bytes)


def roofline_of(params: Params, case: DecodeCase) -> dict[str, float]:
    """Return bytes and FLOPs of one decode step of `case`, and the least seconds it can take."""
    chip, shape, context = get_chip(CPU_LOCAL), model_shape(params), round(case.context)
    config = params.config
    attention = roofline.attention_flops_per_token(
        config.num_layers, config.num_heads * config.head_dim, context
    )
    bound = roofline.decode_step_on(shape, chip, batch=case.batch, context=context, dtype="f32")
    return {
        "bytes": step_bytes(params, case),
        "flops": round(case.batch * (2 * shape.num_params + attention)),
        "bound_s": bound.seconds,
        "bandwidth": chip.bandwidth,
    }


def cold_start(model: str, dtype: str | None) -> dict[str, dict[str, float]]:
    """Return seconds of `infer generate` in fresh processes: nothing cached, then from the cache.

    Each has the process's whole `wall_s`, `load_s`, `compile_s` and `ttft_s`.
    """
    options = [] if dtype is None else ["--dtype", dtype]
    command = [sys.executable, "-m", "infer", "generate", "The capital of France is", "--json"]
    command += ["--model", model, "--temperature", "0", "--max-tokens", "2", *options]
    figures = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        for name in ("empty cache", "filled cache"):
            start = time.perf_counter()
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            wall_s = time.perf_counter() - start
            stats = json.loads(done.stdout)["stats"]
            figures[name] = {"wall_s": wall_s} | {
                key: stats[key] for key in ("load_s", "compile_s", "ttft_s")
            }
    return figures


def describe(params: Params, kv_dtype: str | None = None) -> dict[str, Any]:
    """Return what a result line says about our engine."""
    head = params.embed if params.lm_head is None else params.lm_head
    return {
        "version": infer.__version__,
        "jax": jax.__version__,
        "dtype": params.dtype.name,
        "weights": "packed" if isinstance(head, (QArray, Packed)) else params.dtype.name,
        "cache": kv_dtype or params.dtype.name,
        "native": native.why_not_by_default() or native.isa(),
        "native_threads": native.num_threads() if native.by_default() else None,
    }
