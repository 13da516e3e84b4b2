"""RMSNorm on the CPU where it is not part of a product: of queries and keys, after a block, before
the head.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from infer import native


def rms_norm(x: Float[Array, "T D"], gain: Float[Array, " D"], eps: float) -> Float[Array, "T D"]:
    """Return x / sqrt(mean(x^2) + eps) * gain, float32; a row has the same bits in any batch.

    Raises:
        NotImplementedError: the native operations cannot be used here, or x is not float32.
    """
    native.library()
    if x.dtype != jnp.float32:
        raise NotImplementedError(f"rms_norm in native: x of {x.dtype}, not float32")
    call = jax.ffi.ffi_call(
        "infer_rms_norm", jax.ShapeDtypeStruct(x.shape, jnp.float32), vmap_method="sequential"
    )
    return call(x, gain.astype(jnp.float32), eps=np.float32(eps))
