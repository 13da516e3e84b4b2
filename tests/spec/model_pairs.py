"""Tiny targets and drafters of which it is known what they must agree on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from infer.models.params import Params


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
