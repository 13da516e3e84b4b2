"""Weights that are some rows of a tensor, or all of them in another order.  No JAX in here."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from infer.config import ModelConfig

Names = Mapping[str, "str | Part"]


@dataclass(frozen=True)
class Part:
    """How a weight lies in a tensor that is not simply the weight.

    Attributes:
        tensor: its name, with `{i}` for the layer.
        rows: configuration -> the rows that are this field's, in the field's order.  The parts of a
            tensor together have each of its rows once.  None: all rows as they are.
        transposed: the tensor is stored as [in, out]; rows are counted after turning it.
    """

    tensor: str
    rows: Callable[[ModelConfig], slice | np.ndarray] | None = None
    transposed: bool = False


def stacked(tensor: str, *fields: str, transposed: bool = False) -> dict[str, Part]:
    """Return the parts of a tensor that holds the rows of `fields`, one field after the other."""

    def rows(config: ModelConfig, index: int) -> slice:
        heights = [_height(config, field) for field in fields]
        start = sum(heights[:index])
        return slice(start, start + heights[index])

    return {
        field: Part(tensor, functools.partial(rows, index=i), transposed)
        for i, field in enumerate(fields)
    }


def by_head(tensor: str, *fields: str) -> dict[str, Part]:
    """Return the parts of a tensor that holds `fields` head by head: all fields of head 0, then of
    head 1.
    """

    def rows(config: ModelConfig, index: int) -> np.ndarray:
        shape = (config.num_heads, len(fields), config.head_dim)
        return np.arange(np.prod(shape)).reshape(shape)[:, index].reshape(-1)

    return {field: Part(tensor, functools.partial(rows, index=i)) for i, field in enumerate(fields)}


def adjacent_pairs(names: Names) -> dict[str, Part]:
    """Return q and k, weights and biases, of a layout that turns neighbours, (2i, 2i + 1): their
    rows in the order of half-split pairs, which is the one that the forward pass knows.

    Layers that turn nothing are reordered alike, which leaves q·k as it was.
    """

    def rows(config: ModelConfig, is_query: bool) -> np.ndarray:
        dims = [layer.rope.dim for layer in config.layers if layer.rope is not None]
        heads = config.num_heads if is_query else config.num_kv_heads
        return rope_row_order(heads, config.head_dim, dims[0] if dims else None)

    found = {}
    for field in ("q", "k", "q_bias", "k_bias"):
        name = names[field]
        assert isinstance(name, str), name
        found[field] = Part(name, functools.partial(rows, is_query=field.startswith("q")))
    return found


def rope_row_order(
    num_heads: int, head_dim: int, rotary_dim: int | None = None
) -> Int64[np.ndarray, " rows"]:
    """Return, for each row of a projection with half-split rotary pairs, the stored row to take.

    GGUF converters of the Llama family store the rows of q and k so that a rotary pair is two
    neighbours, (2i, 2i + 1), and so do GLM-4 and Cohere in transformers' layout; in the order that
    the forward pass knows a pair is (i, i + head_dim / 2).  For each head

        row  j * head_dim / 2 + i  is the stored row  2i + j,    j = 0, 1

    so a head of 8 takes the rows 0, 2, 4, 6, 1, 3, 5, 7.  This holds for weights, packed or not,
    and for biases.  Where only the first `rotary_dim` dimensions of a head turn, the others stay
    where they are.

    Args:
        num_heads: Heads of this projection: the query heads for q, the key/value heads for k.
        head_dim: Width of a head.
        rotary_dim: How many of its dimensions turn, an even number; None: all.

    Raises:
        ValueError: There are no heads, or the number of dimensions that turn is odd.
    """
    turned = head_dim if rotary_dim is None else rotary_dim
    if num_heads < 1 or turned < 2 or turned % 2 or turned > head_dim:
        raise ValueError(
            f"{num_heads} heads of width {turned} have no rotary pairs; give at least one head of"
            " an even width"
        )
    rows = np.arange(num_heads * head_dim, dtype=np.int64).reshape(num_heads, head_dim)
    pairs = rows[:, :turned].reshape(num_heads, turned // 2, 2).swapaxes(1, 2)
    return np.concatenate([pairs.reshape(num_heads, turned), rows[:, turned:]], axis=1).reshape(-1)


def _height(config: ModelConfig, field: str) -> int:
    name = field.removesuffix("_bias")
    if name == "q":
        return config.num_heads * config.head_dim
    if name in ("k", "v"):
        return config.num_kv_heads * config.head_dim
    assert name in ("gate", "up"), field
    return config.intermediate_size
