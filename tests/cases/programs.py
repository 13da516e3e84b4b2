"""Whole programs at a Llama-3-8B layer's shape: what must be one CUDA graph, in place.

Two layers where 32 would only take longer to compile: they are alike.
"""

import dataclasses
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
from infer.generation.prefixes import Prefixes
from infer.generation.prepare import Caps
from infer.generation.state import Lanes, Requests
from infer.models import decoder
from infer.models.paged_forward import through_layers
from infer.models.params import LayerParams, Params, expected_shapes
from infer.sampling import SamplingParams
from tests.cases.kernels.quantized_matmul import packed

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
    layers: int
    names: tuple[str, ...]  # of kernels in it
    options: Mapping[str, Any] = field(default_factory=dict)
    chip: str = CHIP

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools, bfloat16."""
        size = functools.reduce(lambda a, b: a * b, self.pool_shape)
        return 2 * self.layers * size * 2


def llama_3_8b(layers: int = 2, small: bool = False) -> ModelConfig:
    """Return the configuration, with fewer layers; `small` is a toy of the same make."""
    vocab, width, inner, heads, kv, head = 128256, 4096, 14336, 32, 8, 128
    if small:
        vocab, width, inner, heads, kv, head = 256, 64, 96, 4, 2, 16
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        num_tokens=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head,
        layers=(LayerConfig(rope=RopeConfig(theta=5e5)),) * layers,
        max_context=8192,
        tied_embeddings=False,
    ).validate()


def weights(config: ModelConfig) -> Params:
    """Return the shapes of a model's weights, bfloat16."""
    is_shape = lambda x: isinstance(x, tuple) and not (x and isinstance(x[0], LayerParams))
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        expected_shapes(config),
        is_leaf=is_shape,
    )


def decode_step(
    implementation: str | None = None, batch: int = 32, layers: int = 2, small: bool = False
) -> ProgramCase:
    """One token of each sequence: layers, head, argmax."""
    config, pages = llama_3_8b(layers, small), 8 if small else 4096
    make = functools.partial(
        paged.create,
        config,
        num_rows=batch,
        num_pages=pages,
        page_size=PAGE_SIZE,
        pages_per_row=4 if small else 256,
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
        args=(weights(config), jax.eval_shape(make), tokens),
        donate=(1,),
        pool_shape=(pages, config.num_kv_heads, PAGE_SIZE, config.head_dim),
        names=("paged_attention",),
        layers=layers,
    )


def packed_decode_step() -> ProgramCase:
    """The same with one sequence and the layers' weights in Q4_K, as they lie in a file."""
    case = decode_step(batch=1)
    params: Params = case.args[0]
    pack = lambda w: jax.eval_shape(lambda: packed("Q4_K", *w.shape, jax.random.key(0)))
    names = ("q", "k", "v", "o", "gate", "up", "down")
    layers = tuple(
        dataclasses.replace(layer, **{name: pack(getattr(layer, name)) for name in names})
        for layer in params.layers
    )
    params = dataclasses.replace(params, layers=layers)
    return dataclasses.replace(
        case,
        name="packed decode step",
        args=(params, *case.args[1:]),
        names=(*case.names, "quantized_matmul"),
    )


def requests_for(
    config: ModelConfig,
    count: int,
    prompt: int,
    *,
    small: bool = False,
    implementation: str | None = None,
) -> tuple[Requests, Caps]:
    """Return `count` sampled requests of `prompt` tokens, and the program's static sizes."""
    new = 8 if small else 256
    sampling = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=new, seed=1)
    todo = rows.expand_rows([[1] * prompt] * count, [sampling] * count, config, None)
    prompt_cap, slots = prepare.bucket(prompt, 16), count // 2
    pages_per_row = (prompt_cap + new) // PAGE_SIZE + 1
    caps = Caps(
        requests=count,
        prompt=prompt_cap,
        new_tokens=new,
        slots=slots,
        pages=slots * pages_per_row,
        pages_per_row=pages_per_row,
        page_size=PAGE_SIZE,
        processed_logprobs=False,
        lanes=Lanes(tile=16 if small else 64, num_tiles=4, passes=1),
        implementation=implementation,
        **rows.caps_of(todo, config.vocab_size),
    )
    state = rows.sampling_state(todo, jax.random.key(0), caps, config.vocab_size)
    return rows.request_arrays(todo, state, Prefixes.none(caps.requests), caps), caps


def generate_loop(implementation: str | None = None, graph: bool = True) -> ProgramCase:
    """The loop of `generate`: slots refilled, prefill and decode, sampling, early exit."""
    config = llama_3_8b()
    requests, caps = requests_for(config, 64, 300, implementation=implementation)
    shaped = jax.eval_shape(lambda x: x, requests)
    params = weights(config)
    fresh = functools.partial(prepare.fresh_state, caps=caps, pad_id=0)
    start = jax.eval_shape(fresh, params, shaped)
    scalar = functools.partial(jax.ShapeDtypeStruct, ())
    return ProgramCase(
        name="generate loop" + ("" if graph else " without graphs"),
        run=functools.partial(host.traced_run, caps=caps),
        args=(params, shaped, start, scalar(jnp.int32), scalar(jnp.bool_)),
        donate=(2,),
        pool_shape=(caps.pages, config.num_kv_heads, PAGE_SIZE, config.head_dim),
        names=("paged_attention", "paged_prefill", "sample"),
        layers=config.num_layers,
        options=dict(COMMAND_BUFFERS) if graph else {},
    )
