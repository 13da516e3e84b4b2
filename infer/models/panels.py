"""A model's packed weights in the order in which the CPU's native operations read them."""

import dataclasses
from typing import Any

from infer import native
from infer.models.params import Params
from infer.native.repack import repack as repack_weight
from infer.quant.qarray import QArray


def repack(params: Params, floats: bool = False) -> Params:
    """Return `params` with every QArray that has a native kernel repacked for the CPU.

    The same codes and scales, so that what is computed differs only by what the operations do to
    activations (docs/cpu.md).  Weights without a kernel, and floats, stay as they are.  Repacked
    weights are not decoded again: quantise, convert or save before this.

    Args:
        params: weights, known on the host.
        floats: repack float matrices too.

    Raises:
        NotImplementedError: the native operations cannot be used here.
    """
    native.library()
    change = lambda weight: _repacked(weight, floats)
    layer = lambda w: dataclasses.replace(
        w, **{f.name: change(getattr(w, f.name)) for f in dataclasses.fields(w)}
    )
    return dataclasses.replace(
        params,
        embed=change(params.embed),
        lm_head=change(params.lm_head),
        layers=tuple(layer(w) for w in params.layers),
    )


def _repacked(weight: Any, floats: bool) -> Any:
    if not isinstance(weight, QArray) and not (floats and getattr(weight, "ndim", 0) == 2):
        return weight
    try:
        return repack_weight(weight)
    except NotImplementedError:
        return weight
