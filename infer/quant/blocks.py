"""Decoders of GGUF's packed blocks: which there are, and the host path.

A decoder takes bytes [..., block_bytes] and returns float32 [..., group].  It is written once for
numpy and for jax.numpy: `decode(xp, blocks)`.

Every product is exact in float32: a float16 has 11 significant bits, a sub-scale at most 7 and a
code beside it at most 7 (Q6_K: 7 and 5; IQ4_XS: 5 and 7), 23 of 24 in all.  Only the one addition
of a minimum rounds, so a compiler that contracts it into a fused multiply-add gives the same bits,
and the host, a jitted program and gguf-py agree.

A new format is one decoder in the module of its kind and one line in `DECODERS`.  Not decoded:
Q8_1 and Q8_K are intermediates of ggml's dot products, which no file holds; Q1_0 is too new for an
independent decoder to check one of ours.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt8

from infer.quant import i_quants, k_quants, legacy, microscaling, ternary
from infer.quant.bits import XpArray
from infer.quant.formats import GGML_TYPES, Format

# Weights that one step of the host path decodes: enough to hide numpy's cost per call.  With more,
# the step's temporaries pass the size at which glibc gives freed memory back to the system, and
# faulting it in again at each step made decoding 3 to 8 times slower (measured from 49152 on).
_CHUNK_WEIGHTS = 1 << 15

DECODERS: dict[str, Callable[[Any, XpArray], XpArray]] = {
    "F32": legacy.f32,
    "F16": legacy.f16,
    "BF16": legacy.bf16,
    "Q4_0": legacy.q4_0,
    "Q4_1": legacy.q4_1,
    "Q5_0": legacy.q5_0,
    "Q5_1": legacy.q5_1,
    "Q8_0": legacy.q8_0,
    "Q2_K": k_quants.q2_k,
    "Q3_K": k_quants.q3_k,
    "Q4_K": k_quants.q4_k,
    "Q5_K": k_quants.q5_k,
    "Q6_K": k_quants.q6_k,
    "IQ1_S": i_quants.iq1_s,
    "IQ1_M": i_quants.iq1_m,
    "IQ2_XXS": i_quants.iq2_xxs,
    "IQ2_XS": i_quants.iq2_xs,
    "IQ2_S": i_quants.iq2_s,
    "IQ3_XXS": i_quants.iq3_xxs,
    "IQ3_S": i_quants.iq3_s,
    "IQ4_NL": i_quants.iq4_nl,
    "IQ4_XS": i_quants.iq4_xs,
    "TQ1_0": ternary.tq1_0,
    "TQ2_0": ternary.tq2_0,
    "MXFP4": microscaling.mxfp4,
    "NVFP4": microscaling.nvfp4,
}

# The formats that can be decoded, by name.
FORMATS: dict[str, Format] = {f.name: f for f in GGML_TYPES.values() if f.name in DECODERS}


def decode_blocks(xp: Any, blocks: XpArray, format: Format) -> XpArray:
    """Return float32 [..., group], the weights of packed blocks uint8 [..., block_bytes].

    Args:
        xp: `numpy` for arrays on the host, `jax.numpy` for JAX arrays and tracers.
        blocks: Whole blocks along the last axis.
        format: One of `FORMATS`.

    Raises:
        ValueError: The format has no decoder.
    """
    decode = DECODERS.get(format.name)
    if decode is None or format.layout != "blocks":
        raise ValueError(
            f"{format.name} ({format.layout}) has no block decoder; use one of"
            f" {', '.join(DECODERS)}"
        )
    return decode(xp, blocks)


def dequantize_numpy(
    data: UInt8[np.ndarray, "..."],
    format: Format,
    shape: tuple[int, ...],
    dtype: Any = np.float32,
) -> Shaped[np.ndarray, "..."]:
    """Decode a packed tensor on the host, a cache-sized chunk at a time.

    Needs the result and about 1 MiB beside it, whatever the size; `data` may be a view of a mapped
    file.

    Args:
        data: The packed rows, contiguous, whatever axes they are cut into.
        format: One of `FORMATS`.
        shape: The tensor's logical shape; its last axis holds whole blocks.
        dtype: Of the result; the float32 value is cast once.

    Returns:
        The weights [*shape].

    Raises:
        ValueError: The format has no decoder, or `data` does not hold `shape`.
    """
    num_weights = math.prod(shape)
    row_bytes = format.row_bytes(shape[-1] if shape else 1)
    wanted = math.prod(shape[:-1]) * row_bytes
    if data.nbytes != wanted:
        raise ValueError(
            f"{data.nbytes} bytes do not hold {format.name} of shape {shape}, which takes {wanted};"
            " pass the tensor's own bytes and shape"
        )
    blocks = data.reshape(-1, format.block_bytes)
    out = np.empty((num_weights // format.group, format.group), dtype)
    step = max(1, _CHUNK_WEIGHTS // format.group)
    # A broken scale is infinite or NaN, and so are its weights: that is the value, not an event to
    # warn about.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(out), step):
            out[start : start + step] = decode_blocks(np, blocks[start : start + step], format)
    return out.reshape(shape)
