"""Grammar mask, banned ids, logit bias and the three penalties in one pass.  Pallas-Triton.

    x -> -inf where the mask has no bit, or the id is banned
    x -> x + bias
    repetition r, on tokens of the prompt and generated ones: x / r where x > 0, else x r
    frequency f, presence p, on generated ones: x - f count - p [count > 0]

Source: Keskar et al. 2019, arXiv 1909.05858, section 4.1, with the sign rule of transformers; the
OpenAI API reference.  The order is infer.sampling.process's.

Grid (B, V / block).  A program owns `block` logits of a row; it reads the row's few ids and biases
one by one.
Bytes: 2 V floats a row, V / 8 for the mask, 4 V more where there are penalties.  FLOPs: about 10 V.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int, UInt32

from infer.pallas.triton_call import check_launch, load, store, triton_call


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessLogitsBlocks:
    """Logits a program owns, and its warps."""

    block: int = 1024
    num_warps: int = 4

    def __post_init__(self) -> None:
        """Check what Triton asks for."""
        if self.block < 32 or self.block & (self.block - 1):
            raise ValueError(f"block is {self.block}; use a power of two, 32 or more")
        check_launch(self.num_warps)


def _kernel(*refs: Any, block: int, with_mask: bool, with_counts: bool) -> None:
    # inputs:  logits [B, V], banned int32 [B, E], bias_ids int32 [B, C], bias f32 [B, C],
    #          mask uint32 [B, V / 32], counts int32 [B, V], penalties f32 [B, 3]
    # outputs: processed f32 [B, V]
    logits_ref, banned_ref, ids_ref, bias_ref, *rest, out_ref = refs
    mask_ref = rest.pop(0) if with_mask else None
    counts_ref, penalties_ref = rest if with_counts else (None, None)
    b, vocab = pl.program_id(0), logits_ref.shape[1]
    v = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    inside = v < vocab
    x = load(logits_ref, b, v, mask=inside, other=0.0).astype(jnp.float32)
    if mask_ref is not None:
        words = load(mask_ref, b, v // 32, mask=inside, other=np.uint32(0))
        bit = (words >> (v % 32).astype(jnp.uint32)) & np.uint32(1)
        x = jnp.where(bit == np.uint32(1), x, -jnp.inf)
    ban = lambda e, x: jnp.where(v == load(banned_ref, b, e), -jnp.inf, x)
    x = lax.fori_loop(0, banned_ref.shape[1], ban, x)
    add = lambda c, x: jnp.where(v == load(ids_ref, b, c), x + load(bias_ref, b, c), x)
    x = lax.fori_loop(0, ids_ref.shape[1], add, x)
    if counts_ref is not None:
        packed = load(counts_ref, b, v, mask=inside, other=0)
        repetition, frequency, presence = (load(penalties_ref, b, i) for i in range(3))
        count = packed >> 1
        x = jnp.where(packed > 0, jnp.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * count.astype(jnp.float32)
        x = jnp.where(count > 0, x - presence, x)
    store(out_ref, b, v, value=x, mask=inside)


def process_logits(
    logits: Float[Array, "B V"],
    banned: Int[Array, "B E"],
    bias_ids: Int[Array, "B C"],
    bias: Float[Array, "B C"],
    mask: UInt32[Array, "B W"] | None = None,
    counts: Int[Array, "B V"] | None = None,
    penalties: Float[Array, "B 3"] | None = None,
    *,
    blocks: ProcessLogitsBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "B V"]:
    """Return float32 logits after mask, bans, biases and penalties.

    Args:
        logits: raw logits.
        banned: ids that must not be drawn; V for none.
        bias_ids: ids whose logits are raised, V for none.
        bias: what is added to them.
        mask: bit v % 32 of word v // 32 says that v may be drawn; None allows all.
        counts: 2 x (how often v was generated) + (1 if v is in the prompt); None for no penalties.
        penalties: repetition, frequency and presence of each row; with `counts`.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: arrays do not fit the logits, a mask has too few words, or counts come without
            penalties.
    """
    batch, vocab = logits.shape
    if mask is not None and mask.shape[1] * 32 < vocab:
        raise ValueError(
            f"mask has {mask.shape[1]} words of 32 bits for a vocabulary of {vocab}; "
            f"it needs {-(-vocab // 32)}"
        )
    if (counts is None) != (penalties is None):
        raise ValueError("counts and penalties go together; one of them is None")
    want = {
        "banned": (banned, (batch, banned.shape[1])),
        "bias_ids": (bias_ids, (batch, bias.shape[1])),
        "bias": (bias, (batch, bias.shape[1])),
        "mask": (mask, (batch, -1 if mask is None else mask.shape[1])),
        "counts": (counts, (batch, vocab)),
        "penalties": (penalties, (batch, 3)),
    }
    for name, (array, shape) in want.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} is {array.shape}; with logits {logits.shape} it must be {shape}"
            )
    blocks = blocks or ProcessLogitsBlocks()
    optional = [x for x in (mask, counts, penalties) if x is not None]
    # Triton has no arrays of size 0: one id that is none.
    none = lambda x, fill: x if x.shape[1] else jnp.full((batch, 1), fill, x.dtype)
    return triton_call(
        functools.partial(
            _kernel,
            block=blocks.block,
            with_mask=mask is not None,
            with_counts=counts is not None,
        ),
        logits,
        none(banned, vocab),
        none(bias_ids, vocab),
        none(bias, 0.0),
        *optional,
        name="process_logits",
        grid=(batch, -(-vocab // blocks.block)),
        out_shape=jax.ShapeDtypeStruct((batch, vocab), jnp.float32),
        num_warps=blocks.num_warps,
        interpret=interpret,
    )


def process_logits_reference(
    logits: Array,
    banned: Array,
    bias_ids: Array,
    bias: Array,
    mask: Array | None = None,
    counts: Array | None = None,
    penalties: Array | None = None,
) -> Array:
    """Compute the same with scatters, in plain jnp."""
    x = logits.astype(jnp.float32)
    batch, vocab = x.shape
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    if mask is not None:
        bits = jnp.unpackbits(
            lax.bitcast_convert_type(mask, jnp.uint8).reshape(batch, -1), axis=1, bitorder="little"
        )
        x = jnp.where(bits[:, :vocab] == 1, x, -jnp.inf)
    x = x.at[rows, banned].set(-jnp.inf, mode="drop")
    x = x.at[rows, bias_ids].add(bias, mode="drop")
    if counts is None or penalties is None:
        return x
    r, f, p = (penalties[:, i : i + 1] for i in range(3))
    seen, count = counts != 0, (counts // 2).astype(jnp.float32)
    x = jnp.where(seen & (x > 0), x / r, jnp.where(seen, x * r, x))
    return x - f * count - jnp.where(count > 0, p, 0.0)
