"""The gated MLPs of a mixture of experts.

    y = sum over a token's k experts e, in their order, of
        weight_e * ((act(x @ gate_e.T) * (x @ up_e.T)) @ down_e.T)

Source: Shazeer et al. 2017, arXiv 1701.06538, with the gated MLP of arXiv 2002.05202.

The plain form sorts the T * k pairs of token and expert by expert and cuts each expert's rows into
blocks of one static size, as Gale et al. 2022, arXiv 2211.15841, do; a scan over blocks decodes the
weights of one expert at a time.  With r = T * k pairs, n = min(E, r) and blocks of c rows there are
at most (r + n (c - 1)) / c of them, and those that stay empty are skipped: at most r + n (c - 1)
rows are multiplied, not T * E.  (`jax.lax.ragged_dot`, on a CPU, multiplies T * E.)

On a GPU the sorted rows go through `infer.pallas.grouped_matmul`, which pads none and decodes
packed weights in registers.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Int32

from infer.native.repack import Packed
from infer.ops import choice
from infer.ops.activation import activate
from infer.ops.linear import only_native
from infer.quant.qarray import QArray, dequantize, expert_of

# Rows of a block: with more, a last block would be mostly padding.
_MOST_ROWS = 128


def expert_mlp(
    x: Float[Array, "T D"],
    expert_ids: Int32[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    gate: Array | QArray | Packed,
    up: Array | QArray | Packed,
    down: Array | QArray | Packed,
    *,
    activation: str,
    residual: Float[Array, "T D"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """Return the weighted sum of each token's experts (+ residual): products in x's dtype, all sums
    in float32, one cast to x's dtype.

    Args:
        x: activations.
        expert_ids: the experts of each token, 0 to E - 1, each at most once (`route`).  The id E is
            no expert: it adds nothing, whatever its weight, for tokens that are only padding.  A
            token with any other id gives NaN.
        expert_weights: what each expert's result is multiplied with, in float32.
        gate: [E, F, D], a float array, a QArray or packed for the CPU's native operations; the
            others are of the same kind, maybe of another format.
        up: [E, F, D].
        down: [E, D, F].
        activation: "silu", "gelu_tanh" or "gelu"; the last is not there for packed weights.
        residual: added after the sum.
        implementation: see `infer.ops.choice`.

    Raises:
        ValueError: shapes do not fit.
        NotImplementedError: the forced implementation cannot do this.
    """
    _check(x, expert_ids, expert_weights, gate, up, down, residual)
    weights = (gate, up, down)
    if any(isinstance(w, Packed) for w in weights):
        if not all(isinstance(w, Packed) for w in weights):
            raise ValueError(
                f"gate, up and down are {', '.join(type(w).__name__ for w in weights)}; pack all"
                " three or none"
            )
        only_native("expert_mlp", implementation)
        return _native(x, expert_ids, expert_weights, weights, activation, residual)
    if not expert_ids.size:
        return x if residual is None else residual
    xla = functools.partial(_xla, activation=activation)
    grouped = functools.partial(_grouped, activation=activation)
    return choice.choose(
        "expert_mlp",
        (x, expert_ids, expert_weights, weights, residual),
        xla=xla,
        kernels={
            "triton": choice.with_xla_gradient(grouped, xla),
            "interpret": functools.partial(grouped, interpret=True),
        },
        preferred=("triton",) if x.dtype.itemsize == 2 else (),
        implementation=implementation,
    )


def block_rows(num_pairs: int, num_experts: int) -> int:
    """Return how many rows the plain form multiplies at a time: twice an expert's mean share, so
    that few experts take a second block, which copies their weights again; a power of two from 2 to
    128.  (Measured beside once and four times the share, on two cores of an x86 server.)
    """
    share = -(-num_pairs // num_experts)
    return min(_MOST_ROWS, 2 << max(0, share - 1).bit_length())


def _xla(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    weights: tuple[Any, Any, Any],
    residual: Array | None,
    *,
    activation: str,
) -> Array:
    num_experts = weights[0].shape[0]
    ids, known = _known_ids(expert_ids, num_experts)
    token_BC, expert_B, slot_Tk = _blocks(ids, num_experts)

    def compute(block: tuple[Array, Array]) -> Array:
        tokens_C, expert = block
        rows_CD = x.at[tokens_C].get(mode="fill", fill_value=0)
        gate, up, down = (_expert(w, expert, x.dtype) for w in weights)
        g, u = _dot(rows_CD, gate).astype(x.dtype), _dot(rows_CD, up).astype(x.dtype)
        return _dot(activate(g, activation) * u, down)

    def step(_: None, block: tuple[Array, Array]) -> tuple[None, Array]:
        empty = lambda block: jnp.zeros((block[0].shape[0], x.shape[1]), jnp.float32)
        return None, lax.cond(block[1] < num_experts, compute, empty, block)

    _, y_BCD = lax.scan(step, None, (token_BC, expert_B))
    y_SD = y_BCD.reshape(-1, x.shape[1])
    return _weighted(y_SD, slot_Tk, ids, expert_weights, known, num_experts, x, residual)


def _grouped(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    weights: tuple[Any, Any, Any],
    residual: Array | None,
    *,
    activation: str,
    interpret: bool = False,
) -> Array:
    """Compute the same with all experts' products in two kernels, one for gate and up."""
    from infer.ops.matmul_sizes import grouped_sizes
    from infer.pallas.grouped_matmul import grouped_matmul

    gate, up, down = weights
    num_experts, k = gate.shape[0], expert_ids.shape[1]
    ids, known = _known_ids(expert_ids, num_experts)
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes_E = jnp.bincount(ids.reshape(-1), length=num_experts + 1)[:num_experts]
    rows_ND = x[order // k]
    h_NF = grouped_matmul(
        rows_ND,
        gate,
        sizes_E,
        up=up,
        activation=activation,
        blocks=grouped_sizes(rows_ND, gate, gated=True),
        interpret=interpret,
    )
    blocks = grouped_sizes(h_NF, down)
    y_ND = grouped_matmul(h_NF, down, sizes_E, blocks=blocks, interpret=interpret)
    slot_Tk = jnp.argsort(order).reshape(ids.shape)
    return _weighted(y_ND, slot_Tk, ids, expert_weights, known, num_experts, x, residual)


def _known_ids(expert_ids: Array, num_experts: int) -> tuple[Array, Array]:
    """Return the ids, E throughout where a token has one that does not exist, and whether not."""
    exists = (expert_ids >= 0) & (expert_ids <= num_experts)
    known = jnp.all(exists, axis=-1, keepdims=True)
    return jnp.where(known, expert_ids, num_experts), known


def _weighted(
    y_SD: Float[Array, "S D"],
    slot_Tk: Int[Array, "T k"],
    ids: Int[Array, "T k"],
    expert_weights: Array,
    known: Array,
    num_experts: int,
    x: Array,
    residual: Array | None,
) -> Array:
    """Return each token's sum over its experts' rows of y, in the order of `ids`.

    Rows of the id E need not be written: they may hold anything.
    """
    total = jnp.zeros(x.shape, jnp.float32)
    for j in range(ids.shape[1]):
        is_one = (ids[:, j] < num_experts)[:, None]
        y_TD = y_SD.at[slot_Tk[:, j]].get(mode="fill", fill_value=0)
        total += jnp.where(is_one, expert_weights[:, j, None].astype(jnp.float32) * y_TD, 0)
    total = jnp.where(known, total, jnp.nan)
    if residual is not None:
        total += residual.astype(jnp.float32)
    return total.astype(x.dtype)


def _blocks(ids: Int[Array, "T k"], num_experts: int) -> tuple[Array, Array, Array]:
    """Return the token of each row of each block (T where there is none), the expert of each block
    (E likewise), and the row of each pair, counted through all blocks (past their end for the id
    E).
    """
    num_tokens, k = ids.shape
    num_pairs = num_tokens * k
    rows = block_rows(num_pairs, num_experts)
    num_blocks = (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows
    pair_ids = ids.reshape(-1)
    order = jnp.argsort(pair_ids, stable=True)
    sorted_ids = pair_ids[order]
    counts_E = jnp.bincount(pair_ids, length=num_experts + 1)[:num_experts]
    last_block_E = jnp.cumsum(-(-counts_E // rows))
    first_row_E = rows * (last_block_E - -(-counts_E // rows))
    first_pair_E = jnp.cumsum(counts_E) - counts_E
    end = num_blocks * rows
    within = jnp.arange(num_pairs, dtype=jnp.int32) - first_pair_E.at[sorted_ids].get(mode="clip")
    slot = jnp.where(
        sorted_ids < num_experts, first_row_E.at[sorted_ids].get(mode="clip") + within, end
    )
    token_S = (
        jnp.full(end, num_tokens, jnp.int32)
        .at[slot]
        .set((order // k).astype(jnp.int32), mode="drop")
    )
    slot_Tk = jnp.full(num_pairs, end, jnp.int32).at[order].set(slot).reshape(num_tokens, k)
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    expert_B = jnp.searchsorted(last_block_E, blocks, side="right").astype(jnp.int32)
    return token_S.reshape(num_blocks, rows), expert_B, slot_Tk


def _expert(weight: Array | QArray, expert: Array, dtype: Any) -> Array:
    """Return the matrix [out, in] of one expert."""
    if isinstance(weight, QArray):
        return dequantize(expert_of(weight, expert), dtype)
    return lax.dynamic_index_in_dim(weight, expert, keepdims=False).astype(dtype)


def _dot(x: Float[Array, "C I"], w: Float[Array, "O I"]) -> Float[Array, "C O"]:
    return jnp.einsum(
        "ci,oi->co", x, w, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )


def _native(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    weights: tuple[Any, Any, Any],
    activation: str,
    residual: Array | None,
) -> Array:
    from infer.native.experts import expert_mlp as kernel

    residual = None if residual is None else residual.astype(jnp.float32)
    scales = expert_weights.astype(jnp.float32)
    y = kernel(x.astype(jnp.float32), expert_ids, scales, *weights, activation, residual)
    return y.astype(x.dtype)


def _check(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    gate: Any,
    up: Any,
    down: Any,
    residual: Array | None,
) -> None:
    num_tokens, width = x.shape
    if expert_ids.ndim != 2 or expert_ids.shape[0] != num_tokens or expert_ids.shape[1] < 1:
        raise ValueError(
            f"expert_ids is {expert_ids.shape}; with x {x.shape} it must be [{num_tokens}, k]"
        )
    if expert_weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_weights is {expert_weights.shape}; it must be as expert_ids, "
            f"{expert_ids.shape}"
        )
    fits = len(gate.shape) == 3 and gate.shape[2] == width and up.shape == gate.shape
    if not fits or tuple(down.shape) != (gate.shape[0], width, gate.shape[1]):
        raise ValueError(
            f"gate is {gate.shape}, up {up.shape} and down {down.shape}; with x {x.shape} they"
            f" must be [E, F, {width}], [E, F, {width}] and [E, {width}, F]"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual is {residual.shape}; it must be as x, {x.shape}")
