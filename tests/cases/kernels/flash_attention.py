"""Prefill attention at the heads of Llama 3, Gemma 2, gpt-oss, Phi, and DeepSeek's MLA."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from infer.pallas import flash_attention as fa
from tests.cases.kernels import KernelCase

# Chips that take the same sizes of blocks, by a compute capability of theirs.
FAMILIES = {
    (8, 0): ("a100-80gb", "l4-24gb", "rtx-5060-8gb"),
    (9, 0): ("h200-141gb",),
    (10, 0): ("b200-180gb",),
}


@dataclass(frozen=True, kw_only=True)
class Heads:
    """One model's attention over sequences of T tokens."""

    name: str
    batch: int = 1
    tokens: int = 4096
    heads: int
    kv_heads: int
    width: int
    value_width: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "bfloat16"

    @property
    def values(self) -> int:
        """Return the width of a value head."""
        return self.value_width or self.width

    @property
    def pairs(self) -> float:
        """Return how many (query, key) pairs see each other, over all heads."""
        window = min(self.window or self.tokens, self.tokens)
        row = window * (window + 1) / 2 + (self.tokens - window) * window
        return self.batch * self.heads * row

    @property
    def options(self) -> dict[str, float | int | None]:
        """Return the static arguments."""
        return {"scale": self.width**-0.5, "window": self.window, "softcap": self.softcap}

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the elements of q, of k and v together, and of o."""
        tokens = self.batch * self.tokens
        kv = tokens * self.kv_heads * (self.width + self.values)
        return tokens * self.heads * self.width, kv, tokens * self.heads * self.values

    @property
    def shape(self) -> str:
        """Return the case in words."""
        return f"{self.name} b{self.batch} t{self.tokens} {self.dtype}"

    def make(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Draw q, k, v and, where there are any, sinks."""
        keys = jax.random.split(key, 4)
        shape = (self.batch, self.tokens)
        draw = lambda key, *rest: jax.random.normal(key, (*shape, *rest), jnp.dtype(self.dtype))
        arrays = (
            draw(keys[0], self.heads, self.width),
            draw(keys[1], self.kv_heads, self.width),
            draw(keys[2], self.kv_heads, self.values),
        )
        return (*arrays, jax.random.normal(keys[3], (self.heads,))) if self.sinks else arrays


LLAMA = Heads(name="llama-3-8b", batch=2, tokens=8192, heads=32, kv_heads=8, width=128)
GEMMA = Heads(
    name="gemma-2-9b window 512", heads=16, kv_heads=8, width=256, window=512, softcap=50.0
)
GEMMA_27B = Heads(
    name="gemma-2-27b window 4096",
    tokens=8192,
    heads=32,
    kv_heads=16,
    width=128,
    window=4096,
    softcap=50.0,
)
GPT_OSS = Heads(name="gpt-oss window 128", heads=64, kv_heads=8, width=64, window=128, sinks=True)
PHI_2 = Heads(name="phi-2", tokens=2048, heads=32, kv_heads=32, width=80)
PHI_3 = Heads(name="phi-3-mini window 2047", heads=32, kv_heads=32, width=96, window=2047)
MLA = Heads(name="deepseek-v2-lite mla", heads=16, kv_heads=16, width=192, value_width=128)
SMOL_F32 = Heads(name="smollm2", tokens=2048, heads=9, kv_heads=3, width=64, dtype="float32")
LLAMA_F32 = Heads(name="llama-3-8b", tokens=2048, heads=32, kv_heads=8, width=128, dtype="float32")


def _dense(heads: Heads, capability: tuple[int, int]) -> KernelCase:
    blocks = fa.FlashAttentionBlocks.for_shape(heads.width, heads.values, heads.dtype, capability)

    def call(function: object, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, *sinks = arrays
        return function(q, k, v, sinks=sinks[0] if sinks else None, **heads.options)  # type: ignore[operator]

    q, kv, o = heads.sizes
    return KernelCase(
        kernel="flash_attention",
        form="triton",
        shape=f"{heads.shape} sm{capability[0]}x",
        make=heads.make,
        run=functools.partial(call, functools.partial(fa.flash_attention, blocks=blocks)),
        reference=functools.partial(call, fa.flash_attention_reference),
        names=("flash_attention",),
        flops=2.0 * heads.pairs * (heads.width + heads.values),
        bytes=float((q + kv + o) * jnp.dtype(heads.dtype).itemsize),
        chips=FAMILIES[capability],
    )


def _ragged(capability: tuple[int, int]) -> KernelCase:
    """A prefill pass: prompts of many lengths on one axis of 8192 tokens, the last 192 padding."""
    lengths = (4000, 1, 0, 2500, 999, 500)
    heads = Heads(name="llama-3-8b", tokens=8192, heads=32, kv_heads=8, width=128)
    blocks = fa.FlashAttentionBlocks.for_shape(128, 128, heads.dtype, capability)

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v = (x[0] for x in heads.make(key))
        starts = jnp.cumsum(jnp.array((0, *lengths), jnp.int32), dtype=jnp.int32)
        return q, k, v, starts

    scale = heads.width**-0.5
    q, kv, o = heads.sizes
    return KernelCase(
        kernel="flash_attention",
        form="triton",
        shape=f"llama-3-8b ragged t8192 bfloat16 sm{capability[0]}x",
        make=make,
        run=functools.partial(fa.flash_attention_ragged, scale=scale, blocks=blocks),
        reference=functools.partial(fa.flash_attention_ragged_reference, scale=scale),
        names=("flash_attention",),
        flops=4.0 * heads.heads * heads.width * sum(n * (n + 1) / 2 for n in lengths),
        bytes=2.0 * (q + kv + o),
        chips=FAMILIES[capability],
        compare=lambda x: jnp.where(x > -1e29, x, 0),  # lse of padding is -1e30
    )


TINY = Heads(name="tiny", tokens=40, heads=4, kv_heads=2, width=32, window=9, dtype="float32")
SMOKE = _dense(TINY, (8, 0))
CASES = tuple(
    case
    for capability in FAMILIES
    for case in (
        *(
            _dense(heads, capability)
            for heads in (LLAMA, GEMMA, GEMMA_27B, GPT_OSS, PHI_2, PHI_3, MLA, SMOL_F32, LLAMA_F32)
        ),
        _ragged(capability),
    )
)
