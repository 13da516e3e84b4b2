"""SpinQuant: rotations R1 and R2 that make what is rounded lose least, learned on calibration text.

    R = C(A) R_0,   C(A) = (I + A / 2)^-1 (I - A / 2),   A = -A^T

R_0 is QuaRot's; Cayley's C maps every skew A to a rotation, so Adam (optax) moves A freely and the
model stays the same in floats at every step.  The loss is that of the next token, through weights
and activations rounded as the methods say, with straight-through gradients.

Source: arXiv 2405.16406 (Cayley SGD, 100 steps); Adam on the exponents of one map is ours.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from infer.errors import ConfigError
from infer.models import decoder
from infer.models.params import LayerParams, Params
from infer.ops.rounded_input import RoundedInput, straight_through
from infer.quant.formats import PlanarFormat
from infer.quant.hadamard import transform
from infer.quant.methods import GPTQ, RTN, Method
from infer.quant.qarray import dequantize
from infer.quantization import rotation
from infer.quantization.recipe import MATRICES, Recipe, matrices
from infer.quantization.rotation import Rotations, hadamard_rotations

# Entries of A reach a few hundredths in 100 steps.
LEARNING_RATE = 1e-3
STEPS = 100
# Sequences of a step, and their length.
_BATCH, _LENGTH = 2, 256


@dataclasses.dataclass(frozen=True)
class Learned:
    """Rotations and how the loss went: nats a token at each step, before it."""

    rotations: Rotations
    losses: tuple[float, ...]


def learn(
    params: Params,
    method: Method | Mapping[str, Method | None] | Recipe,
    tokens: Int[np.ndarray, "N S"],
    *,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    start: Rotations | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Learned:
    """Return rotations learned for a model that will be quantised so.

    Deterministic.  Where GPTQ rounds the weights, and activations are rounded too, only those are
    while learning, as the paper has it: GPTQ makes up for most of what weights lose.  All of the
    model's floats and their gradients are in memory: about 12 bytes a weight.

    Args:
        params: weights, floats or GGUF blocks.
        method: as of `infer.quantize`; RTN or GPTQ.
        tokens: calibration ids.
        steps: of the optimiser.
        learning_rate: of Adam, falling to 0 as a cosine.
        seed: of the start and of the order of the text.
        start: rotations to begin from; None is `hadamard_rotations`.
        progress: called with (steps done, loss).

    Raises:
        ConfigError: the model cannot be turned, another method, too little text, optax is not
            installed.
    """
    try:
        import optax
    except ImportError:
        raise ConfigError(
            "SpinQuant learns with optax, which is not installed; pip install 'infer[train]'"
        ) from None
    config = params.config
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"steps is {steps!r:.40}; use a count of 1 or more")
    turn_values = config.head_dim & (config.head_dim - 1) == 0
    first = hadamard_rotations(config, seed, values=turn_values) if start is None else start
    first = rotation.checked(config, first)
    shapes = {path: (w.shape[0], w.shape[1]) for path, w in matrices(params).items()}
    methods = Recipe.of(method).methods(shapes)
    for path, each in methods.items():
        if type(each) not in (RTN, GPTQ):
            raise ConfigError(
                f"{path} has the method {type(each).__name__}, and rotations are learned for RTN"
                " and GPTQ; use one of them, or QuaRot's rotations"
            )
    batches = _batches(np.asarray(tokens), steps, seed)
    base = _floats(params)
    exponents = {
        name: jnp.zeros(r.shape, jnp.float32)
        for name in ("residual", "values")
        if (r := getattr(first, name)) is not None
    }
    r0 = {name: jnp.asarray(getattr(first, name), jnp.float32) for name in exponents}
    optimiser = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    @jax.jit
    def step(base: Params, exponents: Any, state: Any, ids: Array) -> tuple[Any, Any, Array]:
        of = lambda a: _loss(base, methods, {n: _turned_from(a[n], r0[n]) for n in a}, ids)
        loss, grads = jax.value_and_grad(of)(exponents)
        with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
            updates, state = optimiser.update(grads, state, exponents)
        return optax.apply_updates(exponents, updates), state, loss

    state, losses = optimiser.init(exponents), []
    for nth, ids in enumerate(batches):
        exponents, state, loss = step(base, exponents, state, jnp.asarray(ids, jnp.int32))
        losses.append(float(loss))
        if not np.isfinite(losses[-1]):
            raise ConfigError(
                f"the loss of step {nth + 1} is {losses[-1]}; use a smaller learning rate, or look"
                " for broken weights"
            )
        if progress is not None:
            progress(nth + 1, losses[-1])
    made = {name: _orthonormal(_turned_from(exponents[name], r0[name])) for name in exponents}
    return Learned(Rotations(**made), tuple(losses))


def _batches(tokens: np.ndarray, steps: int, seed: int) -> np.ndarray:
    """Return ids [steps, B, S] of the text, in a random order, again where it is short."""
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or tokens.shape[1] < 2:
        raise ConfigError(f"tokens is {tokens.dtype}{list(tokens.shape)}; pass token ids [N, S]")
    length = min(_LENGTH, tokens.shape[1])
    flat = tokens[:, : tokens.shape[1] // length * length].reshape(-1, length)
    order = np.random.default_rng(seed).permutation(len(flat))
    return flat[np.resize(order, steps * _BATCH)].reshape(steps, _BATCH, length)


def _floats(params: Params) -> Params:
    """Return the model with float matrices, gains folded nowhere yet."""
    head = params.embed if params.lm_head is None else params.lm_head
    f32 = lambda w: jnp.asarray(w, jnp.float32) if hasattr(w, "dtype") else dequantize(w)
    layers = tuple(rotation.floats(w, f"layers.{i}") for i, w in enumerate(params.layers))
    config = dataclasses.replace(params.config, tied_embeddings=False)
    new = dataclasses.replace(params, embed=f32(params.embed), lm_head=f32(head), config=config)
    return dataclasses.replace(new, layers=layers, final_norm=f32(params.final_norm))


def _turned_from(a: Float[Array, "*L I I"], start: Float[Array, "*L I I"]) -> Array:
    """Return C(A) R_0, A the skew part of `a`."""
    skew = (a - a.swapaxes(-1, -2)) / 2
    eye = jnp.eye(a.shape[-1], dtype=a.dtype).reshape((1,) * (a.ndim - 2) + (a.shape[-1],) * 2)
    return jnp.linalg.solve(eye + skew / 2, (eye - skew / 2) @ start)


def _orthonormal(r: Float[Array, "*L I I"]) -> np.ndarray:
    """Return the nearest orthonormal matrices, float64."""
    u, _, v = np.linalg.svd(np.asarray(r, np.float64))
    return u @ v


def _loss(
    base: Params, methods: Mapping[str, Method], r: Mapping[str, Array], ids: Array
) -> Float[Array, ""]:
    """Return the mean loss of next tokens of the model turned by `r` and rounded, in nats."""
    turned = dict(r)
    layers = tuple(
        _rounded_layer(base, w, f"layers.{i}", methods, turned, i)
        for i, w in enumerate(base.layers)
    )
    ends: dict[str, Any] = {}
    if (r1 := turned.get("residual")) is not None:
        ends["embed"] = base.embed @ r1.T
        ends["lm_head"] = (base.lm_head * base.final_norm[None, :]) @ r1.T
        ends["final_norm"] = jnp.ones_like(base.final_norm)
        if base.positions is not None:
            ends["positions"] = base.positions @ r1.T
    for name in ("embed", "lm_head"):
        if name in methods:
            ends[name] = _rounded(methods[name], ends.get(name, getattr(base, name)))
    model = dataclasses.replace(base, layers=layers, **ends)
    scores = jax.nn.log_softmax(decoder.forward(model, ids, None, "xla")[:, :-1], axis=-1)
    return -jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1).mean()


def _rounded_layer(
    base: Params,
    w: LayerParams,
    path: str,
    methods: Mapping[str, Method],
    r: Mapping[str, Array],
    index: int,
) -> LayerParams:
    """Return a layer turned and rounded."""
    config = base.config
    names = (*MATRICES, "v_bias", "o_bias", "down_bias")
    now = {name: v for name in names if (v := getattr(w, name)) is not None}
    kept: dict[str, Any] = {}
    if "values" in r:
        now |= rotation.turn_values(jnp, now, r["values"][index])
    if "residual" in r:
        gains = {n: g for n in ("attn_norm", "mlp_norm") if (g := getattr(w, n)) is not None}
        now |= rotation.turn_residual(config, now, gains, r["residual"])
        kept = {norm: jnp.ones_like(gain) for norm, gain in gains.items()}
    for name in MATRICES:
        method = methods.get(f"{path}.{name}")
        if name in now and method is not None:
            now[name] = _rounded_weight(method, now[name])
    return dataclasses.replace(w, **now, **kept)


@functools.partial(jax.jit, static_argnames=("method",))
def _rounded(method: Method, w: Float[Array, "O I"]) -> Float[Array, "O I"]:
    """Return a weight rounded to nearest, its gradient that of the weight."""
    return straight_through(w, dequantize(method.pack(jax.lax.stop_gradient(w))))


def _rounded_weight(method: Method, w: Float[Array, "O I"]) -> RoundedInput:
    """Return a weight, rounded to nearest or as it is (see `learn`), for inputs that its product
    turns and rounds.
    """
    format = method.format_for((w.shape[0], w.shape[1]))
    assert isinstance(method, RTN) and isinstance(format, PlanarFormat)
    w = transform(w, format.rotated) if format.rotated else w
    weight = w
    if type(method) is RTN or not format.activations:
        weight = _rounded(dataclasses.replace(method, hadamard=None), w)
    return RoundedInput(weight, activations=format.activations, rotated=format.rotated)
