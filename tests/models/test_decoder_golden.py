"""Logits against transformers in float32; the golden files are made by
scripts/goldens/decoder.py.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.config import (
    Activation,
    LayerConfig,
    ModelConfig,
    QkNorm,
    RopeConfig,
    RopeScaling,
    RopeScalingKind,
)
from infer.models import decoder
from infer.models.gemma3 import layer_pattern
from infer.models.params import LayerParams, Params, validate

DATA = Path(__file__).parent.parent / "data"


def _params(
    golden: dict[str, np.ndarray], config: ModelConfig, names: dict[str, str], plus_one: bool
) -> Params:
    def weight(name: str) -> jax.Array:
        value = golden[name]
        # transformers stores Gemma's norms as w and uses 1 + w, added in float32.
        return jnp.asarray(value + 1 if plus_one and value.ndim == 1 else value)

    layers = tuple(
        LayerParams(**{field: weight(f"model.layers.{i}.{name}") for field, name in names.items()})
        for i in range(config.num_layers)
    )
    head = None if config.tied_embeddings else weight("lm_head.weight")
    return validate(
        Params(
            embed=weight("model.embed_tokens.weight"),
            layers=layers,
            final_norm=weight("model.norm.weight"),
            lm_head=head,
            config=config,
        )
    )


COMMON = dict(
    attn_norm="input_layernorm.weight",
    q="self_attn.q_proj.weight",
    k="self_attn.k_proj.weight",
    v="self_attn.v_proj.weight",
    o="self_attn.o_proj.weight",
    gate="mlp.gate_proj.weight",
    up="mlp.up_proj.weight",
    down="mlp.down_proj.weight",
)


def _llama(golden: dict[str, np.ndarray]) -> Params:
    scaling = RopeScaling(
        kind=RopeScalingKind.LLAMA3,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context=128,
    )
    config = ModelConfig(
        family="llama",
        vocab_size=96,
        num_tokens=96,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        layers=(LayerConfig(rope=RopeConfig(theta=1e4, scaling=scaling)),) * 3,
        max_context=4096,
        norm_eps=1e-5,
        qkv_bias=True,
        tied_embeddings=False,
    )
    names = COMMON | dict(
        mlp_norm="post_attention_layernorm.weight",
        q_bias="self_attn.q_proj.bias",
        k_bias="self_attn.k_proj.bias",
        v_bias="self_attn.v_proj.bias",
    )
    return _params(golden, config, names, plus_one=False)


def _gemma3(golden: dict[str, np.ndarray]) -> Params:
    full = LayerConfig(
        rope=RopeConfig(theta=1e6, scaling=RopeScaling(kind=RopeScalingKind.LINEAR, factor=8.0))
    )
    sliding = LayerConfig(rope=RopeConfig(theta=1e4), window=8)
    config = ModelConfig(
        family="gemma3",
        vocab_size=96,
        num_tokens=96,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        layers=layer_pattern(full, sliding, 7, 6),
        max_context=4096,
        norm_eps=1e-6,
        activation=Activation.GELU_TANH,
        embedding_scale=32**0.5,
        query_scale=16**-0.5,
        qk_norm=QkNorm.HEAD,
        post_norms=True,
    )
    names = COMMON | dict(
        q_norm="self_attn.q_norm.weight",
        k_norm="self_attn.k_norm.weight",
        post_attn_norm="post_attention_layernorm.weight",
        mlp_norm="pre_feedforward_layernorm.weight",
        post_mlp_norm="post_feedforward_layernorm.weight",
    )
    return _params(golden, config, names, plus_one=True)


@pytest.mark.parametrize(("name", "build"), [("llama", _llama), ("gemma3", _gemma3)])
def test_logits_agree_with_transformers_at_short_and_long_positions(name, build) -> None:
    golden = dict(np.load(DATA / f"decoder_{name}.npz"))
    params = build(golden)
    logits = np.asarray(jax.jit(decoder.forward)(params, jnp.asarray(golden["tokens"])))[0]
    worst = np.abs(logits[golden["kept"]] - golden["logits"]).max(axis=1)
    assert worst.max() < 1e-4, dict(zip(golden["kept"].tolist(), worst.tolist(), strict=True))
