"""Bytes of two models, and the model that would be a fair baseline for the smaller one."""

from dataclasses import dataclass

import jax
import numpy as np

from infer.models.params import Params
from infer.native.repack import Packed
from infer.quant.qarray import QArray

# Models whose bytes differ by less are of the same footprint.
_EQUAL = 0.10


@dataclass(frozen=True)
class Footprint:
    """What a model's weights are: bytes as they lie in memory, and numbers."""

    num_bytes: int
    num_params: int


def footprint(params: Params) -> Footprint:
    """Return the footprint of all weights, scales and zero points in the bytes only."""
    is_weight = lambda x: isinstance(x, (QArray, Packed))
    weights = jax.tree.leaves(params, is_leaf=is_weight)
    return Footprint(
        num_bytes=sum(_bytes(x) for x in jax.tree.leaves(params)),
        num_params=sum(int(np.prod(x.shape)) for x in weights),
    )


def _bytes(array: jax.Array) -> int:
    # nbytes counts a 4-bit number as a byte.
    try:
        return array.on_device_size_in_bytes()
    except (AttributeError, NotImplementedError):
        return array.nbytes


def equal_memory(a: Footprint, b: Footprint) -> str | None:
    """Say which baseline of equal memory the smaller model should meet; None where both are of one
    footprint.
    """
    small, large = sorted((a, b), key=lambda x: x.num_bytes)
    if large.num_bytes <= (1 + _EQUAL) * small.num_bytes:
        return None
    return (
        f"the models take {_megabytes(a)} and {_megabytes(b)}: this asks what the smaller one "
        "loses. What its memory is worth is another question: compare it also with a bf16 model of "
        f"about {_number(small.num_bytes // 2)} parameters, which has the same bytes (it has "
        f"{_number(small.num_params)} itself)"
    )


def _megabytes(x: Footprint) -> str:
    return f"{x.num_bytes / 1e6:,.1f} MB"


def _number(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
