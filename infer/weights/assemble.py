"""From the tensors of a file to `Params`, by a family's Layout: which tensors a model needs, and
which rows of them, in which order, make a leaf.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from infer.config import ModelConfig
from infer.models.family import Layout
from infer.models.params import LayerParams, Params, expected_shapes
from infer.weights.gguf import rope_row_order

_HEADED = ("q", "k", "q_bias", "k_bias")
_NORMS = ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "q_norm", "k_norm")
_GLOBALS = ("embed", "final_norm", "lm_head", "positions", "final_norm_bias")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a leaf of Params comes from.

    `shape` is the leaf's; `stored` that of the tensor in the file.  The leaf is the tensor,
    transposed first where `transposed`, its rows taken in the order `rows` (None: all as they
    are), plus `offset`.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    rows: Int64[np.ndarray, " rows"] | None = None
    transposed: bool = False
    offset: float = 0.0


def slots(layout: Layout, config: ModelConfig) -> Params:
    """Return a Params whose leaves are the Slots of what `config` asks for.

    A leaf that the layout has no name for is left out; `validate` of the loaded Params would list
    it, so a family whose layout lacks a name cannot load quietly.
    """
    shapes = expected_shapes(config)
    layers = []
    for i, shape in enumerate(shapes.layers):
        fields: dict[str, Any] = {f.name: None for f in dataclasses.fields(LayerParams)}
        for name in fields:
            if getattr(shape, name) is not None and name in layout.layer_names:
                fields[name] = _layer_slot(layout, config, shape, i, name)
        layers.append(LayerParams(**fields))
    globals_ = {
        name: Slot(
            name=layout.global_names[name],
            shape=shape,
            stored=shape,
            offset=layout.norm_offset if name == "final_norm" else 0.0,
        )
        for name in _GLOBALS
        if (shape := getattr(shapes, name)) is not None and name in layout.global_names
    }
    return Params(**globals_, layers=tuple(layers), config=config)


def _layer_slot(
    layout: Layout, config: ModelConfig, shapes: LayerParams, index: int, field: str
) -> Slot:
    pattern, shape = layout.layer_names[field], getattr(shapes, field)
    rows, num_rows = None, shape[0]
    together = [f for f in layout.fused.get(pattern, ()) if getattr(shapes, f) is not None]
    if len(together) > 1:
        heights = [getattr(shapes, f)[0] for f in together]
        which, num_rows = together.index(field), sum(heights)
        if layout.by_head:
            by_head = np.arange(num_rows).reshape(config.num_heads, len(together), -1)
            rows = by_head[:, which].reshape(-1)
        else:
            rows = np.arange(sum(heights[:which]), sum(heights[: which + 1]))
    rope = config.layers[index].rope
    if layout.adjacent_pairs and field in _HEADED and rope is not None:
        heads = config.num_heads if field.startswith("q") else config.num_kv_heads
        order = rope_row_order(heads, config.head_dim, rope.dim)
        rows = order if rows is None else rows[order]
    stored = (num_rows, *shape[1:])
    transposed = field in layout.transposed
    return Slot(
        name=pattern.format(i=index),
        shape=shape,
        stored=stored[::-1] if transposed else stored,
        rows=rows,
        transposed=transposed,
        offset=layout.norm_offset if field in _NORMS else 0.0,
    )


def each_slot(wanted: Params) -> Iterator[Slot]:
    """Yield the slots of all leaves, those of one layer together."""
    for name in _GLOBALS:
        if (slot := getattr(wanted, name)) is not None:
            yield slot
    for layer in wanted.layers:
        for f in dataclasses.fields(LayerParams):
            if (slot := getattr(layer, f.name)) is not None:
                yield slot


def stored_shapes(wanted: Params) -> dict[str, tuple[int, ...]]:
    """Return {tensor name: its shape in the file} of everything the model needs."""
    return {slot.name: slot.stored for slot in each_slot(wanted)}


def canonical_names(layout: Layout, names: Iterable[str]) -> dict[str, str]:
    """Return {name as the layout spells it: name in the file}, without what may be ignored."""
    found = {}
    for name in names:
        spelled = name
        for pattern, replacement in layout.renamed:
            spelled = re.sub(pattern, replacement, spelled)
        if not any(re.fullmatch(pattern, spelled) for pattern in layout.ignored):
            found[spelled] = name
    return found


def placed(slot: Slot, values: np.ndarray) -> np.ndarray:
    """Return the leaf of a slot from its tensor's values, float32 where there is an offset."""
    if slot.transposed:
        values = values.T
    if slot.rows is not None:
        values = values[slot.rows]
    return values.astype(np.float32) + np.float32(slot.offset) if slot.offset else values


def assemble(wanted: Params, read: Callable[[Slot], Any]) -> Params:
    """Return Params whose leaves are what `read` makes of the slots."""
    make = lambda slot: None if slot is None else read(slot)
    layers = tuple(
        LayerParams(**{f.name: make(getattr(layer, f.name)) for f in dataclasses.fields(layer)})
        for layer in wanted.layers
    )
    globals_ = {name: make(getattr(wanted, name)) for name in _GLOBALS}
    return Params(**globals_, layers=layers, config=wanted.config)
