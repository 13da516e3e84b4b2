"""A float weight whose product rounds its input, with a gradient: what rotations are learned by."""

import jax
from jax import Array
from jaxtyping import Float

from infer.ops.quantized import round_activations, turned
from infer.pytree import Leaf, pytree_dataclass, static


@pytree_dataclass
class RoundedInput:
    """A weight [out, in] of turned inputs, and how its product turns and rounds them."""

    weight: Leaf  # float [out, in]
    activations: str = static(kw_only=True)  # as of PlanarFormat
    rotated: int = static(kw_only=True, default=0)  # likewise

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        return self.weight.shape

    def rounded(self, x: Float[Array, "*B I"]) -> Float[Array, "*B I"]:
        """Return the input turned and rounded; the gradient is that of the input turned."""
        rows = turned(x.reshape(-1, x.shape[-1]), self.rotated)
        if self.activations:
            rows = straight_through(rows, round_activations(rows, self.activations))
        return rows.reshape(x.shape)


def straight_through(x: Float[Array, "*A"], rounded: Float[Array, "*A"]) -> Float[Array, "*A"]:
    """Return `rounded` with the gradient of x: Bengio et al. 2013, arXiv 1308.3432."""
    return x + jax.lax.stop_gradient(rounded - x)
