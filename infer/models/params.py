"""The weights of a dense decoder as a pytree."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from infer.config import ModelConfig, QkNorm, Residual
from infer.errors import ConfigError
from infer.native.repack import Packed
from infer.pytree import Leaf, pytree_dataclass, static
from infer.quant.qarray import QArray


@pytree_dataclass
class LayerParams:
    """Weights of one layer; matrices are [out, in], a float array, a QArray or a Packed.  What a
    family lacks is None.
    """

    attn_norm: Leaf  # [D], None without pre_norms
    q: Leaf  # [N * H, D]
    k: Leaf  # [K * H, D]
    v: Leaf  # [K * H, D]
    o: Leaf  # [D, N * H]
    mlp_norm: Leaf  # [D], None without pre_norms or where one norm serves both blocks
    gate: Leaf  # [F, D], None where the feed-forward has no gate
    up: Leaf  # [F, D]
    down: Leaf  # [D, F]
    q_bias: Leaf = None  # [N * H]
    k_bias: Leaf = None  # [K * H]
    v_bias: Leaf = None  # [K * H]
    q_norm: Leaf = None  # [H], or [N * H] over all heads
    k_norm: Leaf = None  # [H], or [K * H] over all heads
    post_attn_norm: Leaf = None  # [D]
    post_mlp_norm: Leaf = None  # [D]
    o_bias: Leaf = None  # [D]
    gate_bias: Leaf = None  # [F]
    up_bias: Leaf = None  # [F]
    down_bias: Leaf = None  # [D]
    attn_norm_bias: Leaf = None  # [D]
    mlp_norm_bias: Leaf = None  # [D]
    post_attn_norm_bias: Leaf = None  # [D]
    post_mlp_norm_bias: Leaf = None  # [D]
    sinks: Leaf = None  # [N]


@pytree_dataclass
class Params:
    """All weights of a model.  `config` is static: it is part of the program, not of the data."""

    embed: Leaf  # [V, D]
    layers: tuple[Any, ...]  # L x LayerParams
    final_norm: Leaf  # [D]
    lm_head: Leaf = None  # [V, D], None when tied to the embedding
    positions: Leaf = None  # [max_context, D], learned position embeddings
    final_norm_bias: Leaf = None  # [D]
    config: ModelConfig = static(kw_only=True)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations: that of the final norm, which is never packed."""
        return self.final_norm.dtype


def expected_shapes(config: ModelConfig) -> Params:
    """Return a Params whose leaves are the shapes (tuples) that `config` asks for."""
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * h, config.num_kv_heads * h
    qk_norm = {QkNorm.NONE: (None, None), QkNorm.HEAD: ((h,), (h,))}
    q_norm, k_norm = qk_norm.get(config.qk_norm, ((queries,), (keys,)))
    pre, two_norms = config.pre_norms, config.residual is not Residual.PARALLEL_ONE_NORM
    when = lambda condition, *shape: shape if condition else None
    layer = LayerParams(
        attn_norm=when(pre, d),
        q=(queries, d),
        k=(keys, d),
        v=(keys, d),
        o=(d, queries),
        mlp_norm=when(pre and two_norms, d),
        gate=when(config.gated_mlp, f, d),
        up=(f, d),
        down=(d, f),
        q_bias=when(config.qkv_bias, queries),
        k_bias=when(config.qkv_bias, keys),
        v_bias=when(config.qkv_bias, keys),
        q_norm=q_norm,
        k_norm=k_norm,
        post_attn_norm=when(config.post_norms, d),
        post_mlp_norm=when(config.post_norms, d),
        o_bias=when(config.o_bias, d),
        gate_bias=when(config.mlp_bias and config.gated_mlp, f),
        up_bias=when(config.mlp_bias, f),
        down_bias=when(config.mlp_bias, d),
        attn_norm_bias=when(config.norm_bias and pre, d),
        mlp_norm_bias=when(config.norm_bias and pre and two_norms, d),
        post_attn_norm_bias=when(config.norm_bias and config.post_norms, d),
        post_mlp_norm_bias=when(config.norm_bias and config.post_norms, d),
        sinks=when(config.sinks, config.num_heads),
    )
    return Params(
        embed=(config.vocab_size, d),
        layers=(layer,) * config.num_layers,
        final_norm=(d,),
        lm_head=when(not config.tied_embeddings, config.vocab_size, d),
        positions=when(config.learned_positions, config.max_context, d),
        final_norm_bias=when(config.norm_bias, d),
        config=config,
    )


def validate(params: Params) -> Params:
    """Return `params`, or raise ConfigError listing every leaf whose shape is not what its config
    says.
    """
    want, _ = jax.tree_util.tree_flatten_with_path(
        expected_shapes(params.config), is_leaf=lambda x: isinstance(x, tuple) and not _is_layers(x)
    )
    have = dict(
        jax.tree_util.tree_flatten_with_path(
            params, is_leaf=lambda x: isinstance(x, (QArray, Packed))
        )[0]
    )
    problems = []
    for path, shape in want:
        name, leaf = jax.tree_util.keystr(path), have.pop(path, None)
        if leaf is None:
            problems.append(f"{name} is missing, must be {list(shape)}")
        elif tuple(leaf.shape) != shape:
            problems.append(f"{name} is {list(leaf.shape)}, must be {list(shape)}")
    problems += [f"{jax.tree_util.keystr(path)} has no place in this model" for path in have]
    if problems:
        raise ConfigError(f"{params.config.family} weights: " + "; ".join(problems))
    return params


def _is_layers(x: tuple) -> bool:
    return bool(x) and isinstance(x[0], LayerParams)


def random_params(config: ModelConfig, seed: int, dtype: DTypeLike = jnp.float32) -> Params:
    """Return random weights, for tests and benchmarks: matrices N(0, 1/in), norms near one."""
    rng = np.random.default_rng(seed)

    def leaf(shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.asarray(1 + 0.1 * rng.standard_normal(shape), dtype)
        return jnp.asarray(rng.standard_normal(shape) / math.sqrt(shape[-1]), dtype)

    is_shape = lambda x: isinstance(x, tuple) and not _is_layers(x)
    return jax.tree.map(leaf, expected_shapes(config), is_leaf=is_shape)


def num_bytes(params: Params) -> int:
    """Return the bytes that all weights take, packed ones as packed."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def weight_form(params: Params) -> str:
    """Return in words what form the matrices have: their dtype, or whose packed order.

    "packed Q4_1, Q8_0 for native operations"; "packed Q4_1 blocks"; "float32".
    """
    is_weight = lambda x: isinstance(x, (QArray, Packed))
    leaves = jax.tree.leaves(params, is_leaf=is_weight)
    panels = sorted({leaf.format for leaf in leaves if isinstance(leaf, Packed)})
    blocks = sorted({leaf.format.name for leaf in leaves if isinstance(leaf, QArray)})
    parts = [f"packed {', '.join(panels)} for native operations"] if panels else []
    parts += [f"packed {', '.join(blocks)} blocks"] if blocks else []
    return " and ".join(parts) or params.dtype.name
