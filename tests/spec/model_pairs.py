"""Tiny targets and drafters of which it is known what they must agree on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from infer.config import LayerConfig
from infer.models.params import Params, random_params
from tests.models import tiny


def noisy(params: Params, size: float, seed: int = 5) -> Params:
    """Return weights near `params`: a drafter that agrees with it sometimes."""
    rng = np.random.default_rng(seed)
    near = lambda x: x * jnp.asarray(1 + size * rng.standard_normal(x.shape), x.dtype)
    return jax.tree.map(near, params)


def permuted(params: Params, order: np.ndarray) -> Params:
    """Return the same model with id `order[i]` of `params` as its id i."""
    full = np.concatenate([order, np.arange(len(order), params.config.vocab_size)])
    head = None if params.lm_head is None else params.lm_head[full]
    return dataclasses.replace(params, embed=params.embed[full], lm_head=head)


def late_layers_idle(params: Params, first: int) -> Params:
    """Return the model whose layers from `first` on add nothing to the residual stream."""
    idle = lambda w: dataclasses.replace(w, o=w.o * 0, down=w.down * 0)
    layers = tuple(w if i < first else idle(w) for i, w in enumerate(params.layers))
    return dataclasses.replace(params, layers=layers)


def from_table(table: jax.Array) -> Params:
    """Return a model whose logits are table[last token]: a one-hot embedding, idle layers."""
    vocab = table.shape[0]
    config = tiny.llama_config(
        vocab_size=vocab,
        num_tokens=vocab,
        hidden_size=vocab,
        intermediate_size=4,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        layers=(LayerConfig(),),
        tied_embeddings=False,
        norm_eps=1e-12,
    )
    params = late_layers_idle(random_params(config, seed=0), 0)
    # The norm makes sqrt(V) of the one.
    return dataclasses.replace(
        params,
        embed=jnp.eye(vocab, dtype=jnp.float32),
        final_norm=jnp.ones(vocab, jnp.float32),
        lm_head=table.T / np.sqrt(vocab),
    )
