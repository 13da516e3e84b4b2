"""Whole programs at a Llama-3-8B layer's shape: what must be one CUDA graph, in place.

Two layers instead of 32: they are alike, and each is compiled.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from infer.cache import paged
from infer.compiling import COMMAND_BUFFERS
from infer.config import LayerConfig, ModelConfig, RopeConfig
from infer.generation import host, prepare, rows
from infer.generation.forward import through_layers
from infer.generation.prefixes import Prefixes
from infer.generation.prepare import Caps
from infer.generation.state import Lanes
from infer.models import decoder
from infer.models.params import LayerParams, Params, expected_shapes
from infer.sampling import SamplingParams

NUM_LAYERS = 2
PAGE_SIZE = 16
# The one GPU where every kernel has both forms.
CHIP = "h200-141gb"


@dataclass(frozen=True, kw_only=True)
class ProgramCase:
    """A program: its function, the shapes of its arguments, and what XLA must make of it."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]
    pool_shape: tuple[int, ...]  # of one layer's keys, or values
    names: tuple[str, ...]  # of kernels in it
    options: Mapping[str, Any] = field(default_factory=dict)
    chip: str = CHIP

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools, bfloat16."""
        size = functools.reduce(lambda a, b: a * b, self.pool_shape)
        return 2 * NUM_LAYERS * size * 2


def llama_3_8b() -> ModelConfig:
    """Return the configuration, with fewer layers."""
    return ModelConfig(
        family="llama",
        vocab_size=128256,
        num_tokens=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        layers=(LayerConfig(rope=RopeConfig(theta=5e5)),) * NUM_LAYERS,
        max_context=8192,
        tied_embeddings=False,
    ).validate()


def _weights(config: ModelConfig) -> Params:
    is_shape = lambda x: isinstance(x, tuple) and not (x and isinstance(x[0], LayerParams))
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        expected_shapes(config),
        is_leaf=is_shape,
    )


def decode_step(implementation: str | None = None) -> ProgramCase:
    """One token of 32 sequences: layers, head, argmax."""
    config, batch, pages = llama_3_8b(), 32, 4096
    make = functools.partial(
        paged.create,
        config,
        num_rows=batch,
        num_pages=pages,
        page_size=PAGE_SIZE,
        pages_per_row=256,
        dtype=jnp.bfloat16,
    )

    def run(params: Params, cache: paged.PagedCache, tokens: jax.Array) -> Any:
        slots = jnp.arange(batch, dtype=jnp.int32)
        positions = cache.lengths[:, None]
        x, cache = through_layers(
            params, cache, tokens, positions, slots, cache.page_table, slots, implementation
        )
        return jnp.argmax(decoder.logits(params, x, implementation), axis=-1), cache

    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return ProgramCase(
        name="decode step",
        run=run,
        args=(_weights(config), jax.eval_shape(make), tokens),
        donate=(1,),
        pool_shape=(pages, config.num_kv_heads, PAGE_SIZE, config.head_dim),
        names=("paged_attention",),
    )


def generate_loop(implementation: str | None = None, graph: bool = True) -> ProgramCase:
    """The loop of `generate`: slots refilled, prefill and decode, sampling, early exit."""
    config = llama_3_8b()
    sampling = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=256, seed=1)
    todo = rows.expand_rows([[1] * 300] * 64, [sampling] * 64, config, None)
    caps = Caps(
        requests=64,
        prompt=512,
        new_tokens=256,
        slots=32,
        pages=1536,
        pages_per_row=48,
        page_size=PAGE_SIZE,
        processed_logprobs=False,
        lanes=Lanes(tile=64, num_tiles=4, passes=1),
        implementation=implementation,
        **rows.caps_of(todo, config.vocab_size),
    )
    state = rows.sampling_state(todo, jax.random.key(0), caps, config.vocab_size)
    requests = rows.request_arrays(todo, state, Prefixes.none(caps.requests), caps)
    shaped = jax.eval_shape(lambda x: x, requests)
    weights = _weights(config)
    start = jax.eval_shape(
        functools.partial(prepare.fresh_state, caps=caps, pad_id=0), weights, shaped
    )
    scalar = functools.partial(jax.ShapeDtypeStruct, ())
    return ProgramCase(
        name="generate loop" + ("" if graph else " without graphs"),
        run=functools.partial(host.traced_run, caps=caps),
        args=(weights, shaped, start, scalar(jnp.int32), scalar(jnp.bool_)),
        donate=(2,),
        pool_shape=(caps.pages, config.num_kv_heads, PAGE_SIZE, config.head_dim),
        names=("paged_attention", "paged_prefill", "sample"),
        options=dict(COMMAND_BUFFERS) if graph else {},
    )
