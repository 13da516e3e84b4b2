"""From logits to tokens on the CPU: log-sum-exp, and the draw with top_k, top_p and min_p.

The sets are exact: a histogram of (x - max x) / T finds the bin that holds a set's edge, and the
entries of that bin alone are sorted.  The noise is that of `jax.random.gumbel`, computed for the
kept ids only, so a token is the one that `infer.sampling.sample` draws.  What separates two
candidates by less than the rounding of a logarithm or of a sum of probabilities can fall
differently.  Rows without an answer have the token that `infer.sampling.sample` gives them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, UInt32

from infer import native


def logsumexp(logits: Float[Array, "B V"]) -> Float[Array, " B"]:
    """Return log(sum(exp(logits))) of each row, float32; NaN for a row with NaN.

    Raises:
        NotImplementedError: the native operations cannot be used here, or `logits` is not float32.
    """
    _check(logits)
    call = jax.ffi.ffi_call(
        "infer_logsumexp",
        jax.ShapeDtypeStruct((logits.shape[0],), jnp.float32),
        vmap_method="sequential",
    )
    return call(logits)


def sample(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    key_data: UInt32[Array, "B W"],
    *,
    greedy_below: float,
) -> Int[Array, " B"]:
    """Return one token a row.

    Args:
        logits: processed logits, -inf for what must not be drawn.
        temperature: of each row; below `greedy_below` the row's token is the argmax, lowest id
            first.
        top_k: keep so many; below 1 or V or more keeps all.
        top_p: keep the likeliest up to this mass; 1 keeps all.
        min_p: keep what is at least so likely relative to the likeliest; 0 keeps all.
        key_data: threefry key of each row's draw, two words.
        greedy_below: temperatures under this are 0.

    Raises:
        NotImplementedError: the native operations cannot be used here, `logits` is not float32, or
            the keys are not those of partitionable threefry, whose noise this draws.
    """
    _check(logits)
    if key_data.shape[1] != 2 or not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"sample in native: keys of {key_data.shape[1]} words, jax_threefry_partitionable="
            f"{jax.config.jax_threefry_partitionable}; "  # type: ignore[attr-defined]
            "it draws the noise of partitionable threefry (JAX's default)"
        )
    call = jax.ffi.ffi_call(
        "infer_sample",
        jax.ShapeDtypeStruct((logits.shape[0],), jnp.int32),
        vmap_method="sequential",
    )
    f32 = lambda x: x.astype(jnp.float32)
    return call(
        logits,
        f32(temperature),
        f32(top_p),
        jnp.log(f32(min_p)),
        top_k.astype(jnp.int32),
        key_data,
        greedy_below=np.float32(greedy_below),
    )


def _check(logits: Array) -> None:
    native.library()
    if logits.dtype != jnp.float32:
        raise NotImplementedError(f"sampling in native: logits of {logits.dtype}, not float32")
