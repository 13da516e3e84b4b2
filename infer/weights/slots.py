"""Where each weight of a model comes from, and whether a file has what is wanted.

A `Slot` stands in the place of a weight in `Params`: the tensor that holds it, its shape, the rows
of the tensor that are its own.  Readers of every kind of file share the check: all tensors that
are missing, stray, misshapen or of a kind that is not read are listed in one error.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from infer.config import ModelConfig
from infer.errors import ConfigError
from infer.models.params import LayerParams, Params, expected_shapes
from infer.models.rows import Names, Part
from infer.weights.shards import listed

# Called with (bytes done, bytes in all) as tensors are read.
Progress = Callable[[int, int], None]


@runtime_checkable
class TensorSource(Protocol):
    """What every kind of tensor file offers; `tensors` have a shape, a type_name and nbytes."""

    @property
    def path(self) -> str: ...  # noqa: D102
    @property
    def tensors(self) -> Mapping[str, Any]: ...  # noqa: D102


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one weight comes from.

    Attributes:
        field: what it is in Params or LayerParams.
        tensor: the tensor's name.
        shape: of the weight.
        rows: the tensor's rows in the order of the weight; None: all, as they are.
        transposed: the tensor is [in, out]; `shape` and `rows` are of the weight, [out, in].
    """

    field: str
    tensor: str
    shape: tuple[int, ...]
    rows: slice | np.ndarray | None = None
    transposed: bool = False

    def taken(self, values: np.ndarray) -> np.ndarray:
        """Return the weight, given the tensor."""
        values = values.T if self.transposed else values
        return values if self.rows is None else values[self.rows]


def stored(parts: Sequence[tuple[Slot, np.ndarray]]) -> np.ndarray:
    """Return the tensor that holds these weights, the inverse of `Slot.taken`.

    Args:
        parts: All slots of one tensor, each with its weight.
    """
    first, values = parts[0]
    if len(parts) > 1 or first.rows is not None:
        height = sum(slot.shape[0] for slot, _ in parts)
        values = np.empty((height, *first.shape[1:]), values.dtype)
        for slot, part in parts:
            values[slot.rows] = part
    return values.T if first.transposed else values


def plan(
    config: ModelConfig,
    layer_names: Names,
    global_names: Names,
) -> Params:
    """Return a Params of slots for everything that `config` asks for.

    Raises:
        ConfigError: it asks for a weight that has no name in this kind of file.
    """
    shapes = expected_shapes(config)

    def slot(field: str, shape: tuple[int, ...] | None, names: Mapping[str, Any], i: int) -> Any:
        if shape is None:
            return None
        name = names.get(field)
        if name is None:
            raise ConfigError(f"{config.family} has no tensor for {field} in this kind of file")
        part = name if isinstance(name, Part) else Part(name)
        return Slot(
            field=field,
            tensor=part.tensor.format(i=i),
            shape=shape,
            rows=None if part.rows is None else part.rows(config),
            transposed=part.transposed,
        )

    layers = tuple(
        LayerParams(
            **{
                f.name: slot(f.name, getattr(shape, f.name), layer_names, i)
                for f in dataclasses.fields(LayerParams)
            }
        )
        for i, shape in enumerate(shapes.layers)
    )
    rest = {
        f.name: slot(f.name, getattr(shapes, f.name), global_names, 0)
        for f in dataclasses.fields(Params)
        if f.name not in ("layers", "config")
    }
    return Params(**rest, layers=layers, config=config)


def slots_of(plan: Params) -> list[Slot]:
    """Return the slots of a plan."""
    return jax.tree.leaves(plan)


def wanted_shapes(plan: Params) -> dict[str, tuple[int, ...]]:
    """Return {tensor name: shape} of everything a plan reads; parts of a tensor lie row on row."""
    wanted: dict[str, tuple[int, ...]] = {}
    turned = set()
    for slot in slots_of(plan):
        before = wanted.get(slot.tensor)
        rows = 0 if before is None else before[0]
        wanted[slot.tensor] = (rows + slot.shape[0], *slot.shape[1:])
        if slot.transposed:
            turned.add(slot.tensor)
    return {name: shape[::-1] if name in turned else shape for name, shape in wanted.items()}


def check_tensors(
    source: TensorSource,
    plan: Params,
    reads: Callable[[str], bool],
    *,
    ignored: Callable[[str], bool] = lambda name: False,
    problems: tuple[str, ...] = (),
) -> None:
    """Hold the tensors of a file against a plan.

    Args:
        source: the file.
        plan: a Params of slots.
        reads: whether a type of tensor, by its name, can be read as a weight.
        ignored: whether a tensor that nothing wants may be there.
        problems: what was found before, to stand in the same error.

    Raises:
        WeightFormatError: they do not fit; every problem is listed.
    """
    wanted = wanted_shapes(plan)
    found = list(problems)
    for name, shape in wanted.items():
        info = source.tensors.get(name)
        if info is None:
            found.append(f"{name} is missing")
        elif tuple(info.shape) != shape:
            found.append(f"{name} is {list(info.shape)}, must be {list(shape)}")
        elif not reads(info.type_name):
            found.append(f"{name} is {info.type_name}, which this version does not read")
    found += [
        f"{_printable(name)} has no place in a {plan.config.family} model"
        for name in source.tensors
        if name not in wanted and not ignored(name)
    ]
    if found:
        raise listed(source.path, found)


def read_plan(
    source: TensorSource, plan: Params, read: Callable[[Slot], Any], progress: Progress | None
) -> Params:
    """Return the weights of a plan, read one after the other."""
    wanted = wanted_shapes(plan)
    total = sum(source.tensors[name].nbytes for name in wanted)
    done = 0.0

    def leaf(slot: Slot) -> Any:
        nonlocal done
        value = read(slot)
        share = math.prod(slot.shape) / max(math.prod(wanted[slot.tensor]), 1)
        done += source.tensors[slot.tensor].nbytes * share
        if progress is not None:
            progress(round(done), total)
        return value

    return jax.tree.map(leaf, plan)


def _printable(name: str) -> str:
    return name if name.isprintable() and len(name) <= 200 else repr(name[:200])
