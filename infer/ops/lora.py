"""Low-rank adapters of a weight, one of many for each row of a batch.

    y[t] = y[t] + scale[id] (x[t] @ a[id].T) @ b[id].T

Products are taken in x's dtype, between the two as well; sums are float32, with one cast to y's
dtype.

The plain form gathers the rows' adapters where there are no more rows than adapters: what it copies
is never more than all of them.  With more rows (prefill) it copies none: it goes over the adapters,
passes by those that no row has, and keeps each row's own result.  That multiplies every row with
each adapter in use, which are few in a prefill.

On a GPU up to 64 rows go through `infer.pallas.lora`, which reads each row's adapter where it lies.

Source: Hu et al. 2021, arXiv 2106.09685; many adapters in one batch: Chen et al. 2023,
arXiv 2310.18547 (Punica).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Int

from infer.ops import choice
from infer.pytree import Leaf, pytree_dataclass

# Rows up to which each reads its adapter for itself.
_MOST_ROWS = 64


@pytree_dataclass
class LoraAdapters:
    """N adapters of one weight [out, in], stacked; adapter n adds scale[n] b[n] @ a[n] to it."""

    a: Leaf  # [N, r, I]
    b: Leaf  # [N, O, r]
    scale: Leaf  # float32 [N]

    @classmethod
    def create(
        cls,
        pairs: Sequence[tuple[ArrayLike, ArrayLike]],
        scales: Sequence[float],
        dtype: DTypeLike | None = None,
    ) -> "LoraAdapters":
        """Stack adapters of one weight; those of a lower rank than the largest are filled up with
        zeros, which add nothing.

        Args:
            pairs: of each adapter a [r, I] and b [O, r], as checkpoints have lora_A and lora_B.
            scales: what each is multiplied with: alpha / r, or alpha / sqrt(r) where the adapter
                says rslora.
            dtype: of the stacks; None is the first adapter's.

        Raises:
            ValueError: no adapters, or one that does not fit the others.
        """
        if not pairs or len(pairs) != len(scales):
            raise ValueError(
                f"there are {len(pairs)} adapters and {len(scales)} scales; give one scale for each"
                " of one or more adapters"
            )
        arrays = [(jnp.asarray(a), jnp.asarray(b)) for a, b in pairs]
        width, out = arrays[0][0].shape[-1:], arrays[0][1].shape[:1]
        for n, (a, b) in enumerate(arrays):
            fits = a.ndim == 2 and b.ndim == 2 and a.shape[0] == b.shape[1] and a.shape[0]
            if not fits or a.shape[1:] != width or b.shape[:1] != out:
                raise ValueError(
                    f"adapter {n} has a {a.shape} and b {b.shape}; they must be [r, I] and [O, r],"
                    f" I and O those of the first, {width} and {out}"
                )
        dtype = arrays[0][0].dtype if dtype is None else dtype
        rank = max(a.shape[0] for a, _ in arrays)
        pad = lambda m, axis: jnp.pad(
            m.astype(dtype), [(0, (rank - m.shape[axis]) * (axis == k)) for k in (0, 1)]
        )
        return cls(
            a=jnp.stack([pad(a, 0) for a, _ in arrays]),
            b=jnp.stack([pad(b, 1) for _, b in arrays]),
            scale=jnp.asarray(scales, jnp.float32),
        )


def lora(
    y: Float[Array, "T O"],
    x: Float[Array, "T I"],
    adapters: LoraAdapters,
    ids: Int[Array, " T"],
    implementation: str | None = None,
) -> Float[Array, "T O"]:
    """Return y with each row's adapter of x added, in y's dtype.

    Args:
        y: the product with the weight itself.
        x: what that product read.
        adapters: of the weight.
        ids: each row's adapter, 0 to N - 1.  -1 is none: the row stays as it is, to the bit.  A row
            with any other id becomes NaN.
        implementation: see `infer.ops.choice`.

    Raises:
        ValueError: shapes do not fit.
        NotImplementedError: the forced implementation cannot do this.
    """
    a, b, scale = adapters.a, adapters.b, adapters.scale
    num_adapters, rank = a.shape[:2]
    want = (num_adapters, rank, x.shape[1]), (num_adapters, y.shape[1], rank), (num_adapters,)
    if (a.shape, b.shape, scale.shape) != want:
        raise ValueError(
            f"the adapters have a {a.shape}, b {b.shape} and scale {scale.shape}; with x {x.shape}"
            f" and y {y.shape} they must be {want[0]}, {want[1]} and {want[2]}"
        )
    if y.shape[0] != x.shape[0] or ids.shape != x.shape[:1]:
        raise ValueError(
            f"x is {x.shape}, y {y.shape} and ids {ids.shape}; they must have one row for each"
            " token"
        )
    if not x.shape[0]:
        return y
    return choice.choose(
        "lora",
        (y, x, adapters, ids),
        xla=_xla,
        kernels={
            "triton": choice.with_xla_gradient(_triton, _xla),
            "interpret": functools.partial(_triton, interpret=True),
        },
        preferred=("triton",) if x.shape[0] <= _MOST_ROWS else (),
        implementation=implementation,
    )


def _triton(
    y: Array, x: Array, adapters: LoraAdapters, ids: Array, interpret: bool = False
) -> Array:
    from infer.pallas.lora import lora as kernel

    return kernel(y, x, adapters.a, adapters.b, adapters.scale, ids, interpret=interpret)


def _xla(y: Array, x: Array, adapters: LoraAdapters, ids: Array) -> Array:
    num_adapters = adapters.a.shape[0]
    there = (ids >= 0) & (ids < num_adapters)
    form = _of_rows if x.shape[0] <= num_adapters else _of_adapters
    total = y.astype(jnp.float32) + form(x, adapters, ids, there)
    known = there | (ids == -1)
    return jnp.where(known[:, None], total, jnp.nan).astype(y.dtype)


def _of_rows(
    x: Float[Array, "T I"], adapters: LoraAdapters, ids: Array, there: Array
) -> Float[Array, "T O"]:
    """Return what is added, from copies of each row's adapter."""
    own = lambda stack: stack.at[jnp.where(there, ids, 0)].get(mode="clip")
    h_TR = _dot("ti,tri->tr", x, own(adapters.a))
    delta_TO = _dot("tr,tor->to", h_TR.astype(x.dtype), own(adapters.b))
    return jnp.where(there[:, None], own(adapters.scale)[:, None] * delta_TO, 0)


def _of_adapters(
    x: Float[Array, "T I"], adapters: LoraAdapters, ids: Array, there: Array
) -> Float[Array, "T O"]:
    """Return what is added, one adapter after the other for all rows."""

    def step(delta_TO: Array, one: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        number, a, b, scale = one
        mine = ids == number

        def add(delta_TO: Array) -> Array:
            h_TR = _dot("ti,ri->tr", x, a)
            new_TO = scale * _dot("tr,or->to", h_TR.astype(x.dtype), b)
            return jnp.where(mine[:, None], new_TO, delta_TO)

        return lax.cond(mine.any(), add, lambda delta_TO: delta_TO, delta_TO), None

    num_adapters, out, _ = adapters.b.shape
    numbers = jnp.arange(num_adapters, dtype=ids.dtype)
    zeros = jnp.zeros((x.shape[0], out), jnp.float32)
    stacks: Any = (numbers, adapters.a, adapters.b, adapters.scale)
    return lax.scan(step, zeros, stacks)[0]


def _dot(equation: str, x: Array, w: Array) -> Array:
    return jnp.einsum(
        equation,
        x,
        w.astype(x.dtype),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
