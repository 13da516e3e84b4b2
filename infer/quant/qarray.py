"""The quantised array: packed bytes, the numbers that scale them, and the law that decodes them.

Two layouts.  *blocks*: GGUF's own bytes, row by row, kept as they are in the file.  *planar*: codes, scales and zero
points in arrays of their own.  `dequantize` is the definition of a QArray's value; every fast path is tested against it.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from infer.pytree import Leaf, pytree_dataclass, static


@dataclass(frozen=True, kw_only=True)
class Format:
    """What the bytes of a QArray mean: hashable, a part of the program.

    `group` weights along the input axis share one block of `block_bytes` bytes; `bits` is the width of one code.
    """

    name: str
    bits: int
    group: int
    block_bytes: int
    layout: str = "blocks"

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight costs in memory, its share of scales and minima included."""
        return 8 * self.block_bytes / self.group


@pytree_dataclass
class QArray:
    """A weight [out, in] in packed form.

    `data` is uint8 [out, in / group * block_bytes].  `shape` has no leading axes: a stack of layers is a tuple of QArrays.
    """

    data: Leaf  # uint8 [out, row_bytes]
    scale: Leaf = None
    zero: Leaf = None
    global_scale: Leaf = None
    perm: Leaf = None
    format: Format = static(kw_only=True)
    shape: tuple[int, int] = static(kw_only=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, scales included."""
        parts = (self.data, self.scale, self.zero, self.global_scale, self.perm)
        return sum(p.nbytes for p in parts if p is not None)


def dequantize(q: QArray, dtype: jnp.dtype = jnp.float32) -> Float[Array, "O I"]:
    """Return the weight [out, in] that `q` stands for, computed in float32 and cast once to `dtype`."""
    raise ValueError(f"no decoder for {q.format.name}")


def take_rows(q, ids, dtype=jnp.float32):
    """Placeholder until the block codecs are merged."""
    raise ValueError
