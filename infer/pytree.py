"""Frozen dataclasses as pytrees."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

# What a field of a pytree may hold: an array, a tracer, a ShapeDtypeStruct, a sharding, None, or
# anything else that a `jax.tree.map` puts there.  Shapes stand in a comment beside the field;
# checks of arrays live in `create()` and `validate()`, never in `__post_init__`, which unflatten
# would call with such stand-ins.
Leaf = Any

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """Return a dataclass field that is part of the program (hashable metadata), not of the data."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def pytree_dataclass(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and register it with JAX; fields made by `static()` are
    metadata.
    """
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
