"""`score(params, tokens)`: log-probabilities of given tokens."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from infer.backend import DeviceLike, find_device, on_device, place
from infer.cache.pool import kv_dtype_name
from infer.errors import ConfigError, RequestError
from infer.generation.prepare import RunOptions
from infer.generation.pure import generate_pure
from infer.models import decoder
from infer.models.params import Params
from infer.ops.choice import check_implementation
from infer.sampling import SamplingParams

# Tokens whose logits are in memory at a time: 67 MB of them with a vocabulary of 262,144.
_CHUNK = 64


def score(
    params: Params,
    tokens: Int[Array, "B S"],
    *,
    paged: bool = False,
    implementation: str | None = None,
    kv_dtype: DTypeLike | None = None,
    device: DeviceLike = None,
) -> Float[Array, "B S1"]:
    """Return log p(token t+1 | tokens 0..t) [B, S - 1], float32, differentiable in `params`.

    The distribution is the raw model's, before any temperature or filter.  Logits of a few tokens
    at a time are in memory, backwards too.  Padding on the right is scored like any token: drop its
    entries.  Rotary scalings that depend on a length take S.

    Args:
        params: weights.
        tokens: ids, every row full.
        paged: run through the page cache as a prompt of `generate` does, in chunks: attention's
            memory does not grow with S squared.  Not differentiable.
        implementation: as in `generate`.  The Triton form of attention, which a GPU takes without
            `paged` too, recomputes scores in the backward pass: its memory does not grow with S
            squared either.
        kv_dtype: of cached keys and values, as in `generate`; with `paged` only.
        device: where to compute, and where the result stays: a jax.Device, "cpu", "gpu", "cpu:1".
            Weights that lie elsewhere are copied there for this call.  None computes where the
            weights are.  Not inside a trace, gradients included.

    Raises:
        ConfigError: there is no such device or kv_dtype, kv_dtype without `paged`, or a trace
            decides where to run.
    """
    if not isinstance(params, Params):
        raise RequestError(f"params is a {type(params).__name__}; pass model.params")
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise RequestError(
            f"tokens is {tokens.dtype}{list(tokens.shape)}; pass integer ids [B, S], every row "
            "full: what pads a row would be scored too"
        )
    if 0 in tokens.shape:
        raise RequestError(f"tokens is {list(tokens.shape)}; give at least one row of one token")
    check_implementation(implementation)
    kv_name = kv_dtype_name(kv_dtype)
    if kv_name is not None and not paged:
        raise ConfigError(
            f"kv_dtype is {kv_name!r} without paged=True; the dense form caches nothing: pass "
            "paged=True, or leave kv_dtype out"
        )
    target = find_device(device)
    (params, tokens), _ = place((params, tokens), target)
    with on_device(target):
        if paged:
            return _paged(params, tokens, implementation, kv_name)
        return _dense(params, tokens, implementation)


def _dense(
    params: Params, tokens: Int[Array, "B S"], implementation: str | None
) -> Float[Array, "B S1"]:
    batch, length = tokens.shape
    x = decoder.dense_states(params, tokens, None, implementation)
    x = x.reshape(batch, length, -1)[:, :-1]
    count = batch * (length - 1)
    pad = -count % _CHUNK
    rows = lambda y: jnp.pad(y.reshape(count, *y.shape[2:]), ((0, pad),) + ((0, 0),) * (y.ndim - 2))
    chunks = lambda y: rows(y).reshape(-1, _CHUNK, *y.shape[2:])

    # Recomputed in the backward pass, or the logits of all chunks would be kept for it.
    @jax.checkpoint
    def one(chunk: tuple[Array, Array]) -> Array:
        x, target = chunk
        y = jax.nn.log_softmax(decoder.logits(params, x, implementation), axis=-1)
        return jnp.take_along_axis(y, target[:, None], axis=-1, mode="clip")[:, 0]

    logprobs = lax.map(one, (chunks(x), chunks(tokens[:, 1:])))
    return logprobs.reshape(-1)[:count].reshape(batch, length - 1)


@functools.partial(jax.jit, static_argnames=("implementation", "kv_dtype"))
def _paged(
    params: Params,
    tokens: Int[Array, "B S"],
    implementation: str | None,
    kv_dtype: str | None,
) -> Float[Array, "B S1"]:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    options = RunOptions(implementation=implementation, kv_dtype=kv_dtype)
    run = generate_pure(params, tokens, None, sampling, None, None, options)
    return run.prompt_logprobs[:, 1:]
