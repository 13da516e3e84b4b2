"""Tiny random models: shapes small enough to compile in seconds, families real enough to exercise
every branch.
"""

import functools
import math

from infer.config import Activation, LayerConfig, ModelConfig, QkNorm, RopeConfig
from infer.models.params import Params, random_params

NUM_TOKENS = 90


def llama_config(**changes: object) -> ModelConfig:
    """Two key heads for four query heads, a vocabulary padded from 90 to 96."""
    fields = dict(
        family="llama",
        vocab_size=96,
        num_tokens=NUM_TOKENS,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        layers=(LayerConfig(),) * 2,
        max_context=128,
    )
    return ModelConfig(**(fields | changes)).validate()  # type: ignore[arg-type]


def gemma3_config() -> ModelConfig:
    """One full layer after two sliding ones, q/k norms, post norms, a softcap."""
    sliding = LayerConfig(rope=RopeConfig(theta=1e4), window=5)
    full = LayerConfig(rope=RopeConfig(theta=1e6))
    return llama_config(
        family="gemma3",
        layers=(sliding, sliding, full),
        activation=Activation.GELU_TANH,
        embedding_scale=math.sqrt(32),
        qk_norm=QkNorm.HEAD,
        post_norms=True,
        final_softcap=30.0,
    )


@functools.cache
def llama() -> Params:
    """Random weights of `llama_config`."""
    return random_params(llama_config(), seed=0)


@functools.cache
def gemma3() -> Params:
    """Random weights of `gemma3_config`."""
    return random_params(gemma3_config(), seed=1)
