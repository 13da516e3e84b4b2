"""Products of sorted tokens with the weights of their experts, decoded in registers.
Pallas-Triton.

    y[n] = x[n] @ dequantize(w[e]).T            n among the rows of expert e
    y[n] = act(x[n] @ gate[e].T) * (x[n] @ up[e].T)

Rows are sorted by expert; `group_sizes[e]` of them belong to expert e, maybe none.  A program owns
a tile of one expert's rows: ceil(N / block_rows) + E tiles are launched, what is left over does
nothing, and no row is copied or padded (Gale et al. 2022, arXiv 2211.15841).

Grid (out / block_out, tiles).
Bytes: each used expert's packed weight once for each `block_rows` of its rows.  FLOPs: 2 N O I, and
twice that with a gate.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Int

from infer.pallas.gated_activation import ACTIVATIONS, act
from infer.pallas.triton_call import check_launch, load, store, triton_call
from infer.pallas.weight_parts import FORMATS, Plan, Tile, describe, plan, plan_of_floats
from infer.quant.formats import PlanarFormat
from infer.quant.qarray import QArray, dequantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmulBlocks:
    """Tile of the output, warps and stages."""

    block_out: int = 64
    block_rows: int = 16
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        """Check what Triton asks for."""
        for name in ("block_out", "block_rows"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} is {size}; use a power of two, 16 or more")
        check_launch(self.num_warps, self.num_stages)

    @classmethod
    def for_shape(cls, rows: int, experts: int, gated: bool) -> "GroupedMatmulBlocks":
        """Return the sizes for `rows` in all, by an expert's mean share; a gate doubles the sums
        that a program holds.
        """
        return cls(block_rows=16 if rows <= 32 * experts else 64, block_out=32 if gated else 64)


def _kernel(
    *refs: Any,
    names: tuple[tuple[str, ...], ...],
    plans: tuple[Plan, ...],
    shape: tuple[int, int, int],
    activation: str | None,
    blocks: GroupedMatmulBlocks,
) -> None:
    # inputs                                                              outputs
    # [N, I]  [G]         [G]        [G]      and the weights' parts      [N, O]
    x_ref, expert_ref, first_ref, end_ref, *weight_refs, y_ref = refs
    _, out, width = shape
    g = pl.program_id(1)
    first, end = load(first_ref, g), load(end_ref, g)
    expert = load(expert_ref, g)
    t = first + jnp.arange(blocks.block_rows, dtype=jnp.int32)
    o = pl.program_id(0) * blocks.block_out + jnp.arange(blocks.block_out, dtype=jnp.int32)
    # Rows past an expert's own must not be the next one's: they are sent past the last.
    rows = jnp.where(o < out, expert * out + o, shape[0] * out)
    tiles, at = [], 0
    for mine in names:
        refs_of = dict(zip(mine, weight_refs[at : at + len(mine)], strict=True))
        tiles.append(Tile(refs_of, rows, (shape[0] * out, width)))
        at += len(mine)
    inside = t < end

    def step(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        new = []
        for steps, tile, total in zip(plans, tiles, totals, strict=True):
            for part in steps.parts(tile, i):
                mask = inside[None, :] & (part.columns < width)[:, None]
                x = load(x_ref, t[None, :], part.columns[:, None], mask=mask, other=0.0)
                sums = triton.dot(part.codes.astype(x.dtype), x, allow_tf32=False)
                total = total + (sums if part.scale is None else sums * part.scale[:, None])
                if part.minus is not None:
                    xs = jnp.sum(x.astype(jnp.float32), axis=0)
                    total = total - part.minus[:, None] * xs[None, :]
            new.append(total)
        return tuple(new)

    def whole(tile: Tile, total: Array) -> Array:
        if "global" not in tile.refs:
            return total
        return total * load(tile.refs["global"], expert)

    zeros = jnp.zeros((blocks.block_out, blocks.block_rows), jnp.float32)
    # No steps for a tile without rows.
    num_steps = jnp.where(first < end, jnp.int32(plans[0].num_steps), jnp.int32(0))
    totals = lax.fori_loop(jnp.int32(0), num_steps, step, (zeros,) * len(plans))
    totals = tuple(whole(tile, total) for tile, total in zip(tiles, totals, strict=True))
    if activation is None:
        y = totals[0]
    else:
        gate, up = (total.astype(x_ref.dtype) for total in totals)
        y = (act(gate.astype(jnp.float32), activation).astype(up.dtype) * up).astype(jnp.float32)
    mask = (o < out)[:, None] & inside[None, :]
    store(y_ref, t[None, :], o[:, None], value=y.astype(y_ref.dtype), mask=mask)


def grouped_matmul(
    x: Float[Array, "N I"],
    weight: Float[Array, "E O I"] | QArray,
    group_sizes: Int[Array, " E"],
    *,
    up: Float[Array, "E O I"] | QArray | None = None,
    activation: str | None = None,
    blocks: GroupedMatmulBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "N O"]:
    """Return each row's product with its expert's weight: in float32, or with `up` the gated
    product act(x @ weight.T) * (x @ up.T) in x's dtype.

    Args:
        x: rows sorted by expert; those past the groups' end are not written.
        weight: of E experts, floats, one of GGUF's formats, or planar of 4 and 8 bits (integers,
            FP8, MXFP4, NVFP4); with `up` the gate's.
        group_sizes: rows of each expert, their sum at most N.
        up: the other projection, of the same shape.
        activation: "silu" or "gelu_tanh", with `up`.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: the arrays do not belong together.
        NotImplementedError: a format, dtype or activation that has no kernel.
    """
    weights = (weight,) if up is None else (weight, up)
    (num_rows, width), experts = x.shape, group_sizes.shape[0]
    shape: Any = tuple(weight.shape)
    for w in weights:
        if len(shape) != 3 or tuple(w.shape) != shape or shape[0] != experts or shape[2] != width:
            raise ValueError(
                f"x is {x.shape}, the weight {tuple(w.shape)}, group_sizes ({experts},); weights"
                f" must be ({experts}, O, {width}), all alike"
            )
    if (activation is None) != (up is None):
        raise ValueError(
            f"activation is {activation!r} and up {'missing' if up is None else 'there'}"
            "; pass both or neither"
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise NotImplementedError(
            f"grouped_matmul in Triton: {activation!r} with weights {shape} of x {x.dtype}; there"
            f" are {', '.join(ACTIVATIONS)}"
        )
    blocks = blocks or GroupedMatmulBlocks.for_shape(num_rows, experts, up is not None)
    plans = tuple(_plan(w, x) for w in weights)
    if len({p.num_steps for p in plans}) > 1:
        names = (describe(w.format) if isinstance(w, QArray) else str(w.dtype) for w in weights)
        raise NotImplementedError(
            f"grouped_matmul in Triton: gate and up of shape {shape} are walked in steps of other"
            f" widths ({' and '.join(names)}); give them one format"
        )
    expert, first, end = _tiles(group_sizes, num_rows, blocks.block_rows)
    return triton_call(
        functools.partial(
            _kernel,
            names=tuple(tuple(p.operands) for p in plans),
            plans=plans,
            shape=shape,
            activation=activation,
            blocks=blocks,
        ),
        x,
        expert,
        first,
        end,
        *(operand for p in plans for operand in p.operands.values()),
        name="grouped_matmul",
        grid=(-(-shape[1] // blocks.block_out), expert.shape[0]),
        out_shape=jax.ShapeDtypeStruct(
            (num_rows, shape[1]), jnp.float32 if activation is None else x.dtype
        ),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
    )


def _plan(weight: Any, x: Array) -> Plan:
    """Return the plan of all experts' rows, one under the other."""
    experts, out, width = weight.shape
    where = f"grouped_matmul in Triton: {(experts, out, width)}"
    if str(x.dtype) not in ("bfloat16", "float16", "float32"):
        raise NotImplementedError(f"{where} with x of {x.dtype}; it takes floats of 16 and 32 bits")
    if not isinstance(weight, QArray):
        return plan_of_floats(weight.reshape(experts * out, width))
    found = plan(_one_under_the_other(weight))
    if found is None:
        raise NotImplementedError(
            f"{where} of {describe(weight.format)} is not decoded there; it takes floats,"
            f" {', '.join(FORMATS)}, and planar weights of 4 and 8 bits"
        )
    if weight.global_scale is None:
        return found
    operands = {**found.operands, "global": weight.global_scale}
    return dataclasses.replace(found, operands=operands, global_scale=None)


def _one_under_the_other(weight: QArray) -> QArray:
    """Return experts' weights as one matrix [E O, I]; a scale for rows that no expert's rows are
    whole runs of, or for the inputs' order, is not decoded here.
    """
    experts, out, width = weight.shape
    format, flat = weight.format, lambda x: None if x is None else x.reshape(-1, x.shape[-1])
    if isinstance(format, PlanarFormat):
        span = format.rows or out
        if out % span:
            raise NotImplementedError(
                f"grouped_matmul in Triton: {weight.shape} of {describe(format)} has scales for"
                f" {span} rows, which do not divide an expert's {out}"
            )
        format = dataclasses.replace(format, rows=span)
        parts = {"scale": flat(weight.scale), "zero": flat(weight.zero), "global_scale": None}
        weight = dataclasses.replace(weight, format=format, **parts)
    return dataclasses.replace(weight, data=flat(weight.data), shape=(experts * out, width))


def _tiles(group_sizes: Array, num_rows: int, block_rows: int) -> tuple[Array, Array, Array]:
    """Return expert, first row and end of each tile, int32 [G]; a tile that is not used has no
    rows.
    """
    experts = group_sizes.shape[0]
    num_tiles = -(-num_rows // block_rows) + experts
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    last_tile = jnp.cumsum(-(-sizes // block_rows), dtype=jnp.int32)
    g = jnp.arange(num_tiles, dtype=jnp.int32)
    expert = jnp.searchsorted(last_tile, g, side="right").astype(jnp.int32)
    used = expert < experts
    expert = jnp.minimum(expert, experts - 1)
    first_tile = last_tile[expert] - -(-sizes[expert] // block_rows)
    first = ends[expert] - sizes[expert] + (g - first_tile) * block_rows
    end = jnp.minimum(ends[expert], num_rows)
    return expert, jnp.where(used, first, 0), jnp.where(used, end, 0)


def grouped_matmul_reference(
    x: Array, weight: Any, group_sizes: Array, up: Any = None, activation: str | None = None
) -> Array:
    """Compute the same an expert at a time, rows past the groups' end 0."""
    wide = lambda w: dequantize(w) if isinstance(w, QArray) else w.astype(jnp.float32)
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])
    expert = jnp.searchsorted(ends, row, side="right")
    dot = lambda w: jnp.stack(
        [
            jnp.einsum("ni,oi->no", x.astype(jnp.float32), one, precision=lax.Precision.HIGHEST)
            for one in wide(w)
        ]
    )
    product = lambda w: dot(w).at[expert, row].get(mode="fill", fill_value=0)
    if activation is None:
        return product(weight)
    gate, value = (product(w).astype(x.dtype) for w in (weight, up))
    return act(gate.astype(jnp.float32), activation).astype(x.dtype) * value
