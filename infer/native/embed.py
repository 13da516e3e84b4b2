"""Rows of a packed weight as floats: the embedding of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from infer import native
from infer.native.repack import Packed


def embed(weight: Packed, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Return the rows `tokens` of a packed weight [V, D], float32, as `dequantize` gives them.

    Args:
        weight: packed.
        tokens: ids; one outside [0, V) takes the nearest row.

    Raises:
        NotImplementedError: the native operations cannot be used here.
    """
    native.library()
    call = jax.ffi.ffi_call(
        "infer_embed",
        jax.ShapeDtypeStruct((tokens.shape[0], weight.shape[1]), jnp.float32),
        vmap_method="sequential",
    )
    return call(
        tokens.astype(jnp.int32),
        weight.data,
        format=np.int64(weight.number),
        out=np.int64(weight.shape[0]),
    )
