"""What a layer's matrices read when the calibration text runs through it."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from infer.config import LayerConfig, ModelConfig
from infer.models import blocks, decoder
from infer.models.params import LayerParams
from infer.ops.linear import observing
from infer.pytree import Leaf, pytree_dataclass
from infer.quant.gptq import hessian
from infer.quantization.recipe import readers


@pytree_dataclass
class Seen:
    """Sums over tokens of one input [T, I]."""

    gram: Leaf  # [I, I]: x x^T
    total: Leaf  # [I]: |x|
    most: Leaf  # [I]: the largest |x|
    count: Leaf  # float32 []: tokens

    def divided(self, s: Float[Array, " I"]) -> "Seen":
        """Return what would have been seen of x / s, s positive."""
        gram = self.gram / (s[:, None] * s[None, :])
        return Seen(gram, self.total / s, self.most / s, self.count)


def add(a: Seen, b: Seen) -> Seen:
    """Return what was seen in both."""
    return Seen(a.gram + b.gram, a.total + b.total, jnp.maximum(a.most, b.most), a.count + b.count)


def _seen(x: Array) -> Seen:
    x = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    size = jnp.abs(x)
    return Seen(hessian(x), size.sum(0), size.max(0), jnp.float32(x.shape[0]))


def _of_batch(x: Array, turn: Any) -> Any:
    """Return the rotations of a batch that may have fewer sequences than `turn` is for."""
    return jax.tree.map(lambda each: each[: x.shape[0]], turn)


@functools.partial(jax.jit, static_argnames=("config", "layer", "length"))
def run(
    config: ModelConfig, layer: LayerConfig, length: int, w: LayerParams, x: Array, turn: Any
) -> Array:
    """Return the residual stream [T, D] after the layer; T is whole sequences of `length`."""
    attend = decoder.dense_attend(config, x.shape[0] // length, length, "xla")
    turn = _of_batch(x, turn)
    return blocks.run_layer(config, layer, w, x, turn, attend, None, "xla")[0]


@functools.partial(jax.jit, static_argnames=("config", "layer", "length"))
def observe(
    config: ModelConfig, layer: LayerConfig, length: int, w: LayerParams, x: Array, turn: Any
) -> dict[str, Seen]:
    """Return what each input of the layer's matrices was, by the names of `recipe.readers`."""
    attend = decoder.dense_attend(config, x.shape[0] // length, length, "xla")
    turn = _of_batch(x, turn)
    with observing() as products:
        blocks.run_layer(config, layer, w, x, turn, attend, None, "xla")
    inputs = {id(weight): value for weight, value in products}
    return {
        name: _seen(inputs[id(getattr(w, matrices[0]))])
        for name, matrices in readers(config).items()
    }


def observe_all(
    config: ModelConfig,
    layer: LayerConfig,
    length: int,
    w: LayerParams,
    xs: list[Array],
    turn: Any,
) -> Mapping[str, Seen]:
    """Return the same over all batches."""
    total: dict[str, Seen] = {}
    for x in xs:
        for name, seen in observe(config, layer, length, w, x, turn).items():
            total[name] = add(total[name], seen) if name in total else seen
    return total
