"""The weights of one kind of file as the tensors of another: which go where, read one at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from infer.errors import WeightFormatError
from infer.models.params import Params
from infer.weights.slots import Slot, slots_of, stored

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
BY_TYPE = {
    "F32": DTYPES["float32"],
    "BF16": DTYPES["bfloat16"],
    "F16": DTYPES["float16"],
}


@dataclass(frozen=True)
class Regrouped:
    """A tensor to be written: for each weight in it, its place there and the place it comes from.

    Attributes:
        name: of the tensor.
        shape: of the tensor.
        parts: (place in the new tensor, place in the old file) of each weight.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Slot, Slot], ...]

    @property
    def field(self) -> str:
        """What the first weight is in Params or LayerParams."""
        return self.parts[0][0].field

    @property
    def sources(self) -> set[str]:
        """Names of the tensors that it is made of."""
        return {old.tensor for _, old in self.parts}

    def build(self, read: Callable[[Slot], np.ndarray]) -> np.ndarray:
        """Return the tensor.

        Args:
            read: gives a weight of the old file, as the model uses it.
        """
        return stored([(new, read(old)) for new, old in self.parts])


class Held:
    """Lets go of the pages of the tensors read before.  What was made of them may be a view of the
    file, so they are held until it is written.
    """

    def __init__(self, release: Callable[[str], None]):
        self._release, self._names = release, set[str]()

    def swap(self, names: set[str]) -> None:
        """Release what is held, and hold `names`."""
        for name in self._names:
            self._release(name)
        self._names = names


def regroup(old: Params, new: Params) -> list[Regrouped]:
    """Return the tensors of the plan `new`, made of those of `old`, in the order of the model."""
    parts: dict[str, list[tuple[Slot, Slot]]] = {}
    for source, target in zip(slots_of(old), slots_of(new), strict=True):
        parts.setdefault(target.tensor, []).append((target, source))
    return [Regrouped(name, _shape(found), tuple(found)) for name, found in parts.items()]


def _shape(parts: list[tuple[Slot, Slot]]) -> tuple[int, ...]:
    first = parts[0][0]
    shape = (sum(new.shape[0] for new, _ in parts), *first.shape[1:])
    return shape[::-1] if first.transposed else shape


def common_dtype(type_names: set[str], packed: np.dtype) -> np.dtype:
    """Return the dtype that holds tensors of these types: their own where they have one, float32
    where they have several; other types than plain floats count as `packed`.
    """
    found = {BY_TYPE.get(name, packed) for name in type_names}
    return found.pop() if len(found) == 1 else DTYPES["float32"]


def cast(values: np.ndarray, dtype: np.dtype, name: str, where: str) -> np.ndarray:
    """Return a tensor's values in another dtype.

    Raises:
        WeightFormatError: one of them does not fit.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(dtype)
    if not np.array_equal(np.isfinite(result), np.isfinite(values)):
        raise WeightFormatError(
            f"{where}: tensor {name!r} has values that {dtype} cannot hold; use bfloat16 or float32"
        )
    return result
